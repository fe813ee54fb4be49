"""Whether a run's files are whole: every log read with its checksums, every step with all its ranks, every line of
metrics and every small file what a run writes. Checkpoints and feature caches are left to the starts that load them.

``repair`` takes a torn last line off metrics.jsonl and touches nothing else: it commits no step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import LINES_BYTES, DamagedText, parse_object, read_bytes, read_toml, told
from tlt_hpc.look.analysis.processes import map_tasks
from tlt_hpc.look.analysis.result import Analysis, count, listed
from tlt_hpc.look.analysis.run_log import RunLog
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
"""Figures that every line has."""


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
    lines: tuple[str, ...]
    """What is wrong with metrics.jsonl but for that."""
    num_documents: int
    documents: tuple[str, ...]
    """What is wrong with the run's small files."""

    @property
    def faults(self) -> tuple[str, ...]:
        """Each in a line."""
        return (*self.damaged, *self.missing, *self.lines, *self.documents)

    @property
    def is_sound(self) -> bool:
        return not (self.faults or self.without_logs or self.torn_tail)


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
    num_documents, documents = _look_at_documents(run.folder)
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
        torn_tail=_torn_tail(run).decode(errors="replace"),
        lines=tuple(_faults_of_lines(run)),
        num_documents=num_documents,
        documents=tuple(documents),
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
    """What a run does not write: no line at all, no file, steps out of order or left out, figures that are missing."""
    path, found = run.folder.metrics, run.step_lines
    try:
        read_bytes(path, LINES_BYTES)
    except FileNotFoundError:  # of a copy, or before the first commit
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


def _look_at_documents(folder: RunFolder) -> tuple[int, list[str]]:
    """How many small files there are, and what is wrong with them."""
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
        fault, told_ranks = look(path, task.step, rank)
        num_bytes += 0 if fault else path.stat().st_size
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
