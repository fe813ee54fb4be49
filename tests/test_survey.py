"""One pass over a run's files: in processes as in one, each file once, and nothing missing without a word."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import small_run

from tlt_hpc.common.errors import UserError
from tlt_hpc.look.analysis import processes
from tlt_hpc.look.analysis.acceptance import ACCEPTANCE, analyse_acceptance
from tlt_hpc.look.analysis.integrity import analyse_integrity
from tlt_hpc.look.analysis.lengths import LENGTHS, analyse_lengths
from tlt_hpc.look.analysis.processes import map_tasks
from tlt_hpc.look.analysis.survey import StepLogs, Survey, take, take_all
from tlt_hpc.look.analysis.throughput import THROUGHPUT, analyse_throughput
from tlt_hpc.look.report.findings import find
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.hdf5 import CommittedFile

ALL = (LENGTHS, ACCEPTANCE, THROUGHPUT)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return small_run(tmp_path / "run", num_steps=6)


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on two processes read whatever there is."""

    def on() -> None:
        monkeypatch.setattr(processes, "FEW_FILES", 0)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})

    return on


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[Path]:
    """How often each log is opened here."""
    counts, original = Counter[Path](), CommittedFile.__init__

    def counting(self: CommittedFile, path: Path, *more: Any, **options: Any) -> None:
        counts[path] += 1
        original(self, path, *more, **options)

    monkeypatch.setattr(CommittedFile, "__init__", counting)
    return counts


def test_processes_find_what_one_finds(
    folder: RunFolder, spread: Callable[[], None], opened: Counter[Path], tmp_path: Path
) -> None:
    folder.rollout_log(1, 1).write_bytes(b"no HDF5")
    folder.rollout_log(4, 0).unlink()
    one = [found.to_json() for found in take_all(RunLog(folder.path), ALL)]
    alone = [look(RunLog(folder.path)).to_json() for look in (analyse_lengths, analyse_acceptance, analyse_throughput)]
    assert one == alone, "asked for together or each for itself"
    sound = analyse_integrity(RunLog(folder.path)).to_json()
    opened.clear()
    spread()
    assert [found.to_json() for found in take_all(RunLog(folder.path), ALL)] == one
    assert analyse_integrity(RunLog(folder.path)).to_json() == sound and len(sound["damaged"]) == 1
    assert not opened, "the files were not read in this process"
    assert one[0]["steps"] == [0, 1, 2, 3, 4, 5]


def test_what_a_process_cannot_read_is_noted_once_and_in_order(folder: RunFolder, spread: Callable[[], None]) -> None:
    spread()
    for step in (4, 1):
        folder.rollout_log(step, 1).write_bytes(b"no HDF5")
    run = RunLog(folder.path)
    for found in (*take_all(run, ALL), *take_all(run, ALL)):
        assert len(found.problems) == 4
    places = [problem.partition(":")[0] for problem in run.problems]
    assert places == [str(folder.rollout_log(1, 1)), "step 1", str(folder.rollout_log(4, 1)), "step 4"]


def test_a_step_of_which_nothing_can_be_read_is_left_out(folder: RunFolder, spread: Callable[[], None]) -> None:
    for rank in range(2):
        folder.rollout_log(2, rank).write_bytes(b"")
    spread()
    assert take(RunLog(folder.path), THROUGHPUT).steps.tolist() == [0, 1, 3, 4, 5]


def _dies(logs: StepLogs) -> int:
    if logs.step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return logs.step


def _fails(logs: StepLogs) -> int:
    assert logs.step != 3, "a mistake in an analysis"
    return logs.step


def _steps(run: RunLog, steps: list[int], rows: list[int]) -> list[int]:
    return rows


def test_a_process_that_was_killed_is_an_error(folder: RunFolder, spread: Callable[[], None]) -> None:
    spread()
    with pytest.raises(UserError, match=r"one of 2 processes that read 12 logs was killed.*--last"):
        take(RunLog(folder.path), Survey((), (), _dies, _steps))


def test_what_a_process_raises_is_raised(folder: RunFolder, spread: Callable[[], None]) -> None:
    spread()
    with pytest.raises(AssertionError, match="a mistake in an analysis"):
        take(RunLog(folder.path), Survey((), (), _fails, _steps))


def test_answers_come_in_the_order_of_the_tasks(spread: Callable[[], None]) -> None:
    spread()
    assert list(map_tasks(abs, range(-200, 0), 1)) == list(range(200, 0, -1))


def test_few_files_are_read_in_this_process(folder: RunFolder, opened: Counter[Path]) -> None:
    take_all(RunLog(folder.path), ALL)
    assert len(opened) == 12 and set(opened.values()) == {1}


def test_a_report_opens_each_log_once(folder: RunFolder, opened: Counter[Path]) -> None:
    """But for the step that its timeline shows."""
    folder.config.write_text('[speculation]\nmode = "full"\n')
    found = find(folder.path)
    shown = {folder.rollout_log(found.timeline.step, rank) for rank in range(2)} if found.timeline else set()
    assert {path: count for path, count in opened.items() if count > 1}.keys() == shown
    assert len(opened) == 12


def test_rounds_of_a_replica_are_told_by_its_first_rank(folder: RunFolder) -> None:
    both = take(RunLog(folder.path), ACCEPTANCE)
    folder.config.write_text("[rollout]\ntensor_parallel = 2\n")
    first = take(RunLog(folder.path), ACCEPTANCE)
    assert first.rounds.sum() == 2 * 6 and both.rounds.sum() == 4 * 6
    assert np.array_equal(first.accept_length, both.accept_length)
