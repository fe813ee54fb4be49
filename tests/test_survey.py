"""One pass over a run's files: several processes find what one finds, each file is opened once, faults are reported."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import small_run

from tlt_hpc.common.errors import UserError
from tlt_hpc.look.analysis import survey
from tlt_hpc.look.analysis.acceptance import ACCEPTANCE
from tlt_hpc.look.analysis.lengths import LENGTHS
from tlt_hpc.look.analysis.survey import StepLogs, Survey, take, take_all
from tlt_hpc.look.analysis.throughput import THROUGHPUT
from tlt_hpc.look.report.findings import find
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.hdf5 import CommittedFile

ALL: tuple[Survey[Any], ...] = (LENGTHS, ACCEPTANCE, THROUGHPUT)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return small_run(tmp_path / "run", num_steps=6)


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, two processes read any number of files."""

    def on() -> None:
        monkeypatch.setattr(survey, "FEW_FILES", 0)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})

    return on


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[Path]:
    """How often each log is opened in this process."""
    counts, original = Counter[Path](), CommittedFile.__init__

    def counting(self: CommittedFile, path: Path, *more: Any, **options: Any) -> None:
        counts[path] += 1
        original(self, path, *more, **options)

    monkeypatch.setattr(CommittedFile, "__init__", counting)
    return counts


def test_processes_find_what_one_finds(folder: RunFolder, spread: Callable[[], None], opened: Counter[Path]) -> None:
    for step in (4, 1):
        folder.rollout_log(step, 1).write_bytes(b"no HDF5")
    for rank in range(2):
        folder.rollout_log(2, rank).write_bytes(b"")
    one = [found.to_json() for found in take_all(RunLog(folder.path), ALL)]
    alone = [take(RunLog(folder.path), each).to_json() for each in ALL]
    assert one == alone and one[0]["steps"] == [0, 1, 3, 4, 5]
    opened.clear()
    spread()
    run = RunLog(folder.path)
    assert [found.to_json() for found in take_all(run, ALL)] == one and not opened
    places = [problem.partition(":")[0] for problem in run.problems]
    damaged = [str(folder.rollout_log(step, rank)) for step, rank in ((1, 1), (2, 0), (2, 1), (4, 1))]
    assert [place for place in places if place in damaged] == damaged, "in order, and each once"


def _dies(logs: StepLogs) -> int:
    if logs.step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return logs.step


def _fails(logs: StepLogs) -> int:
    assert logs.step != 3, "a mistake in an analysis"
    return logs.step


def _steps(run: RunLog, steps: list[int], rows: list[int]) -> list[int]:
    return rows


def test_a_process_that_was_killed_or_failed_is_an_error(folder: RunFolder, spread: Callable[[], None]) -> None:
    spread()
    with pytest.raises(UserError, match=r"one of 2 processes that read 12 logs was killed.*--last"):
        take(RunLog(folder.path), Survey((), (), _dies, _steps))
    with pytest.raises(AssertionError, match="a mistake in an analysis"):
        take(RunLog(folder.path), Survey((), (), _fails, _steps))


def test_a_report_opens_each_log_once_except_those_of_its_timeline(folder: RunFolder, opened: Counter[Path]) -> None:
    folder.config.write_text('[speculation]\nmode = "full"\n')
    found = find(folder.path)
    assert found.timeline is not None
    shown = {folder.rollout_log(found.timeline.step, rank) for rank in range(2)}
    assert {path: count for path, count in opened.items() if count > 1}.keys() == shown and len(opened) == 12
