"""Checks a run's files: checksums of all logs, all ranks of each step, lines of metrics.jsonl and small files.

    python tools/inspect_run.py runs/tiny                # opens every file, but does not read its payload
    python tools/inspect_run.py runs/tiny --check        # reads every file whole, with its checksums
    python tools/inspect_run.py runs/tiny --repair       # removes an incomplete last line of metrics.jsonl

Exit status 1: a fault was found. Checkpoints and feature caches are checked by the starts that load them. Needs
neither torch nor MPI.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import LINES_BYTES, DamagedText, parse_object, read_bytes, read_toml, told
from tlt_hpc.common.words import count
from tlt_hpc.look.analysis.base import Analysis
from tlt_hpc.look.analysis.survey import map_tasks
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.words import listed
from tlt_hpc.storage.folder import PART_SUFFIX, RunFolder, writing_beside
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.records import read_environments, read_finished
from tlt_hpc.storage.rollout_log import read_columns, read_step

_SHOWN_BYTES = 60
ALWAYS = (
    "critic/score/mean", "response_length/mean", "response_length/max", "drafter/spec_decode/mean_acceptance_length",
    "rollout/seconds", "rollout/idle_rank_seconds", "rollout/harvested_rank_seconds", "perf/total_num_tokens",
    "timing_s/step",
)  # fmt: skip
"""Metrics that every line has."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments and inspect; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, e.g. runs/tiny")
    parser.add_argument("--check", action="store_true", help="read every file whole, with its checksums")
    parser.add_argument("--repair", action="store_true", help="remove an incomplete last line of metrics.jsonl")
    options = parser.parse_args(arguments)
    return ending("inspect_run", partial(inspect, options))


def inspect(options: argparse.Namespace) -> int:
    """Repair if asked for, check, and print; returns 1 if there is a fault.

    Raises:
        UserError: there is no run, or it is active while it should be repaired.
    """
    if options.repair:
        repair(RunLog(options.run))
    found = analyse_integrity(RunLog(options.run), read_whole=options.check)
    print(found.verdict)
    for fault in found.faults:
        print(f"  {fault}")
    for path in found.parts:
        print(f"  half written: {path}")
    return 0 if found.is_sound else 1


@dataclass(frozen=True)
class Integrity(Analysis):
    """What was checked, and what is wrong; ``faults``: one line each."""

    num_files: int
    num_bytes: int
    """Size on disk of the logs that were read."""
    read_whole: bool
    """Whether every array was read; otherwise only the attributes."""
    num_lines: int
    faults: tuple[str, ...]
    under_way: tuple[int, ...]
    """Steps with logs but no line, which are not committed."""
    parts: tuple[str, ...]
    """Unfinished files: a run is writing them, or was killed while it did."""

    @property
    def is_sound(self) -> bool:
        """Whether there is no fault."""
        return not self.faults

    @property
    def verdict(self) -> str:
        how = "read whole, with their checksums" if self.read_whole else "opened; their payload was not read"
        parts = [
            f"{count(self.num_files, 'log')} ({self.num_bytes / 2**20:,.1f} MiB) {how}, {count(self.num_lines, 'line')}"
            " of metrics and the small files; checkpoints and feature caches are not checked.",
            "All of these are sound." if self.is_sound else f"Not sound: {count(len(self.faults), 'fault')}.",
        ]
        if self.under_way:
            parts.append(f"Not committed yet: step {', '.join(map(str, self.under_way[:4]))}.")
        if self.parts:
            parts.append(f"{count(len(self.parts), 'file')} half written: a run is active, or was killed.")
        return " ".join(parts)


