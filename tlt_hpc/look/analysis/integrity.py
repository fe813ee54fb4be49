"""Checks a run's files: checksums of all logs, all ranks of each step, lines of metrics.jsonl and small files.

Checkpoints and feature caches are checked by the starts that load them. ``repair`` removes an incomplete last line of
metrics.jsonl and changes nothing else; it commits no step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import LINES_BYTES, DamagedText, parse_object, read_bytes, read_toml, told
from tlt_hpc.common.words import count
from tlt_hpc.look.analysis.base import Analysis
from tlt_hpc.look.analysis.processes import map_tasks
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.words import listed
from tlt_hpc.storage.environment_lines import read_environments
from tlt_hpc.storage.finished_word import read_finished
from tlt_hpc.storage.folder import PART_SUFFIX, RunFolder, writing_beside
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.log_columns import check_whole, read_columns
from tlt_hpc.storage.rollout_log import KIND

_SHOWN_BYTES = 60
ALWAYS = (
    "critic/score/mean", "response_length/mean", "response_length/max", "drafter/spec_decode/mean_acceptance_length",
    "rollout/seconds", "rollout/idle_rank_seconds", "rollout/harvested_rank_seconds", "perf/total_num_tokens",
    "timing_s/step",
)  # fmt: skip
"""Metrics that every line has."""


@dataclass(frozen=True)
class Integrity(Analysis):
    """What was checked, and what is wrong. ``is_sound``: all faults, if any, are such that a resumed run fixes them."""

    schema: int
    num_files: int
    num_bytes: int
    """Size on disk of the logs that were read."""
    read_whole: bool
    """Whether every array was read; otherwise only the attributes."""
    num_lines: int
    damaged: tuple[str, ...]
    missing: tuple[str, ...]
    """Missing logs of steps that have a line or are not the last."""
    under_way: tuple[int, ...]
    """Steps with logs but no line, which are not committed."""
    without_logs: tuple[int, ...]
    """Steps with a line but no logs."""
    parts: tuple[str, ...]
    """Unfinished files: a run is writing them, or was killed while it did."""
    torn_tail: str
    """The incomplete last line of metrics.jsonl."""
    lines: tuple[str, ...]
    """Other faults of metrics.jsonl."""
    num_documents: int
    documents: tuple[str, ...]
    """Faults of the run's small files."""

    @property
    def verdict(self) -> str:
        return _verdict(self)

    @property
    def faults(self) -> tuple[str, ...]:
        """One line for each fault."""
        return (*self.damaged, *self.missing, *self.lines, *self.documents)

    @property
    def is_sound(self) -> bool:
        return not (self.faults or self.without_logs or self.torn_tail)


def analyse_integrity(run: RunLog, read_whole: bool = True) -> Integrity:
    """Check every file; ``read_whole`` reads all of its content."""
    num_bytes = 0
    damaged, missing = list[str](), list[str]()
    lines = run.lines
    tasks = [(step, run.files(step)) for step in run.logged_steps]
    num_files = sum(len(files) for _, files in tasks)
    for (step, files), seen in zip(
        tasks, map_tasks(partial(_check_step, read_whole=read_whole), tasks, num_files), strict=True
    ):
        size, num_ranks, faults = seen
        num_bytes += size
        damaged += faults
        absent = sorted(set(range(num_ranks)) - set(files))
        if absent and (step in lines or step != run.logged_steps[-1]):
            missing.append(f"step {step}: no log of rank {', '.join(map(str, absent))}")
    num_documents, documents = _check_documents(run.folder)
    return Integrity(
        run=run.name,
        problems=run.problems,
        schema=KIND.schema,
        num_files=num_files,
        num_bytes=num_bytes,
        read_whole=read_whole,
        num_lines=len(lines),
        damaged=tuple(damaged),
        missing=tuple(missing),
        under_way=tuple(step for step in run.logged_steps if step not in lines),
        without_logs=tuple(step for step in lines if step not in run.logged_steps),
        parts=tuple(str(path) for path in sorted(run.folder.path.rglob(f"*{PART_SUFFIX}"))),
        torn_tail=_torn_tail(run).decode(errors="replace"),
        lines=tuple(_faults_of_lines(run)),
        num_documents=num_documents,
        documents=tuple(documents),
    )


