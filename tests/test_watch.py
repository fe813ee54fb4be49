"""The watch's thread: what a rank records, when it ends a job that hangs, and a folder that does not answer."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tlt_hpc.cluster.watch import watch as watch_module
from tlt_hpc.cluster.watch.rank_progress import Beat, Member, Phase
from tlt_hpc.cluster.watch.record import (
    Record,
    read_record,
    read_verdict,
    stacks_file,
    status_file,
    write_record,
)
from tlt_hpc.cluster.watch.watch import STALLED, StatusWriter, Watch
from tlt_hpc.common.files import DamagedText

LOOK = 0.01
NEVER = 1e9
HERE = {0: os.getpid()}


class Job:
    """A watched main thread: this test's; of a job of ``size`` ranks, of which it is the first.

    It looks by itself, or, where ``by_hand``, when it is told to.
    """

    def __init__(self, folder: Path | None, size: int = 1, looks: float = NEVER, by_hand: bool = False) -> None:
        self.beat, self.ends = Beat(), list[int]()
        self.is_over = threading.Event()
        look_seconds = 1e6 if by_hand else LOOK
        # of phase ROLLOUT, so many looks
        self.watch = Watch(looks * look_seconds / 300, None, beat=self.beat, look_seconds=look_seconds, end=self._end)
        self._folder, self._size = folder, size

    def _end(self, status: int) -> None:
        """Stands for the end of the process, which a test outlives."""
        self.ends.append(status)
        self.is_over.set()

    def __enter__(self) -> Job:
        self.watch.__enter__()
        self.beat.set_member(Member(0, self._size, "node1", "start", HERE), lambda status: None)
        self.beat.phase, self.beat.folder = Phase.ROLLOUT, self._folder
        return self

    def __exit__(self, *error: object) -> None:
        self.watch.__exit__(None, None, None)

    def look(self, times: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Look so many times, or until the end, each after what happens ``meanwhile``; files are written and read."""
        for _ in range(times):
            if self.is_over.is_set():
                return
            meanwhile()
            self.watch.check_progress_once()
            assert self.watch._writer.run_within(60, lambda: None)


def until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(LOOK)


def is_told(folder: Path) -> bool:
    with contextlib.suppress(OSError, DamagedText):
        return read_record(status_file(folder, 0)).heartbeat > 0
    return False


def test_a_rank_records_where_it_is_and_how_it_ended(tmp_path):
    with Job(tmp_path) as job:
        with job.beat.in_phase(Phase.UPDATE, 12):
            job.beat.enter_part("micro-batch", 3, 8)
            until(lambda: is_told(tmp_path) and read_record(status_file(tmp_path, 0)).phase == "update")
        told = read_record(status_file(tmp_path, 0))
        assert (told.phase_and_step_text, told.pid, told.ending) == (
            "update of step 13 (micro-batch 3 of 8)",
            os.getpid(),
            "",
        )
        assert job.watch.record_exit_status(75) == 75
    assert read_record(status_file(tmp_path, 0)).ending == "stopped early"
    assert job.ends == []


def test_a_rank_that_is_about_to_be_killed_records_its_end_before(tmp_path):
    """As a job that has itself queued again, which Slurm answers by killing it."""
    with Job(tmp_path, looks=20, by_hand=True) as job:
        job.beat.record_ending("stopped early")
        assert read_record(status_file(tmp_path, 0)).ending == "stopped early"
        job.look(60)
        assert not job.ends, "it may be waited for"
        assert read_record(status_file(tmp_path, 0)).ending == "stopped early"


def test_a_rank_that_hangs_reports_why_and_ends(tmp_path, capfd):
    with Job(tmp_path, looks=5) as job:
        assert job.is_over.wait(60)
        assert job.ends == [STALLED]
    err = capfd.readouterr().err
    line = read_verdict(tmp_path)[1]
    assert line.startswith("rank 0 on node1 is stuck in rollout for 0.0") and "at wait (" in line
    assert err.startswith(f"tlt: the job hangs: {line}") and err.count("\n") == 1
    assert "test_a_rank_that_hangs" in stacks_file(tmp_path, 0).read_text()
    assert read_record(status_file(tmp_path, 0)).ending == "finished", "the end of the test"


def test_the_others_leave_it_to_the_lowest_as_long_as_that_one_lives(tmp_path, capfd):
    with Job(tmp_path, size=2, looks=5, by_hand=True) as job:
        job.beat.member, job.beat.step = replace(job.beat.member, rank=1), 1
        job.look(50, heart_of(tmp_path, plain(0, stalled=True)))
        assert not job.ends
        job.look(20)
    assert job.ends == [STALLED]
    assert "rank 1 on node1 is stuck" in capfd.readouterr().err


def plain(rank: int, stalled: bool) -> Record:
    return Record(
        start="start", rank=rank, host="node1", pid=os.getpid(), heartbeat=0, phase="rollout", step=1, part="",
        part_number=0, waiting="", number=0, progress=0, still=300 * stalled, limit=300, seconds=0.0,
    )  # fmt: skip


def heart_of(folder: Path, record: Record) -> Callable[[], None]:
    """Each call moves a rank's heartbeat."""
    beats = itertools.count(1)
    return lambda: write_record(folder, replace(record, heartbeat=next(beats)))


def test_nobody_is_ended_while_another_is_at_work_and_it_is_once_that_one_is_silent(tmp_path, capfd):
    with Job(tmp_path, size=2, looks=3, by_hand=True) as job:
        job.beat.mark_waiting_in("allgather", "world")
        job.look(50, heart_of(tmp_path, plain(1, stalled=False)))
        assert not job.ends, "rank 1 may still come"
        job.look(20)
        assert job.ends == [STALLED]
    assert "rank 1 on node1 shows no sign of life" in capfd.readouterr().err


# -- folders that fail ------------------------------------------------------------------------------------------------


def test_a_folder_that_hangs(tmp_path, capfd, monkeypatch):
    """A file that never opens, as on a server that is away: the thread that touches it hangs, the looks continue."""
    os.mkfifo(status_file(tmp_path, 0))
    monkeypatch.setattr(watch_module, "LAST_WORD_SECONDS", 0.1)
    with Job(tmp_path, looks=5) as job:
        assert job.is_over.wait(60)
        assert job.ends == [STALLED]
    err = capfd.readouterr().err
    assert f"what the other ranks do cannot be seen: {tmp_path} does not answer" in err
    assert "test_a_folder_that_hangs" in err, "the stacks, which have no other place"
    assert "could not leave word of its end" in err


def test_the_status_writer_runs_one_task_at_a_time():
    """The watch's thread and the main thread may both find it idle: each task runs, or its caller knows."""
    writer, gate, done = StatusWriter(), threading.Event(), list[int]()
    assert writer.run_if_idle(lambda: done.append(gate.wait(60)))
    assert not writer.is_idle and not writer.run_if_idle(lambda: None) and not writer.run_within(0.0, lambda: None)
    gate.set()
    assert writer.run_within(60, lambda: done.append(2)) and done == [True, 2]
