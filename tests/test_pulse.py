"""The pulse on real MPI jobs: one sequence of rosters for all, no hang, no blocking poll, no spinning."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from launch_ranks import run_on_ranks

from tlt_hpc.mpi.library import MPI
from tlt_hpc.mpi.progress import MAX_PAUSE_SECONDS, BackOff, ProgressThread, wait
from tlt_hpc.mpi.pulse import Pulse
from tlt_hpc.mpi.roster import Roster, State, Status, StatusTable
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
        elif roster.worth_training(2, rank):
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
        seen.update(repr(rosters).encode())
        num_rosters += len(rosters)
        num_stopped += rosters[-1].stopping
        assert [roster.round for roster in rosters] == list(range(1, len(rosters) + 1))
        assert rosters[-1].over and not any(roster.over for roster in rosters[:-1])
    world.barrier()
    pulse.close()
    assert pulse.num_rounds == num_rosters
    return {"seen": seen.hexdigest(), "num_rosters": num_rosters, "num_stopped": num_stopped, "polls": pulse.num_polls}


@pytest.mark.mpi
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_every_rank_sees_the_same_rosters(num_ranks: int) -> None:
    results = run_on_ranks(num_ranks, random_rollouts, 200, num_ranks)
    assert len({result["seen"] for result in results}) == 1, "ranks saw different rosters"
    assert results[0]["num_rosters"] >= 200
    assert 0 < results[0]["num_stopped"] < 200, "the votes were not exercised"


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
            elif roster.worth_training(1, world.rank):
                with pulse.progressing(status):
                    end = time.monotonic() + 60  # far beyond the rollout: only the release ends the micro-step
                    while not pulse.over and time.monotonic() < end:
                        time.sleep(1e-3)
                    assert pulse.over, "the release did not come inside the micro-step"
        endings.append([roster.round, [each.tokens for each in roster.statuses]])
    pulse.close()
    return repr(endings)


@pytest.mark.mpi
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rounds_continue_inside_micro_steps_which_end_with_the_release(num_ranks: int) -> None:
    assert len(set(run_on_ranks(num_ranks, rollouts_with_micro_steps, 20))) == 1


def rollouts_with_one_silent_rank(silent_seconds: float) -> dict[str, Any]:
    """Rank 0 does not poll for seconds in the first rollout; a second one follows at once."""
    world, pulse = connect()
    world.barrier()
    longest_poll_seconds = 0.0
    rosters: list[Roster] = []
    for epoch in (7, 8):
        pulse.begin(epoch)
        roster = pulse.poll(BUSY)
        if world.rank == 0 and epoch == 7:
            time.sleep(silent_seconds)
        while not roster.over:
            start = time.perf_counter()
            roster = pulse.poll(IDLE)
            longest_poll_seconds = max(longest_poll_seconds, time.perf_counter() - start)
            pulse.back_off()
        rosters.append(roster)
    return {"longest_poll_seconds": longest_poll_seconds, "rosters": repr(rosters), "polls": pulse.num_polls}


@pytest.mark.mpi
def test_a_silent_rank_delays_the_others_without_blocking_them() -> None:
    results = run_on_ranks(4, rollouts_with_one_silent_rank, 3.0)
    assert len({result["rosters"] for result in results}) == 1
    waiting = results[1:]
    assert min(result["polls"] for result in waiting) > 4, "the others did not continue polling"
    assert max(result["longest_poll_seconds"] for result in waiting) < 2.0, "a poll that blocks takes as long as that"


def seconds_of_a_round_while_rank_0_computes(compute: str) -> float:
    """Rank 0 enters one long call right after posting; when do the others see the round complete?"""
    world, pulse = connect()
    with pulse.progressing() if world.rank == 0 else nullcontext():
        pass  # starts the thread, whose start is no part of the round
    world.barrier()
    pulse.begin(0)
    roster = pulse.poll(BUSY)
    if world.rank == 0:
        with pulse.progressing():
            if compute == "sleep":
                time.sleep(3)
            else:
                buffer = bytes(2**26)
                deadline = time.perf_counter() + 3
                while time.perf_counter() < deadline:
                    hashlib.sha256(buffer)
    while roster.round == 0:
        roster = pulse.poll(IDLE)
        time.sleep(0.001)
    seconds = pulse.last_round_seconds
    while not roster.over:
        roster = pulse.poll(IDLE)
        pulse.back_off()
    pulse.close()
    return seconds


@pytest.mark.mpi
@pytest.mark.parametrize("compute", ["sleep", "hash"])
def test_others_rounds_complete_inside_a_long_call(compute: str) -> None:
    seconds = run_on_ranks(4, seconds_of_a_round_while_rank_0_computes, compute)
    assert max(seconds[1:]) < 2, "else it waits for the call's end"


def raise_inside_progressing() -> None:
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
def test_a_rank_that_raises_in_mid_rollout_ends_the_job() -> None:
    with pytest.raises(AssertionError, match=r"(?s)ended with status [1-9].*ZeroDivisionError: inside the long call"):
        run_on_ranks(4, raise_inside_progressing)


# --- one process, no MPI job ---


class FailingComm:
    """Stands for a communicator whose library reports an error."""

    def Iprobe(self) -> bool:  # noqa: N802  (mpi4py's name)
        raise MPI.Exception(MPI.ERR_OTHER)


def test_an_error_in_the_progress_thread_surfaces() -> None:
    progress = ProgressThread(FailingComm().Iprobe)
    with pytest.raises(RuntimeError, match="progress thread has failed") as caught, progress.running():
        progress._thread.join(60)
    assert isinstance(caught.value.__cause__, MPI.Exception)
    with pytest.raises(RuntimeError, match="progress thread has failed"):
        progress.check()
    progress.close()


class CountingComm:
    def __init__(self) -> None:
        self.num_probes = 0

    def Iprobe(self) -> bool:  # noqa: N802
        self.num_probes += 1
        return False


def test_the_progress_thread_probes_inside_only_and_ends_at_close() -> None:
    comm = CountingComm()
    progress = ProgressThread(comm.Iprobe)
    for _ in range(2):
        before = comm.num_probes
        with progress.running():
            end = time.monotonic() + 60
            while comm.num_probes < before + 5:
                assert time.monotonic() < end
                time.sleep(0.002)
    parked = comm.num_probes
    time.sleep(0.1)
    assert comm.num_probes == parked
    progress.close()
    progress.close()
    assert not progress._thread.is_alive()


def test_a_rank_that_waits_for_a_request_sleeps_between_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    answers = iter([False, False, False, True])
    wait(SimpleNamespace(Test=lambda: next(answers)), "barrier")  # type: ignore[arg-type]
    assert pauses == pytest.approx([50e-6, 100e-6, 200e-6])


def test_pauses_double_up_to_the_maximum_and_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    back_off = BackOff()
    for _ in range(9):
        back_off.pause()
    back_off.reset()
    back_off.pause()
    doubled = [50e-6 * 2**number for number in range(7)]
    assert pauses == pytest.approx([*doubled, MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS, 50e-6])


def test_a_busy_rank_looks_no_more_often_than_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    comm = OneRank()
    pulse = alone(comm, busy_seconds=10e-3)
    pulse.begin(0)
    for now[0] in (0.001, 0.004, 0.008, 0.0111, 0.015):
        pulse.poll(BUSY)
    assert comm.num_posted == 2 and pulse.num_polls == 5
    pulse.poll(IDLE)  # what has changed is told at once
    assert comm.num_posted == 3
    assert pulse.poll(IDLE).over


class OneRank:
    """A communicator of one rank whose allgather completes at once."""

    size = 1

    def __init__(self, tamper: Callable[[np.ndarray], None] = lambda records: None) -> None:
        self.num_posted = 0
        self.tamper = tamper

    def Iallgather(self, sent: np.ndarray, received: np.ndarray) -> OneRank:  # noqa: N802
        self.num_posted += 1
        received[:] = sent
        self.tamper(received)
        return self

    def Test(self) -> bool:  # noqa: N802
        return True


def alone(comm: OneRank, busy_seconds: float = 0.0) -> Pulse:
    return Pulse(comm, busy_seconds)  # type: ignore[arg-type]


def test_one_roster_a_poll_and_nothing_pending_after_the_last() -> None:
    comm = OneRank()
    pulse = alone(comm)
    pulse.begin(3)
    assert pulse.poll(BUSY) == Roster.before_first_round(3, 1)
    assert pulse.poll(IDLE) == Roster(3, 1, StatusTable.of([BUSY]))
    voted = Status(State.TRAINING, 0, tokens=123, drafter_steps=4, stop=True)
    assert pulse.poll(voted) == Roster(3, 2, StatusTable.of([IDLE])) and comm.num_posted == 2
    pulse.begin(4)
    pulse.poll(voted)
    assert pulse.poll(IDLE) == Roster(4, 1, StatusTable.of([voted])) and comm.num_posted == 3
    assert (pulse.num_polls, pulse.num_rounds) == (5, 3)


def test_misuse_is_a_programmers_error() -> None:
    pulse = alone(OneRank())
    with pytest.raises(AssertionError, match="call begin first"):
        pulse.poll(BUSY)
    pulse.begin(0)
    pulse.poll(IDLE)
    with pytest.raises(AssertionError, match="is pending"):
        pulse.begin(1)
    assert pulse.poll(IDLE).over
    with pytest.raises(AssertionError, match="call begin first"):
        pulse.poll(IDLE)


@pytest.mark.parametrize("field", [0, 1])
def test_a_record_of_another_epoch_or_round_is_a_programmers_error(field: int) -> None:
    def tamper(records: np.ndarray) -> None:
        records[0, field] += 1

    pulse = alone(OneRank(tamper))
    pulse.begin(0)
    pulse.poll(BUSY)
    with pytest.raises(AssertionError, match="records of epoch and round"):
        pulse.poll(BUSY)