def analyse_integrity(run: RunLog, read_whole: bool = True) -> Integrity:
    """Check every file; ``read_whole`` reads all of its content."""
    tasks = [(step, run.files(step)) for step in run.logged_steps]
    num_bytes, faults = 0, list[str]()
    for (step, files), (size, num_ranks, bad) in zip(
        tasks, map_tasks(partial(_check_step, read_whole=read_whole), tasks), strict=True
    ):
        num_bytes += size
        faults += bad
        absent = sorted(set(range(num_ranks)) - set(files))
        if absent and (step in run.lines or step != run.logged_steps[-1]):
            faults.append(f"step {step}: no log of rank {', '.join(map(str, absent))}")
    without = [step for step in run.lines if step not in set(run.logged_steps)]
    faults += [f"committed steps without logs: {', '.join(map(str, without))}"] if without else []
    return Integrity(
        run=run.name,
        problems=run.problems,
        num_files=sum(len(files) for _, files in tasks),
        num_bytes=num_bytes,
        read_whole=read_whole,
        num_lines=len(run.lines),
        faults=(*faults, *_faults_of_lines(run), *_faults_of_documents(run.folder)),
        under_way=tuple(step for step in run.logged_steps if step not in run.lines),
        parts=tuple(str(path) for path in sorted(run.folder.path.rglob(f"*{PART_SUFFIX}"))),
    )


def _check_step(task: tuple[int, dict[int, Path]], read_whole: bool) -> tuple[int, int, list[str]]:
    """Bytes of a step's logs, the number of ranks that they name, and faults."""
    step, files = task
    num_bytes, num_ranks, faults = 0, 0, list[str]()
    for rank, path in files.items():
        try:
            log = read_columns(path, ("rollouts/response_ends",))
            num_ranks = max(num_ranks, log.num_ranks)
            if (log.step, log.rank) != (step, rank):
                faults.append(f"{path}: it is of step {log.step} and rank {log.rank}")
            elif read_whole:
                read_step(path)
            num_bytes += path.stat().st_size
        except (DamagedFile, FileNotFoundError) as error:
            faults.append(str(error))
    return num_bytes, num_ranks, faults


def _faults_of_lines(run: RunLog) -> Iterator[str]:
    """Faults of metrics.jsonl: invalid lines, steps out of order or missing, missing metrics, an incomplete end."""
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
    if found.torn:
        yield f"{path}:{found.torn[0]} is cut off; --repair removes it"


def _read_object(path: Path) -> object:
    return parse_object(read_bytes(path))


def _faults_of_documents(folder: RunFolder) -> list[str]:
    """Faults of the small files."""
    readers: dict[Path, Callable[[Path], object]] = {
        folder.config: read_toml,
        folder.finished: read_finished,
        **dict.fromkeys((folder.data, folder.tracking), _read_object),
    }
    faults = list[str]()
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
    return faults + read_environments(folder.environment)[1]


def repair(run: RunLog) -> bool:
    """Remove an incomplete last line of metrics.jsonl, and print what is removed; False if there is none.

    The removed text is kept in ``metrics.torn``. A line that lacks only its line feed is complete and stays.

    Raises:
        UserError: the file has changed since it was read, because a run is active.
        WriteError: no space or no permission; the file is unchanged.
    """
    path, kept = run.folder.metrics, run.folder.metrics.with_suffix(".torn")
    torn = run.step_lines.torn[1] if run.step_lines.torn else b""
    if not torn:
        print("nothing to repair: metrics.jsonl has no incomplete last line")
        return False
    data = read_bytes(path, LINES_BYTES)
    if not data.endswith(b"\n" + torn) and data != torn:
        raise UserError(f"{path} has changed since it was read: a run is active; repair it when that has ended")
    shown = torn[:_SHOWN_BYTES].decode(errors="replace") + ("..." if len(torn) > _SHOWN_BYTES else "")
    print(
        f"{path}: removing its last {count(len(torn), 'byte')}, a line that was cut off ({shown!r}); "
        f"{count(len(run.lines), 'committed step')} before it stay; kept as {kept.name}"
    )
    with kept.open("ab") as file:
        file.write(torn + b"\n")
        file.flush()
        os.fsync(file.fileno())
    with writing_beside(path) as part:
        part.write_bytes(data[: len(data) - len(torn)])
    return True


if __name__ == "__main__":
    sys.exit(main())
