"""The pulse on real MPI jobs: one sequence of rosters for all, no hang, no blocking poll, no spinning."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import nullcontext
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


def connect(busy_seconds: float = 0.0) -> tuple[World, Pulse]:
    """A pulse of all ranks, by default one that looks at every poll."""
    world = World.connect()
    return world, Pulse(world.private_comm(), busy_seconds)


def roll_out(
    pulse: Pulse, rank: int, epoch: int, num_steps: int, vote_at: int | None, step: Callable[[], None]
) -> list[Roster]:
    """The loop of a rank with ``num_steps`` decoding steps, which votes to stop at ``vote_at``; every new roster."""
    pulse.begin(epoch)
    rosters: list[Roster] = []
    done = trained = turns = 0
    while True:
        state = State.BUSY if done < num_steps else State.TRAINING if trained else State.IDLE
        stop = vote_at is not None and turns >= vote_at
        roster = pulse.poll(Status(state, num_steps - done, 17 * done, trained, stop))
        if roster.round > len(rosters):
            rosters.append(roster)
        if roster.over:
            return rosters
        turns += 1
        if done < num_steps:
            step()
            done += 1
        elif roster.worth_training(rank):
            step()
            trained += 1
        else:
            pulse.back_off()


def random_rollouts(num_rollouts: int, seed: int) -> dict[str, Any]:
    """Rollouts with long-tailed lengths and stop votes at random moments; what this rank saw, as one hash."""
    world, pulse = connect()
    random = np.random.default_rng([seed, world.rank])
    seen = hashlib.sha256()
    num_stopped = num_rosters = 0
    for epoch in range(num_rollouts):
        num_steps = min(int(2 * random.pareto(1.2)), 60)
        vote_at = int(random.integers(0, 40)) if random.random() < 0.1 else None
        rosters = roll_out(pulse, world.rank, epoch, num_steps, vote_at, lambda: time.sleep(random.uniform(0, 1e-4)))
        seen.update(repr([(roster.round, roster.statuses) for roster in rosters]).encode())
        num_rosters += len(rosters)
        num_stopped += rosters[-1].stopping
        assert [roster.round for roster in rosters] == list(range(1, len(rosters) + 1))
        assert rosters[-1].over and not any(roster.over for roster in rosters[:-1])
    world.barrier()
    pulse.close()
    assert pulse.num_rounds == num_rosters
    return {"seen": seen.hexdigest(), "num_rosters": num_rosters, "num_stopped": num_stopped}


@pytest.mark.mpi
@pytest.mark.parametrize("num_ranks", [1, 5])
def test_every_rank_sees_the_same_rosters(num_ranks: int) -> None:
    results = run_on_ranks(num_ranks, random_rollouts, 100, num_ranks)
    assert len({result["seen"] for result in results}) == 1, "ranks saw different rosters"
    assert results[0]["num_rosters"] >= 100
    assert 0 < results[0]["num_stopped"] < 100, "the votes were not exercised"


def rollouts_with_micro_steps(num_rollouts: int) -> str:
    """Ranks that finish early take micro-steps while rounds continue, and cut them at the release; how all ended."""
    world, pulse = connect()
    random = np.random.default_rng([7, world.rank])
    endings = []
    for epoch in range(num_rollouts):
        num_steps, done = min(int(4 * random.pareto(1.2)) + 1, 60), 0
        pulse.begin(epoch)
        while True:
            status = Status(State.BUSY if done < num_steps else State.TRAINING, num_steps - done, done, 0)
            if (roster := pulse.poll(status)).over:
                break
            if done < num_steps:
                time.sleep(random.uniform(0, 4e-3))
                done += 1
            elif roster.worth_training(world.rank):
                with pulse.progressing(status):
                    end = time.monotonic() + 60  # far beyond the rollout: only the release ends the micro-step
                    while not pulse.over and time.monotonic() < end:
                        time.sleep(1e-3)
                    assert pulse.over, "the release did not come inside the micro-step"
        endings.append([roster.round, [each.tokens for each in roster.statuses]])
    pulse.close()
    return repr(endings)


@pytest.mark.mpi
def test_rounds_continue_inside_micro_steps_which_end_with_the_release() -> None:
    assert len(set(run_on_ranks(4, rollouts_with_micro_steps, 12))) == 1


def hold_up(folder: str, is_long_call: bool) -> list[Any]:
    """Rank 0 does not poll before another rank has continued: it is silent, or in a call that lets MPI progress."""
    world, pulse = connect()
    seen = Path(folder) / "seen"
    pulse.begin(7)
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
    pulse.close()
    return [roster.round, str(roster.statuses)]


@pytest.mark.mpi
@pytest.mark.parametrize("is_long_call", [True, False])
def test_a_rank_that_does_not_poll_blocks_no_other(tmp_path: Path, is_long_call: bool) -> None:
    """And in a long call with the progress thread others even complete their rounds."""
    ranks = run_on_ranks(4, hold_up, str(tmp_path), is_long_call)
    assert all(rank == ranks[0] for rank in ranks)


def raise_in_mid_rollout() -> None:
    world, pulse = connect()
    pulse.begin(0)
    roster = pulse.poll(BUSY)
    if world.rank == 0:
        with pulse.progressing():
            time.sleep(0.05)
            raise ZeroDivisionError("inside the long call")
    while not roster.over:
        roster = pulse.poll(IDLE)
        pulse.back_off()


@pytest.mark.mpi
def test_a_rank_that_raises_in_mid_rollout_ends_the_others() -> None:
    with pytest.raises(AssertionError, match=r"(?s)ended with status [1-9].*ZeroDivisionError: inside the long call"):
        run_on_ranks(3, raise_in_mid_rollout, timeout=60)


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


def seen(roster: Roster) -> tuple[int, int, Status]:
    return roster.epoch, roster.round, roster.statuses[0]


def test_one_roster_a_poll_and_nothing_pending_after_the_last() -> None:
    comm = OneRank()
    pulse: Any = Pulse(comm, busy_seconds=0.0)
    with pytest.raises(AssertionError, match="call begin first"):
        pulse.poll(BUSY)
    pulse.begin(3)
    assert seen(pulse.poll(BUSY)) == (3, 0, Status(State.BUSY, 0, 0, 0))
    assert seen(pulse.poll(IDLE)) == (3, 1, BUSY)
    with pytest.raises(AssertionError, match="is pending"):
        pulse.begin(4)
    voted = Status(State.TRAINING, 0, tokens=123, drafter_steps=4, stop=True)
    assert seen(pulse.poll(voted)) == (3, 2, IDLE) and comm.num_posted == 2 and pulse.over
    with pytest.raises(AssertionError, match="call begin first"):
        pulse.poll(IDLE)
    pulse.begin(4)
    pulse.poll(voted)
    assert seen(pulse.poll(IDLE)) == (4, 1, voted) and comm.num_posted == 3
    assert pulse.num_rounds == 3
