"""Whether a run's files are whole: every log read with its checksums, every step with all its ranks, no torn line.

``repair`` takes a torn last line off metrics.jsonl and touches nothing else: it commits no step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.analysis.processes import map_tasks
from tlt_hpc.analysis.result import Analysis, count, listed
from tlt_hpc.analysis.run_log import RunLog
from tlt_hpc.errors import UserError
from tlt_hpc.storage.folder import PART_SUFFIX, writing_beside
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.log_columns import check_whole, read_columns
from tlt_hpc.storage.rollout_log import KIND

_SHOWN_BYTES = 60


@dataclass(frozen=True)
class Integrity(Analysis):
    """What was looked at, and what is wrong with it; ``is_sound`` where nothing is that a run cannot mend alone."""

    schema: int
    num_files: int
    num_bytes: int
    """On disk, of the logs that were read."""
    read_whole: bool
    """Whether every array was read; otherwise only what each file says of itself."""
    num_lines: int
    damaged: tuple[str, ...]
    missing: tuple[str, ...]
    """Of a step that has a line, or of one that is not the last: logs that are not there."""
    under_way: tuple[int, ...]
    """Steps with logs and no line: they are not committed."""
    without_logs: tuple[int, ...]
    """Steps with a line and no logs."""
    parts: tuple[str, ...]
    """Files half written: a run is at them, or was killed there."""
    torn_tail: str
    """What follows the last whole line of metrics.jsonl."""

    @property
    def is_sound(self) -> bool:
        return not (self.damaged or self.missing or self.without_logs or self.torn_tail)


def analyse_integrity(run: RunLog, read_whole: bool = True) -> Integrity:
    """Look at every file; ``read_whole`` reads all of it."""
    num_files = num_bytes = 0
    damaged, missing = list[str](), list[str]()
    lines = run.lines
    tasks = [_Task(step, run.files(step), read_whole) for step in run.logged_steps]
    for task, seen in zip(tasks, map_tasks(_look, tasks, sum(len(task.files) for task in tasks)), strict=True):
        num_files += len(task.files)
        num_bytes += seen.num_bytes
        damaged += seen.faults
        absent = sorted(set(range(seen.num_ranks)) - set(task.files))
        if absent and (task.step in lines or task.step != run.logged_steps[-1]):
            missing.append(f"step {task.step}: no log of rank {', '.join(map(str, absent))}")
    found = Integrity(
        run=run.name,
        verdict="",
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
        torn_tail=run.torn_tail.decode(errors="replace"),
    )
    return Integrity(**{**vars(found), "verdict": _verdict(found)})


def repair(run: RunLog, say: Callable[[str], None]) -> bool:
    """Take a torn last line off metrics.jsonl, after ``say`` has been told exactly what; False where there is none.

    What was taken off is kept beside, in ``metrics.torn``. A line that is whole but for its line feed is a step's and
    stays, as does everything else.

    Raises:
        UserError: the file has changed since it was read: a run is at work there.
        WriteError: no room or no permission; the file is as before.
    """
    path = run.folder.metrics
    count_lines = len(run.lines)
    torn = run.torn_tail
    if not torn:
        say("nothing to repair: metrics.jsonl has no torn last line")
        return False
    shown = torn[:_SHOWN_BYTES].decode(errors="replace") + ("..." if len(torn) > _SHOWN_BYTES else "")
    say(
        f"{path}: taking off its last {count(len(torn), 'byte')}, a line that was cut off ({shown!r}); "
        f"{count(count_lines, 'committed step')} before it stay; kept as {path.with_suffix('.torn').name}"
    )
    data = path.read_bytes()
    if not data.endswith(b"\n" + torn) and data != torn:
        raise UserError(f"{path} has changed since it was read: a run is at work there; repair it when that has ended")
    with path.with_suffix(".torn").open("ab") as kept:
        kept.write(torn + b"\n")
        kept.flush()
        os.fsync(kept.fileno())
    with writing_beside(path) as part:
        part.write_bytes(data[: len(data) - len(torn)])
    return True


@dataclass(frozen=True)
class _Task:
    """A step's files by rank."""

    step: int
    files: dict[int, Path]
    read_whole: bool


@dataclass(frozen=True)
class _Seen:
    """What its files were found to be."""

    num_bytes: int
    num_ranks: int
    faults: list[str]


def _look(task: _Task) -> _Seen:
    num_bytes = num_ranks = 0
    faults = list[str]()
    look = _looks_whole if task.read_whole else _looks_committed
    for rank, path in task.files.items():
        num_bytes += path.stat().st_size
        fault, told_ranks = look(path, task.step, rank)
        num_ranks = max(num_ranks, told_ranks)
        faults += [fault] if fault else []
    return _Seen(num_bytes, num_ranks, faults)


def _looks_whole(path: Path, step: int, rank: int) -> tuple[str, int]:
    """What is wrong with a file, empty where nothing is, and how many ranks it tells of."""
    fault, num_ranks = _looks_committed(path, step, rank)
    if not fault:
        try:
            check_whole(path)
        except (DamagedFile, FileNotFoundError) as error:
            fault = str(error)
    return fault, num_ranks


def _looks_committed(path: Path, step: int, rank: int) -> tuple[str, int]:
    try:
        told = read_columns(path, ("rollouts/response_ends",))
    except (DamagedFile, FileNotFoundError) as error:
        return str(error), 0
    if (told.step, told.rank) != (step, rank):
        return f"{path}: it is of step {told.step} and rank {told.rank}", told.num_ranks
    return "", told.num_ranks


def _verdict(found: Integrity) -> str:
    how = "read whole, with their checksums" if found.read_whole else "opened; their payload was not read"
    looked = f"{count(found.num_files, 'log')} ({found.num_bytes / 2**20:,.1f} MiB, schema {found.schema}) {how}"
    faults = [
        f"{count(len(found.damaged), 'damaged file')}" if found.damaged else "",
        f"{count(len(found.missing), 'step')} without all ranks" if found.missing else "",
        f"{count(len(found.without_logs), 'committed step')} without logs" if found.without_logs else "",
        "a torn last line of metrics.jsonl (--repair takes it off)" if found.torn_tail else "",
    ]
    faults = [fault for fault in faults if fault]
    state = f"Not sound: {listed(faults)}." if faults else "All is sound."
    notes = [f"{looked}, {count(found.num_lines, 'line')} of metrics.", state]
    if found.under_way:
        notes.append(f"Not committed yet: step {', '.join(map(str, found.under_way[:4]))}.")
    if found.parts:
        notes.append(f"{count(len(found.parts), 'file')} half written: a run is at work, or was killed at it.")
    return " ".join(notes)