def repair(run: RunLog, say: Callable[[str], None]) -> bool:
    """Remove an incomplete last line of metrics.jsonl, and ``say`` what is removed; False if there is none.

    The removed text is kept in ``metrics.torn``. A line that lacks only its line feed is complete and stays.

    Raises:
        UserError: the file has changed since it was read, because a run is active.
        WriteError: no space or no permission; the file is unchanged.
    """
    path = run.folder.metrics
    count_lines = len(run.lines)
    torn = _torn_tail(run)
    if not torn:
        say("nothing to repair: metrics.jsonl has no torn last line")
        return False
    shown = torn[:_SHOWN_BYTES].decode(errors="replace") + ("..." if len(torn) > _SHOWN_BYTES else "")
    say(
        f"{path}: taking off its last {count(len(torn), 'byte')}, a line that was cut off ({shown!r}); "
        f"{count(count_lines, 'committed step')} before it stay; kept as {path.with_suffix('.torn').name}"
    )
    data = read_bytes(path, LINES_BYTES)
    if not data.endswith(b"\n" + torn) and data != torn:
        raise UserError(f"{path} has changed since it was read: a run is at work there; repair it when that has ended")
    with path.with_suffix(".torn").open("ab") as kept:
        kept.write(torn + b"\n")
        kept.flush()
        os.fsync(kept.fileno())
    with writing_beside(path) as part:
        part.write_bytes(data[: len(data) - len(torn)])
    return True


def _torn_tail(run: RunLog) -> bytes:
    return run.step_lines.torn[1] if run.step_lines.torn else b""


def _faults_of_lines(run: RunLog) -> Iterator[str]:
    """Faults of metrics.jsonl: invalid lines, steps out of order or missing, missing metrics."""
    path, found = run.folder.metrics, run.step_lines
    try:
        read_bytes(path, LINES_BYTES)
    except FileNotFoundError:  # a partial copy, or no step is committed yet
        return
    except OSError as error:
        yield told(error)
    for number, why in found.faults:
        yield f"{path}:{number} is no line that a run writes ({why})"
    before: int | None = None
    for number, step, line in found.numbered:
        if before is not None and step != before + 1:
            yield f"{path}:{number} is of step {step}, and the line before it of step {before}"
        before = step
        if missing := [name for name in ALWAYS if name not in line]:
            yield f"{path}:{number} has no {listed(missing)}"


def _read_object(path: Path) -> object:
    return parse_object(read_bytes(path))


def _check_documents(folder: RunFolder) -> tuple[int, list[str]]:
    """Number of small files, and their faults."""
    faults, num_found = list[str](), 0
    readers: dict[Path, Callable[[Path], object]] = {
        folder.config: read_toml,
        folder.finished: read_finished,
        **dict.fromkeys((folder.cost_profile, folder.data, folder.tracking), _read_object),
    }
    for path, read in readers.items():
        try:
            read(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            faults.append(told(error))
        except UserError as error:
            faults.append(str(error))
        except DamagedText as error:
            faults.append(f"{path} is damaged ({error})")
        num_found += 1
    starts, problems = read_environments(folder.environment)
    return num_found + len(starts), faults + problems


def _check_step(task: tuple[int, dict[int, Path]], read_whole: bool) -> tuple[int, int, list[str]]:
    """Bytes and faults of a step's logs, and the number of ranks that they name: bytes, ranks, faults."""
    step, files = task
    num_bytes, num_ranks, faults = 0, 0, list[str]()
    for rank, path in files.items():
        try:
            log = read_columns(path, ("rollouts/response_ends",))
            num_ranks = max(num_ranks, log.num_ranks)
            if (log.step, log.rank) != (step, rank):
                faults.append(f"{path}: it is of step {log.step} and rank {log.rank}")
                continue
            if read_whole:
                check_whole(path)
            num_bytes += path.stat().st_size
        except (DamagedFile, FileNotFoundError) as error:
            faults.append(str(error))
    return num_bytes, num_ranks, faults


def _verdict(found: Integrity) -> str:
    how = "read whole, with their checksums" if found.read_whole else "opened; their payload was not read"
    looked = f"{count(found.num_files, 'log')} ({found.num_bytes / 2**20:,.1f} MiB, schema {found.schema}) {how}"
    faults = [
        f"{count(len(found.damaged), 'damaged file')}" if found.damaged else "",
        f"{count(len(found.missing), 'step')} without all ranks" if found.missing else "",
        f"{count(len(found.without_logs), 'committed step')} without logs" if found.without_logs else "",
        f"{count(len(found.lines), 'fault')} of metrics.jsonl" if found.lines else "",
        f"{count(len(found.documents), 'fault')} of small files" if found.documents else "",
        "a torn last line of metrics.jsonl (--repair takes it off)" if found.torn_tail else "",
    ]
    faults = [fault for fault in faults if fault]
    state = f"Not sound: {listed(faults)}." if faults else "All of these are sound."
    others = f"{count(found.num_lines, 'line')} of metrics, {count(found.num_documents, 'small file')}"
    notes = [f"{looked}, {others}; checkpoints and feature caches are not checked.", state]
    if found.under_way:
        notes.append(f"Not committed yet: step {', '.join(map(str, found.under_way[:4]))}.")
    if found.parts:
        notes.append(f"{count(len(found.parts), 'file')} half written: a run is at work, or was killed at it.")
    return " ".join(notes)
