"""The pulse on real MPI jobs: one sequence of rosters for all, no hang, no blocking poll, no spinning."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from launch_ranks import run_on_ranks

from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.mpi.library import MPI
from tlt_hpc.mpi.progress import MAX_PAUSE_SECONDS, TESTS, YIELDS, ProgressThread, wait_for_request
from tlt_hpc.mpi.pulse import Pulse
from tlt_hpc.mpi.roster import State, Status
from tlt_hpc.mpi.world import World

BUSY = Status(State.BUSY, sequences_left=1, tokens=0, drafter_steps=0)
IDLE = Status(State.IDLE, sequences_left=0, tokens=0, drafter_steps=0)


@contextmanager
def connected() -> Iterator[tuple[World, Pulse]]:
    """A pulse of all ranks that looks at every poll."""
    world = World.connect()
    pulse = Pulse(world.duplicate_comm_all_ranks(), 0.0)
    yield world, pulse
    pulse.close()


def hold_up(folder: str) -> list[Any]:
    """Rank 0 does not poll before another rank has continued: it is silent, or in a call that lets MPI progress; or
    before the rollout is over, in a call in which a thread takes part for it."""
    with connected() as (world, pulse):
        calls = {"none": nullcontext, "long": pulse.progressing, "takes part": partial(pulse.progressing, IDLE)}
        for epoch, (kind, call) in enumerate(calls.items()):
            seen = Path(folder) / kind
            pulse.begin_rollout(epoch)
            roster, num_polls = pulse.poll(BUSY), 0
            if world.rank == 0:
                end = time.monotonic() + 60
                with call():
                    while not (pulse.is_over if kind == "takes part" else seen.exists()) and time.monotonic() < end:
                        time.sleep(1e-3)
                assert pulse.is_over if kind == "takes part" else seen.exists(), "the others came no further"
            while not roster.is_over:
                roster, num_polls = pulse.poll(IDLE), num_polls + 1
                if world.rank == 1 and (num_polls == 20 if kind == "none" else roster.round == 1):
                    # round 1 may be complete for this rank without any further call of rank 0, round 2 never
                    assert kind != "none" or roster.round <= 1
                    seen.touch()
                pulse.back_off()
    return [roster.round, str(roster.statuses)]


@pytest.mark.mpi
def test_a_rank_that_does_not_poll_blocks_no_other(tmp_path: Path) -> None:
    """And in a long call with the progress thread others even complete their rounds."""
    ranks = run_on_ranks(4, hold_up, str(tmp_path))
    assert all(rank == ranks[0] for rank in ranks)


# --- one process, no MPI job ---


def test_an_error_in_the_progress_thread_surfaces() -> None:
    progress = ProgressThread(Mock(side_effect=MPI.Exception(MPI.ERR_OTHER)))
    with pytest.raises(RuntimeError, match="progress thread has failed") as caught, progress.running():
        progress._thread.join(60)
    assert isinstance(caught.value.__cause__, MPI.Exception)
    with pytest.raises(RuntimeError, match="progress thread has failed"):
        progress.check_thread_error()
    progress.close()
    progress.close()


def test_a_rank_that_waits_for_a_request_sleeps_between_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    answers = iter([*[False] * (YIELDS + 9 * TESTS), True])
    wait_for_request(SimpleNamespace(Test=lambda: next(answers)), "barrier")  # type: ignore[arg-type]
    doubled = [50e-6 * 2**number for number in range(7)]
    assert pauses[:YIELDS] == [0.0] * YIELDS and YIELDS * 2e-6 < 1e-3, "it yields its core for a moment only"
    assert pauses[YIELDS:] == pytest.approx([*doubled, MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS])
    assert BEAT.waiting is None


class OneRank:
    """A communicator of one rank whose allgather completes at once."""

    size = 1

    def __init__(self) -> None:
        self.num_posted = 0

    def Iallgather(self, sent: np.ndarray, received: np.ndarray) -> OneRank:  # noqa: N802
        self.num_posted += 1
        received[:] = sent
        return self

    def Test(self) -> bool:  # noqa: N802
        return True


def test_a_busy_rank_looks_no_more_often_than_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    comm = OneRank()
    pulse: Any = Pulse(comm, busy_seconds=10e-3)
    pulse.begin_rollout(0)
    for now[0] in (0.001, 0.004, 0.008, 0.0111, 0.015):
        pulse.poll(BUSY)
    assert comm.num_posted == 2
    pulse.poll(IDLE)  # a change of its own state is reported at once
    assert comm.num_posted == 3
    assert pulse.poll(IDLE).is_over


def test_one_roster_a_poll_and_nothing_pending_after_the_last() -> None:
    comm = OneRank()
    pulse: Any = Pulse(comm, busy_seconds=0.0)

    def poll(status: Status) -> tuple[int, int, Status]:
        roster = pulse.poll(status)
        return roster.epoch, roster.round, roster.statuses[0]

    with pytest.raises(AssertionError, match="call begin_rollout first"):
        pulse.poll(BUSY)
    pulse.begin_rollout(3)
    assert poll(BUSY) == (3, 0, Status(State.BUSY, 0, 0, 0))
    assert poll(IDLE) == (3, 1, BUSY)
    with pytest.raises(AssertionError, match="is pending"):
        pulse.begin_rollout(4)
    voted = Status(State.TRAINING, 0, tokens=123, drafter_steps=4, stop=True)
    assert poll(voted) == (3, 2, IDLE) and comm.num_posted == 2 and pulse.is_over
    with pytest.raises(AssertionError, match="call begin_rollout first"):
        pulse.poll(IDLE)
    pulse.begin_rollout(4)
    pulse.poll(voted)
    assert poll(IDLE) == (4, 1, voted) and comm.num_posted == 3
    assert pulse.num_rounds == 3
