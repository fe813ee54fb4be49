"""A run's files, as they lie there: steps, lines of metrics, ranks' logs. Names what it cannot read, and leaves it out.

Knows no figure. A folder may be a copy, and part of a run; a run may still be going on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import LINES_BYTES, DamagedText, read_bytes, read_toml, told
from tlt_hpc.common.records import NO_SPANS, EngineSpans
from tlt_hpc.storage.folder import RunFolder, rank_of
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.log_columns import Columns, read_columns
from tlt_hpc.storage.no_run import no_run
from tlt_hpc.storage.rollout_log import StepSummary, read_spans, read_summary
from tlt_hpc.storage.step_lines import Line, StepLines, parse_lines


class RunLog:
    """The files of one run below ``path``; ``problems`` grows by a line for each thing that could not be read.

    Args:
        last: so many last steps alone, of a run that is too large to read all of.

    Raises:
        UserError: there is no run.
    """

    def __init__(self, path: Path, last: int | None = None) -> None:
        self.folder = RunFolder(path)
        self._last = last
        self._problems: dict[str, None] = {}
        if not self.folder.rollouts.is_dir() and not self.folder.metrics.is_file():
            raise UserError(no_run(path))
        if self.step_lines.faults and not self.step_lines.numbered and not self.logged_steps:
            raise UserError(f"{path} is no run's folder: no line of its metrics.jsonl is one that a run writes")

    @property
    def name(self) -> str:
        return self.folder.path.resolve().name.encode(errors="replace").decode()  # a name of a file may be no text

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(self._problems)

    def note(self, problem: str) -> None:
        """Add a problem, once."""
        self._problems[problem] = None

    @cached_property
    def logged_steps(self) -> tuple[int, ...]:
        """Steps that have a folder with a rank's closed log in it, ascending."""
        try:
            steps = self.folder.rollout_steps()
        except OSError as error:
            self.note(told(error))
            return ()
        if self._last and self.lines:
            steps = [step for step in steps if step >= min(self.lines)]
        elif self._last:
            steps = steps[-self._last :]
        return tuple(step for step in steps if self.files(step))

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Those of them that are committed; all, where the folder has no line of any.

        A run that went on from an earlier step has left the logs of later ones, which are no part of it.
        """
        if not self.lines:
            return self.logged_steps
        left = [step for step in self.logged_steps if step not in self.lines]
        if left:
            shown = ", ".join(map(str, left[:8])) + (", ..." if len(left) > 8 else "")
            self.note(f"not committed, and left out: the logs of step {shown}")
        return tuple(step for step in self.logged_steps if step in self.lines)

    @property
    def replica_size(self) -> int:
        """Ranks that go through the same rounds together, of which the first tells."""
        parallel = self.setting("rollout", "tensor_parallel")
        return parallel if isinstance(parallel, int) and parallel > 0 else 1

    def speaks_for(self, rank: int) -> bool:
        """Whether a rank tells of its replica's rounds, which the others of it went through with it."""
        return rank % self.replica_size == 0

    def files(self, step: int) -> dict[int, Path]:
        """A step's closed logs by rank."""
        try:
            paths, others = self.folder.rollout_files(step)
        except OSError as error:
            self.note(told(error))
            return {}
        for other in others:
            self.note(f"{other}: no rank's log")
        return {rank_of(path): path for path in paths}

    @cached_property
    def step_lines(self) -> StepLines:
        """The lines of metrics.jsonl in their order, and what is no line."""
        path = self.folder.metrics
        try:
            found = parse_lines(read_bytes(path, LINES_BYTES))
        except OSError as error:
            self.note(told(error))
            return StepLines((), (), None)
        for number, why in found.faults:
            self.note(f"{path}:{number} is no line that a run writes ({why}), and is left out")
        if found.torn:
            self.note(f"{path}:{found.torn[0]} is cut off, and is left out")
        return found

    @cached_property
    def lines(self) -> dict[int, Line]:
        """The lines of metrics.jsonl by step, ascending; of a step that was done again, the last."""
        ordered = sorted(self.step_lines.by_step.items())
        return dict(ordered[-self._last if self._last else 0 :])

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration; empty where it cannot be read."""
        try:
            return read_toml(self.folder.config)
        except OSError as error:
            self.note(told(error))
        except DamagedText as error:
            self.note(f"{self.folder.config}: {error}")
        return {}

    def setting(self, section: str, name: str) -> Any:
        """A setting, or None where the configuration does not tell it."""
        table = self.config.get(section)
        return table.get(name) if isinstance(table, dict) else None

    def metric(self, name: str, steps: Sequence[int] | None = None) -> NDArray[np.float64]:
        """A figure by step, of ``steps`` or of all lines; NaN where a line or its figure is missing."""
        chosen = list(self.lines) if steps is None else steps
        return np.array([_number(self.lines.get(step, {}).get(name)) for step in chosen], np.float64)

    def ranks(self, step: int) -> list[StepSummary]:
        """A step's summaries, by rank."""
        summaries = []
        for path in self.files(step).values():
            try:
                summaries.append(read_summary(path))
            except (DamagedFile, FileNotFoundError) as error:
                self.note(str(error))
        missing = _missing(step, [s.rank for s in summaries], max((s.num_ranks for s in summaries), default=0))
        if missing:
            self.note(missing)
        return summaries

    def spans(self, step: int, rank: int) -> EngineSpans:
        """What a rank's engine did when; none where the file is damaged or of an earlier version."""
        try:
            return read_spans(self.folder.rollout_log(step, rank))
        except (DamagedFile, FileNotFoundError) as error:
            self.note(str(error))
            return NO_SPANS

    def columns(
        self, arrays: Sequence[str], attributes: Sequence[str] = (), steps: Sequence[int] | None = None
    ) -> Iterator[tuple[int, list[Columns]]]:
        """Columns of all ranks, step by step; a step of which nothing can be read is left out."""
        for step in self.steps if steps is None else steps:
            ranks, problems = read_ranks(step, self.files(step).values(), arrays, attributes)
            for problem in problems:
                self.note(problem)
            if ranks:
                yield step, ranks

    def last_whole_step(self) -> int | None:
        """The last step with the logs of all its ranks; the last with any where there is none."""
        for step in reversed(self.steps):
            files = self.files(step)
            try:
                if len(files) == read_columns(next(iter(files.values()))).num_ranks:
                    return step
            except (DamagedFile, FileNotFoundError):
                continue
        return self.steps[-1] if self.steps else None


def read_ranks(
    step: int, paths: Iterable[Path], arrays: Sequence[str], attributes: Sequence[str]
) -> tuple[list[Columns], list[str]]:
    """A step's columns by rank, of the files that can be read, and a line for each thing that cannot."""
    ranks, problems = list[Columns](), list[str]()
    for path in paths:
        try:
            ranks.append(read_columns(path, arrays, attributes))
        except (DamagedFile, FileNotFoundError) as error:
            problems.append(str(error))
    missing = _missing(step, [r.rank for r in ranks], max((r.num_ranks for r in ranks), default=0))
    return ranks, [*problems, missing] if missing else problems


def _missing(step: int, found: list[int], num_ranks: int) -> str:
    """Which ranks' logs are not there, in words; nothing where all are."""
    missing = sorted(set(range(num_ranks)) - set(found))
    if not missing:
        return ""
    shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return f"step {step}: no log of rank {shown} ({len(missing)} of {num_ranks} ranks)"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")
