"""Checks a run's files: checksums of all logs, all ranks of each step, lines of metrics.jsonl and small files.

    python tools/inspect_run.py runs/tiny                # opens every file, but does not read its payload
    python tools/inspect_run.py runs/tiny --check        # reads every file whole, with its checksums

Exit status 1: a fault was found. Checkpoints and feature caches are checked by the starts that load them. Needs
neither torch nor MPI.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import run_script

# isort: split
from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import LINES_BYTES, DamagedText, os_error_text, parse_json_object, read_bytes, read_toml
from tlt_hpc.common.formatting import format_count
from tlt_hpc.look.columns import COLUMNS, STEP_TABLE
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.text_format import join_names
from tlt_hpc.storage.folder import PART_SUFFIX, RunFolder
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.records import read_environments, read_finished
from tlt_hpc.storage.rollout_log import read_step, read_summary

ALWAYS = (*(COLUMNS[name].metric for name in STEP_TABLE.values()), "perf/total_num_tokens")
"""Metrics that every line has."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments and inspect; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, e.g. runs/tiny")
    parser.add_argument("--check", action="store_true", help="read every file whole, with its checksums")
    options = parser.parse_args(arguments)
    return run_script("inspect_run", partial(inspect, options))


def inspect(options: argparse.Namespace) -> int:
    """Check and print; returns 1 if there is a fault.

    Raises:
        UserError: there is no run.
    """
    run = RunLog(options.run)
    found = list(faults(run, read_whole=options.check))
    num_files = sum(len(run.files(step)) for step in run.logged_steps)
    how = "read whole, with their checksums" if options.check else "opened; their payload was not read"
    print(
        f"{format_count(num_files, 'log')} {how}, {format_count(len(run.lines), 'line')} of metrics and the small "
        "files; checkpoints and feature caches are not checked."
    )
    print(f"Not sound: {format_count(len(found), 'fault')}." if found else "All of these are sound.")
    for fault in found:
        print(f"  {fault}")
    for step in run.logged_steps:
        if step not in run.lines:
            print(f"  not committed yet: step {step + 1}")
    for path in sorted(run.folder.path.rglob(f"*{PART_SUFFIX}")):  # a run is writing it, or was killed while it did
        print(f"  half written: {path}")
    return 1 if found else 0


def faults(run: RunLog, read_whole: bool = True) -> Iterator[str]:
    """One line for each fault; ``read_whole`` reads all content of the logs."""
    for step in run.logged_steps:
        files, num_ranks = run.files(step), 0
        for rank, path in files.items():
            try:
                log = read_summary(path)
                num_ranks = max(num_ranks, log.num_ranks)
                if (log.step, log.rank) != (step, rank):
                    yield f"{path}: it is of step {log.step + 1} and rank {log.rank}"
                elif read_whole:
                    read_step(path)
            except (DamagedFile, FileNotFoundError) as error:
                yield str(error)
        absent = sorted(set(range(num_ranks)) - set(files))
        if absent and (step in run.lines or step != run.logged_steps[-1]):
            yield f"step {step + 1}: no log of rank {', '.join(map(str, absent))}"
    if without := sorted(run.lines.keys() - set(run.logged_steps)):
        yield f"committed steps without logs: {', '.join(str(step + 1) for step in without)}"
    yield from _faults_of_lines(run)
    yield from _faults_of_documents(run.folder)


def _faults_of_lines(run: RunLog) -> Iterator[str]:
    """Faults of metrics.jsonl: invalid lines, steps out of order or missing, missing metrics, an incomplete end."""
    path, found = run.folder.metrics, run.step_lines
    try:
        read_bytes(path, LINES_BYTES)
    except FileNotFoundError:  # a partial copy, or no step is committed yet
        return
    except OSError as error:
        yield os_error_text(error)
    for number, why in found.faults:
        yield f"{path}:{number} is no line that a run writes ({why})"
    before: int | None = None
    for number, step, line in found.numbered:
        if before is not None and step != before + 1:
            yield f"{path}:{number} is of step {step + 1}, and the line before it of step {before + 1}"
        before = step
        if missing := [name for name in ALWAYS if name not in line]:
            yield f"{path}:{number} has no {join_names(missing)}"
    if found.torn:
        yield f"{path}:{found.torn[0]} is cut off; the next start leaves it out"


def _read_object(path: Path) -> object:
    return parse_json_object(read_bytes(path))


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
            faults.append(os_error_text(error))
        except UserError as error:
            faults.append(str(error))
        except DamagedText as error:
            faults.append(f"{path} is damaged ({error})")
    return faults + read_environments(folder.environment)[1]


if __name__ == "__main__":
    sys.exit(main())
