"""The pulse on real MPI jobs: one sequence of rosters for all, no hang, no blocking poll, no spinning."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from launch_ranks import run_on_ranks

from tlt_hpc.cluster.watch.beat import BEAT
from tlt_hpc.mpi.library import MPI
from tlt_hpc.mpi.progress import MAX_PAUSE_SECONDS, TESTS, YIELDS, ProgressThread, wait
from tlt_hpc.mpi.pulse import Pulse
from tlt_hpc.mpi.roster import Roster, State, Status
from tlt_hpc.mpi.world import World

BUSY = Status(State.BUSY, sequences_left=1, tokens=0, drafter_steps=0)
IDLE = Status(State.IDLE, sequences_left=0, tokens=0, drafter_steps=0)


@contextmanager
def connected() -> Iterator[tuple[World, Pulse]]:
    """A pulse of all ranks that looks at every poll."""
    world = World.connect()
    pulse = Pulse(world.private_comm(), 0.0)
    yield world, pulse
    pulse.close()


def roll_out(pulse: Pulse, rank: int, epoch: int, num_steps: int, vote_at: int | None, random: Any) -> list[Roster]:
    """The loop of a rank with ``num_steps`` decoding steps, which votes to stop at ``vote_at``; every new roster.

    In a third of the rollouts it trains in micro-steps which only the release ends.
    """
    pulse.begin(epoch)
    rosters: list[Roster] = []
    done = trained = turns = 0
    while True:
        state = State.BUSY if done < num_steps else State.TRAINING if trained else State.IDLE
        stop = vote_at is not None and turns >= vote_at
        roster = pulse.poll(status := Status(state, num_steps - done, 17 * done, trained, stop))
        if roster.round > (rosters[-1].round if rosters else 0):
            rosters.append(roster)
        if roster.over:
            return rosters
        turns += 1
        if done < num_steps:
            time.sleep(random.uniform(0, 1e-4))
            done += 1
        elif roster.worth_training(rank):
            if epoch % 3 == 2 and not stop:
                with pulse.progressing(status):
                    end = time.monotonic() + 60
                    while not pulse.over and time.monotonic() < end:
                        time.sleep(1e-3)
                    assert pulse.over, "the release did not come inside the micro-step"
            trained += 1
        else:
            pulse.back_off()


def random_rollouts(num_rollouts: int, seed: int) -> dict[str, Any]:
    """Rollouts with long-tailed lengths and stop votes at random moments; what this rank saw, as one hash."""
    with connected() as (world, pulse):
        random = np.random.default_rng([seed, world.rank])
        seen = hashlib.sha256()
        num_stopped = num_rounds = 0
        for epoch in range(num_rollouts):
            num_steps = min(int(2 * random.pareto(1.2)), 60)
            vote_at = int(random.integers(0, 40)) if random.random() < 0.1 else None
            rosters = roll_out(pulse, world.rank, epoch, num_steps, vote_at, random)
            if epoch % 3 == 2:  # the helper thread takes some of them
                rosters = rosters[-1:]
            else:
                assert [roster.round for roster in rosters] == list(range(1, len(rosters) + 1))
            seen.update(repr([(roster.round, roster.statuses) for roster in rosters]).encode())
            num_rounds += rosters[-1].round
            num_stopped += rosters[-1].stopping
            assert rosters[-1].over and not any(roster.over for roster in rosters[:-1])
        world.barrier()
        assert pulse.num_rounds == num_rounds
    return {"seen": seen.hexdigest(), "num_rounds": num_rounds, "num_stopped": num_stopped}


@pytest.mark.mpi
@pytest.mark.parametrize("num_ranks", [1, 5])
def test_every_rank_sees_the_same_rosters_and_rounds_continue_inside_micro_steps(num_ranks: int) -> None:
    results = run_on_ranks(num_ranks, random_rollouts, 100, num_ranks)
    assert len({result["seen"] for result in results}) == 1, "ranks saw different rosters"
    assert results[0]["num_rounds"] >= 100
    assert 0 < results[0]["num_stopped"] < 100, "the votes were not exercised"


def hold_up(folder: str) -> list[Any]:
    """Rank 0 does not poll before another rank has continued: it is silent, or in a call that lets MPI progress."""
    with connected() as (world, pulse):
        for is_long_call in (True, False):
            seen = Path(folder) / f"seen {is_long_call}"
            pulse.begin(7 + is_long_call)
            roster, num_polls = pulse.poll(BUSY), 0
            if world.rank == 0:
                end = time.monotonic() + 60
                with pulse.progressing() if is_long_call else nullcontext():
                    while not seen.exists() and time.monotonic() < end:
                        time.sleep(1e-3)
                assert seen.exists(), "the others came no further"
            while not roster.over:
                roster, num_polls = pulse.poll(IDLE), num_polls + 1
                if world.rank == 1 and (roster.round == 1 if is_long_call else num_polls == 20):
                    # round 1 may be complete for this rank without any further call of rank 0, round 2 never
                    assert is_long_call or roster.round <= 1
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
        progress.check()
    progress.close()
    progress.close()


def test_a_rank_that_waits_for_a_request_sleeps_between_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    answers = iter([*[False] * (YIELDS + 9 * TESTS), True])
    wait(SimpleNamespace(Test=lambda: next(answers)), "barrier")  # type: ignore[arg-type]
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
    pulse.begin(0)
    for now[0] in (0.001, 0.004, 0.008, 0.0111, 0.015):
        pulse.poll(BUSY)
    assert comm.num_posted == 2
    pulse.poll(IDLE)  # a change of its own state is reported at once
    assert comm.num_posted == 3
    assert pulse.poll(IDLE).over


def test_one_roster_a_poll_and_nothing_pending_after_the_last() -> None:
    comm = OneRank()
    pulse: Any = Pulse(comm, busy_seconds=0.0)

    def poll(status: Status) -> tuple[int, int, Status]:
        roster = pulse.poll(status)
        return roster.epoch, roster.round, roster.statuses[0]

    with pytest.raises(AssertionError, match="call begin first"):
        pulse.poll(BUSY)
    pulse.begin(3)
    assert poll(BUSY) == (3, 0, Status(State.BUSY, 0, 0, 0))
    assert poll(IDLE) == (3, 1, BUSY)
    with pytest.raises(AssertionError, match="is pending"):
        pulse.begin(4)
    voted = Status(State.TRAINING, 0, tokens=123, drafter_steps=4, stop=True)
    assert poll(voted) == (3, 2, IDLE) and comm.num_posted == 2 and pulse.over
    with pytest.raises(AssertionError, match="call begin first"):
        pulse.poll(IDLE)
    pulse.begin(4)
    pulse.poll(voted)
    assert poll(IDLE) == (4, 1, voted) and comm.num_posted == 3
    assert pulse.num_rounds == 3
