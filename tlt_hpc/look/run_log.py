"""Reads a run's folder for everything that shows runs. What cannot be read is noted as a problem and left out.

The folder may be a copy, or part of a run, and the run may still be active.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import (
    DOCUMENT_BYTES,
    LINES_BYTES,
    DamagedText,
    open_regular,
    os_error_text,
    read_bytes,
    read_last_lines,
    read_toml,
)
from tlt_hpc.look.text_format import format_first_few
from tlt_hpc.storage.folder import RunFolder, no_run_message, rank_of
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.records import Environment, FinishedRecord, read_environments, read_finished
from tlt_hpc.storage.rollout_log import StepRecord, StepSummary, read_step, read_summary
from tlt_hpc.storage.step_lines import Line, StepLines, check_step_numbering, parse_lines

RankFile = TypeVar("RankFile", StepRecord, StepSummary)


class RunLog:
    """The files of the run in folder ``path``. Each is read once, when it is first asked for.

    Args:
        last: read only this number of last steps; default all.
        until: read only steps before this one; default all.
        tail_bytes: read only this many last bytes of metrics.jsonl; default all.

    Raises:
        UserError: the folder holds no run, or an earlier version's, which counted steps from 0.
    """

    def __init__(
        self, path: Path, last: int | None = None, tail_bytes: int | None = None, until: int | None = None
    ) -> None:
        self.folder = RunFolder(path)
        self._last, self._tail_bytes, self._until = last, tail_bytes, until
        self._problems: dict[str, None] = {}
        if not self.folder.rollouts.is_dir() and not self.folder.metrics.is_file():
            raise UserError(no_run_message(path))
        if self.step_lines.faults and not self.step_lines.numbered and not self.logged_steps:
            raise UserError(f"{path} is no run's folder: no line of its metrics.jsonl is one that a run writes")

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.folder.path.resolve().name.encode(errors="replace").decode()  # file names need not be valid text

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for each thing that could not be read so far."""
        return tuple(self._problems)

    def add_problem(self, problem: str) -> None:
        """Add a problem, once."""
        self._problems[problem] = None

    @cached_property
    def logged_steps(self) -> tuple[int, ...]:
        """Steps with at least one rank's finished log, ascending."""
        try:
            steps = self.folder.rollout_steps()
        except OSError as error:
            self.add_problem(os_error_text(error))
            return ()
        if self._last and self.lines:
            steps = [step for step in steps if step >= min(self.lines)]
        elif self._last:
            steps = steps[-self._last :]
        return tuple(step for step in steps if self.files(step))

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The logged steps that are committed; all logged steps if metrics.jsonl has no line.

        A run that resumed from an earlier step may have left logs of later steps, which are not part of it.
        """
        if not self.lines:
            return self.logged_steps
        left = [step for step in self.logged_steps if step not in self.lines]
        if left:
            self.add_problem(
                f"not committed, and left out: the logs of step {format_first_few([step + 1 for step in left])}"
            )
        return tuple(step for step in self.logged_steps if step in self.lines)

    def files(self, step: int) -> dict[int, Path]:
        """Paths of a step's finished logs, by rank."""
        try:
            return {rank_of(path): path for path in self.folder.rollout_logs(step)}
        except OSError as error:
            self.add_problem(os_error_text(error))
            return {}

    @cached_property
    def step_lines(self) -> StepLines:
        """The lines of metrics.jsonl in file order, and what is wrong with the file."""
        path, tail = self.folder.metrics, self._tail_bytes
        try:
            with open_regular(path) as file:
                check_step_numbering(path, file.readline(DOCUMENT_BYTES))
            found = parse_lines(read_last_lines(path, tail) if tail else read_bytes(path, LINES_BYTES))
        except FileNotFoundError:  # no step is committed yet
            return StepLines((), (), None)
        except OSError as error:
            self.add_problem(os_error_text(error))
            return StepLines((), (), None)
        faults = [(number, f"is no line that a run writes ({why})") for number, why in found.faults]
        for number, fault in [*faults, (found.torn[0], "is cut off")] if found.torn else faults:
            place = f"a line at the end of {path}" if tail else f"{path}:{number}"
            self.add_problem(f"{place} {fault}, and is left out")
        return found

    @cached_property
    def lines(self) -> dict[int, Line]:
        """The lines of metrics.jsonl by step, ascending; the last one of a step that was repeated."""
        ordered = [(step, line) for step, line in self.step_lines.by_step.items() if self._covers(step)]
        return dict(ordered[-self._last if self._last else 0 :])

    @cached_property
    def dropped_lines(self) -> tuple[Line, ...]:
        """The lines of steps that were taken back and generated again."""
        found = list[Line]()
        path = self.folder.metrics
        for each in sorted(path.parent.glob(f"{path.stem}.dropped-*{path.suffix}")):
            try:
                lines = parse_lines(read_bytes(each, LINES_BYTES))
            except OSError as error:
                self.add_problem(os_error_text(error))
                continue
            found += [line for _, step, line in lines.numbered if self._covers(step)]
        return tuple(found)

    def _covers(self, step: int) -> bool:
        return self._until is None or step < self._until

    @property
    def is_whole(self) -> bool:
        """True if all steps are read, not the last ones alone."""
        return not self._last and not self._tail_bytes

    @property
    def num_lines_before(self) -> int:
        """Committed steps before those in ``lines``."""
        return len(self.step_lines.by_step) - len(self.lines)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration; empty if it cannot be read."""
        try:
            return read_toml(self.folder.config)
        except OSError as error:
            self.add_problem(os_error_text(error))
        except DamagedText as error:
            self.add_problem(f"{self.folder.config}: {error}")
        return {}

    def setting(self, section: str, name: str) -> Any:
        """A value of the configuration; None if it is missing."""
        table = self.config.get(section)
        return table.get(name) if isinstance(table, dict) else None

    def config_int(self, section: str, name: str) -> int:
        """A whole number of the configuration; 0 if it is missing or of another type."""
        value = self.setting(section, name)
        return value if isinstance(value, int) and value > 0 else 0

    @property
    def speculation_mode(self) -> str:
        """``plain``, ``ngram`` or ``full``; empty if unknown."""
        return str(self.setting("speculation", "mode") or "")

    def metric(self, name: str, steps: Sequence[int] | None = None) -> NDArray[np.float64]:
        """A metric by step, for ``steps`` or all lines, [S]; NaN where it is missing."""
        chosen = list(self.lines) if steps is None else steps
        values = [self.lines.get(step, {}).get(name) for step in chosen]
        return np.array([value if isinstance(value, (int, float)) else np.nan for value in values], np.float64)

    def mean(self, name: str) -> float:
        """Mean of a metric over the steps that have it; NaN if none has."""
        values = self.metric(name)
        return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")

    def total(self, name: str) -> float:
        """Sum of a metric over the steps that have it; 0 if none has."""
        values = self.metric(name)
        return float(values[np.isfinite(values)].sum())

    @cached_property
    def environments_of_starts(self) -> tuple[Environment, ...]:
        """The environment of each start of the run, oldest first."""
        found, problems = read_environments(self.folder.environment)
        for problem in problems:
            self.add_problem(problem)
        return tuple(found)

    @cached_property
    def finished_record(self) -> FinishedRecord | None:
        """The content of finished.json; None if the run has not finished, or the file is damaged."""
        try:
            return read_finished(self.folder.finished)
        except UserError as error:
            self.add_problem(str(error))
            return None

    def read_rank_summaries(self, step: int) -> list[StepSummary]:
        """Summaries of a step, one for each readable log, ascending."""
        return self._read(step, read_summary)

    def first_ranks_of_replicas(self, ranks: Sequence[StepSummary]) -> list[StepSummary]:
        """The first rank of each tensor-parallel replica: the others ran the same rounds, which count once."""
        size = self.config_int("rollout", "tensor_parallel") or 1
        return [rank for rank in ranks if rank.rank % size == 0]

    def read_rank_records(self, step: int) -> list[StepRecord]:
        """The whole logs of a step, one for each readable log, ascending."""
        return self._read(step, read_step)

    def last_whole_step(self) -> int | None:
        """The last step with the logs of all its ranks; if there is none, the last step with any."""
        for step in reversed(self.steps):
            ranks = self.read_rank_summaries(step)
            if ranks and len(ranks) == ranks[0].num_ranks:
                return step
        return self.steps[-1] if self.steps else None

    def _read(self, step: int, read: Callable[[Path], RankFile]) -> list[RankFile]:
        """Read the logs of a step, with one result for each readable log."""
        ranks = list[RankFile]()
        for path in self.files(step).values():
            try:
                ranks.append(read(path))
            except (DamagedFile, FileNotFoundError) as error:
                self.add_problem(str(error))
        num_ranks = max((rank.num_ranks for rank in ranks), default=0)
        if missing := sorted(set(range(num_ranks)) - {rank.rank for rank in ranks}):
            self.add_problem(
                f"step {step + 1}: no log of rank {format_first_few(missing)} ({len(missing)} of {num_ranks} ranks)"
            )
        return ranks
