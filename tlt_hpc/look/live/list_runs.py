"""``tlt runs``: lists the runs below a folder."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tlt_hpc.cluster.watch.record import HEARTBEAT_SECONDS
from tlt_hpc.common.errors import UserError
from tlt_hpc.look.live.state import RunState, read_state
from tlt_hpc.look.run_table import RunRow, as_table, read_run_row, write_csv
from tlt_hpc.look.text_format import format_seconds
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.records import read_facts

_QUIET_SECONDS = 6 * HEARTBEAT_SECONDS
"""Clocks of nodes differ, and file systems show a change late: so long a rank may seem silent."""


def run(options: argparse.Namespace) -> int:
    """Print the runs of a folder, the newest last; returns the exit status.

    Raises:
        UserError: there is no such folder, or it holds no run.
    """
    folder = options.folder
    if not folder.is_dir():
        raise UserError(f"no folder {folder}; give the folder of your runs, or call this where runs/ is")
    quiet_since = time.time() - _QUIET_SECONDS  # those at work keep their order from call to call, by name
    found = sorted(find_runs(folder), key=lambda path: min(_changed_at(path), quiet_since))
    rows = list[RunRow]()
    for path in found:
        try:
            rows.append(read_run_row(str(path), read_state_text(path), path))
        except UserError as error:  # another program's metrics.jsonl, or a run that has just been removed
            print(f"tlt: left out: {error}", file=sys.stderr, flush=True)
    if not rows:
        raise UserError(f"no run in {folder}; `tlt train jobs/tiny.toml` makes one")
    print(as_table(rows))
    if options.output is not None:
        write_csv(options.output, rows)
        print(f"written to {options.output}")
    return 0


def find_runs(folder: Path) -> Iterator[Path]:
    """Folders of runs at any depth, and links to them; a run's own folders are not searched."""
    for place, names, _ in os.walk(folder):  # follows no links, which may lead back
        if _is_run(Path(place)):
            names.clear()
            yield Path(place)
        if not os.access(place, os.X_OK):  # another user's, whose names may be read, and nothing else
            names.clear()
        names.sort()
        yield from (path for name in names if (path := Path(place, name)).is_symlink() and _is_run(path))


def _is_run(folder: Path) -> bool:
    path = RunFolder(folder)
    return os.access(folder, os.X_OK) and (path.metrics.is_file() or path.rollouts.is_dir())


def read_state_text(path: Path) -> str:
    """The state of a run in words: ``finished``, ``running``, how it ended, or how long it has given no sign.

    Begins with ``warm-up`` if the run is one.

    Raises:
        UserError: there is no run.
    """
    state = read_state(path)
    if not state.log.folder.is_warmup:
        return _ending_of(state, path)
    return f"warm-up: {_ending_of(state, path)}{read_accept_length_text(path)}"


def read_accept_length_text(path: Path) -> str:
    """The words after the state of a warm-up: the accept length of its last validation, if there was one."""
    try:
        facts = read_facts(path / "drafter")
    except UserError:  # damaged, as `tlt watch` says
        return ", accept length not known"
    return f", accept length {facts.accept_length:.3f}" if facts else ""


def _ending_of(state: RunState, path: Path) -> str:
    if state.is_finished:
        return "finished"
    if state.ending:
        return state.ending + f" (job {state.job} may be queued again)" * state.may_be_queued
    if state.verdict:
        return state.verdict.partition(",")[0]
    if state.is_starting:
        return "starting"
    silent = time.time() - _changed_at(path)
    if state.records and silent < _QUIET_SECONDS:
        return _running_text(state)
    return f"no sign for {format_seconds(max(0.0, silent))}"


def _running_text(state: RunState) -> str:
    phases = sorted({record.phase for record in state.records})
    return f"running ({', '.join(phases)})"


def _changed_at(path: Path) -> float:
    """When a file of the run last changed: its metrics or the ranks' status; 0 where all of them are gone."""
    folder, times = RunFolder(path), [0.0]
    for place in (folder.metrics, *folder.status.glob("*"), path):
        with suppress(OSError):  # a run at work replaces its files, and a user removes whole runs
            times.append(place.stat().st_mtime)
    return max(times)
