"""The pulse on real MPI jobs: one sequence of rosters for all, no hang, no blocking poll, no spinning."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import numpy as np
import pytest
from launch_ranks import run_on_ranks

import tlt_hpc.mpi.exchange as exchange_module
import tlt_hpc.mpi.world as world_module
from tlt_hpc.mpi.exchange import FlatExchange, NodeExchange, crowding_of, open_exchange
from tlt_hpc.mpi.library import MPI
from tlt_hpc.mpi.progress import BackOff, ProgressThread
from tlt_hpc.mpi.pulse import BUSY_SECONDS, RECORD_FIELDS, Pulse
from tlt_hpc.mpi.roster import Roster, State, Status
from tlt_hpc.mpi.shared import Bells, SharedRows
from tlt_hpc.mpi.world import World

BUSY = Status(State.BUSY, sequences_left=1, tokens=0, drafter_steps=0)
IDLE = Status(State.IDLE, sequences_left=0, tokens=0, drafter_steps=0)


PLACES = ["one node", "two ranks a node", "by turns on two nodes", "no shared memory"]


def connect(place: str = "one node", busy_seconds: float = 0.0) -> tuple[World, Pulse]:
    """The ranks as if they were on nodes of their own, or could not share memory; 0 s as of no run, to look often."""
    rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    hosts = {"two ranks a node": f"node{rank // 2}", "by turns on two nodes": f"node{rank % 2}"}
    if place in hosts:
        world_module.socket.gethostname = lambda: hosts[place]
    world = World.connect()
    if place == "no shared memory":
        return world, Pulse(FlatExchange(world.private_comm(), len(RECORD_FIELDS)), busy_seconds)
    exchange = open_exchange(world, len(RECORD_FIELDS))
    shared = world.size > 1 and (place != "by turns on two nodes" or world.size > 2)
    assert isinstance(exchange, NodeExchange if shared else FlatExchange)
    return world, Pulse(exchange, busy_seconds)


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


def random_rollouts(num_rollouts: int, seed: int, place: str) -> dict[str, Any]:
    """Rollouts with long-tailed lengths and stop votes at random moments; what this rank saw, as one hash."""
    world, pulse = connect(place)
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


def rollouts_with_micro_steps(
    num_rollouts: int, micro_step_seconds: float, num_parts: int, place: str
) -> dict[str, Any]:
    """Ranks that finish early take micro-steps while the pulse goes on; how late releases were, how all ended.

    A micro-step asks between its parts whether the rollout is over, and is cut if so.
    """
    world, pulse = connect(place)
    random = np.random.default_rng([7, world.rank])
    latest, late, endings = list[float](), list[float](), []
    for epoch in range(num_rollouts):
        num_steps = min(int(4 * random.pareto(1.2)) + 1, 60)
        vote_at = int(random.integers(0, 20)) if random.random() < 0.1 else None
        pulse.begin(epoch)
        done = turns = 0
        while True:
            state = State.BUSY if done < num_steps else State.TRAINING
            status = Status(state, num_steps - done, done, 0, vote_at is not None and turns >= vote_at)
            if (roster := pulse.poll(status)).over:
                break
            turns += 1
            if done < num_steps:
                time.sleep(random.uniform(0, 4e-3))
                done += 1
                finished = time.time()
            elif roster.worth_training(1, world.rank):
                with pulse.progressing(status):
                    for _ in range(num_parts):
                        if pulse.over:
                            break
                        time.sleep(micro_step_seconds / num_parts)
        released = time.time()
        late.append(time.perf_counter() - pulse.released_at)
        endings.append([roster.round, roster.stopping, [s.tokens for s in roster.statuses]])
        if not roster.stopping:
            latest.append(released - max(world.allgather(finished)))
    pulse.close()
    digest = hashlib.sha256(repr(endings).encode()).hexdigest()
    # medians: a rank that had no core for a while is late for another reason
    return {"latest": median(latest), "late": median(late), "endings": digest}


@pytest.mark.mpi
@pytest.mark.parametrize(("num_ranks", "place"), [(2, PLACES[0]), *((4, place) for place in PLACES)])
def test_the_pulse_goes_on_inside_micro_steps(num_ranks: int, place: str) -> None:
    """All leave on the same roster, and a release waits for one micro-step, not for one a round."""
    results = run_on_ranks(num_ranks, rollouts_with_micro_steps, 20, 0.15, 1, place)
    assert len({result["endings"] for result in results}) == 1
    assert max(result["latest"] for result in results) < 0.15 + 0.1


@pytest.mark.mpi
def test_a_micro_step_is_cut_when_the_release_comes() -> None:
    """Late joiners and all: no rank is in its loop much longer than one of thirty parts of a micro-step."""
    results = run_on_ranks(4, rollouts_with_micro_steps, 40, 0.3, 30, PLACES[0])
    assert len({result["endings"] for result in results}) == 1
    assert max(result["late"] for result in results) < 0.1, "0.01 and what a busy machine adds"
    assert max(result["latest"] for result in results) < 0.2


def check_random_rollouts(num_ranks: int, place: str, num_rollouts: int, timeout: float) -> None:
    results = run_on_ranks(num_ranks, random_rollouts, num_rollouts, num_ranks, place, timeout=timeout)
    assert len({result["seen"] for result in results}) == 1, "ranks saw different rosters"
    assert results[0]["num_rosters"] >= num_rollouts
    assert 0 < results[0]["num_stopped"] < num_rollouts, "the votes were not exercised"


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("num_ranks", "place"), [(1, PLACES[0]), (2, PLACES[0]), (8, PLACES[0]), *((4, place) for place in PLACES)]
)
def test_every_rank_sees_the_same_rosters(num_ranks: int, place: str) -> None:
    check_random_rollouts(num_ranks, place, num_rollouts=200, timeout=120)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("place", PLACES)
def test_ten_thousand_rollouts_without_a_hang(num_ranks: int, place: str) -> None:
    check_random_rollouts(num_ranks, place, num_rollouts=10_000, timeout=3000)


def rollouts_with_one_silent_rank(silent_seconds: float, place: str) -> dict[str, Any]:
    """Rank 0 does not poll for seconds in the first rollout; a second one follows at once."""
    world, pulse = connect(place)
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
@pytest.mark.parametrize(("num_ranks", "place"), [(2, PLACES[0]), (8, PLACES[0]), (4, PLACES[1]), (4, PLACES[3])])
def test_a_silent_rank_delays_the_others_without_blocking_them(num_ranks: int, place: str) -> None:
    results = run_on_ranks(num_ranks, rollouts_with_one_silent_rank, 3.0, place)
    assert len({result["rosters"] for result in results}) == 1
    waiting = results[1:]
    assert min(result["polls"] for result in waiting) > 4, "the others did not go on polling"
    assert max(result["longest_poll_seconds"] for result in waiting) < 2.0, "a poll that blocks takes as long as that"


def shares_of_ranks_that_wait(busy_seconds: float, step_seconds: float, works: bool, place: str) -> float:
    """Rank 0 polls between its steps, in which it sleeps or works; the others have nothing to do. As in a run."""
    world, pulse = connect(place, BUSY_SECONDS)
    pulse.begin(0)
    world.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    status = BUSY if world.rank == 0 else IDLE
    while not pulse.poll(status).over:
        if world.rank == 0:
            end = time.perf_counter() + step_seconds
            while works and time.perf_counter() < end:
                hashlib.sha256(bytes(2**16))
            time.sleep(max(0.0, end - time.perf_counter()))
            status = BUSY if time.perf_counter() - start < busy_seconds else IDLE
        else:
            pulse.back_off()
    return (time.process_time() - cpu_start) / (time.perf_counter() - start)


@pytest.mark.flaky(reruns=2)  # it measures seconds, on a machine that may have other work
@pytest.mark.mpi
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("step_seconds", "works"), [(0.001, False), (0.02, True), (1.0, False)])
def test_ranks_that_wait_use_under_five_percent_of_a_core(step_seconds: float, works: bool, place: str) -> None:
    """More ranks than cores, of which none spins."""
    assert max(run_on_ranks(4, shares_of_ranks_that_wait, 2.0, step_seconds, works, place)[1:]) < 0.05


@pytest.mark.flaky(reruns=2)  # it measures seconds, on a machine that may have other work
@pytest.mark.mpi
def test_ranks_that_wait_for_one_at_work_hardly_wake() -> None:
    """Rank 0 has no news for a second at a time, and nobody looks every few milliseconds whether it has."""
    assert max(run_on_ranks(4, shares_of_ranks_that_wait, 3.0, 1.0, True, PLACES[0])[1:]) < 0.005


def lateness_of_releases(num_rollouts: int, rings: bool) -> list[float]:
    """Rank 0 decodes, the others wait: seconds from its last step to this rank's release."""
    if rings:
        exchange_module.SLEEP_SECONDS = (40.0, 40.0)  # what does not wake by a bell is late by as much
    world, pulse = connect()
    if not rings:
        Bells.ring = lambda self, ranks: None  # type: ignore[method-assign]
    late = []
    for epoch in range(num_rollouts):
        left = 20 + epoch % 7 if world.rank == 0 else 0
        finished = 0.0
        pulse.begin(epoch)
        while not pulse.poll(BUSY if left else IDLE).over:
            if not left:
                pulse.back_off()
                continue
            time.sleep(5e-3)
            left, finished = left - 1, time.time()
        released = time.time()
        late.append(released - world.broadcast(finished))
    return late


@pytest.mark.mpi
def test_ranks_that_wait_are_woken_for_the_release() -> None:
    for late in run_on_ranks(4, lateness_of_releases, 20, True, timeout=240):
        assert max(late) < 20, "a wake-up was lost"


@pytest.mark.mpi
def test_a_bell_that_nobody_hears_is_no_hang() -> None:
    """As where a processor delays what it writes: a sleep ends by itself."""
    assert [len(late) for late in run_on_ranks(3, lateness_of_releases, 3, False)] == [3, 3, 3]


def seconds_of_a_round_while_rank_0_computes(compute: str, place: str) -> float:
    """Rank 0 enters one long call right after posting; when do the others see the round complete?"""
    world, pulse = connect(place)
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
@pytest.mark.parametrize("place", PLACES[1:])
def test_others_rounds_complete_inside_a_long_call(compute: str, place: str) -> None:
    """Of a rank that speaks for its node, too."""
    seconds = run_on_ranks(4, seconds_of_a_round_while_rank_0_computes, compute, place)
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


def rollout_where_nothing_is_shared(lack: str) -> dict[str, Any]:
    """Rank 1 alone lacks what ranks of a node share; what kind of exchange this rank then has, and its last roster."""
    rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    if lack == "room" and rank == 0:
        exchange_module.make_shared = lambda num_bytes: ("", "/dev/shm: No space left on device")
    if lack == "folder" and rank == 1:
        exchange_module.open_shared = lambda path, num_bytes: (None, f"{path}: not here")
    if lack == "namespace" and rank == 1:
        Bells.is_heard = lambda self, other: False  # type: ignore[method-assign]
    warned: list[str] = []
    exchange_module.logger.warning = lambda *given: warned.append(given[0] % given[1:])  # type: ignore[method-assign]
    world = World.connect()
    exchange = open_exchange(world, len(RECORD_FIELDS))
    rosters = roll_out(Pulse(exchange), world.rank, 0, 5 + world.rank, None, lambda: time.sleep(1e-3))
    return {"kind": type(exchange).__name__, "over": rosters[-1].over, "warned": warned}


@pytest.mark.mpi
@pytest.mark.parametrize(("lack", "why"), [("room", "No space"), ("folder", "not here"), ("namespace", "namespaces")])
def test_ranks_that_share_nothing_exchange_by_mpi_alone(lack: str, why: str) -> None:
    results = run_on_ranks(3, rollout_where_nothing_is_shared, lack)
    assert all(result["kind"] == "FlatExchange" and result["over"] for result in results)
    assert [len(result["warned"]) for result in results] == [1, 0, 0] and why in results[0]["warned"][0]


# --- one process, no MPI job ---


def test_a_row_that_is_half_written_is_not_there() -> None:
    """As another process may see it on a processor that reorders writes: the number is new, a field is not yet."""
    memory = mmap.mmap(-1, SharedRows.num_bytes(2, 3))
    written, read = (SharedRows(memory, 0, 2, 3) for _ in range(2))
    assert read.read(1) is None
    for turn in (1, 2):
        written.write(0, turn, np.array([[turn, 8, 9]]))
        assert read.read(turn) is None, "a row of two"
        written.write(1, turn, np.array([[-turn, 5, 2**62]]))
        words = np.frombuffer(memory, np.int64)
        for place in range(1, 10):
            if place == 5:  # the second row's number
                continue
            kept, words[place] = int(words[place]), words[place] + 1
            assert read.read(turn) is None, place
            words[place] = kept
        found = read.read(turn)
        assert found is not None and found.tolist() == [[turn, 8, 9], [-turn, 5, 2**62]]
        assert read.are_numbered(turn) and not read.are_numbered(turn + 1), "asked again, or for the next"


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


def test_the_body_of_progressing_keeps_its_own_error() -> None:
    progress = ProgressThread(FailingComm().Iprobe)
    with pytest.raises(KeyError), progress.running():
        raise KeyError("from the long call")
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


def test_closing_before_any_use_is_fine() -> None:
    ProgressThread(CountingComm().Iprobe).close()


def test_pauses_double_up_to_the_cap_and_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)  # polls that cost nothing
    back_off = BackOff(cap_seconds=0.0004)
    for _ in range(5):
        back_off.pause()
    back_off.reset()
    back_off.pause()
    assert pauses == pytest.approx([50e-6, 100e-6, 200e-6, 400e-6, 400e-6, 50e-6])


@pytest.mark.parametrize(("poll_seconds", "longest"), [(1e-6, 2e-3), (50e-6, 5e-3), (0.9e-3, 8e-3), (1.0, 2e-3)])
def test_pauses_stretch_where_polls_are_dear(
    poll_seconds: float, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    spent = itertools.count(0.0, poll_seconds)
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(time, "thread_time", lambda: next(spent))
    back_off = BackOff(cap_seconds=2e-3)
    for _ in range(30):
        back_off.pause()
    assert pauses[0] == 50e-6
    assert pauses[-1] == pytest.approx(longest, rel=1e-2)


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


@pytest.mark.parametrize(
    ("cores", "expected"), [([0b11] * 16, 8.0), ([0b01, 0b10], 1.0), ([0b1111], 1.0), ([0b0011, 0b0011, 0b1100], 1.0)]
)
def test_ranks_crowd_where_they_are_more_than_their_cores(cores: list[int], expected: float) -> None:
    assert crowding_of(cores) == expected


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
    return Pulse(FlatExchange(comm, len(RECORD_FIELDS)), busy_seconds)  # type: ignore[arg-type]


def test_one_roster_a_poll_and_nothing_pending_after_the_last() -> None:
    comm = OneRank()
    pulse = alone(comm)
    pulse.begin(3)
    assert pulse.poll(BUSY) == Roster.before_first_round(3, 1)
    assert pulse.poll(IDLE) == Roster(3, 1, (BUSY,))
    voted = Status(State.TRAINING, 0, tokens=123, drafter_steps=4, stop=True)
    assert pulse.poll(voted) == Roster(3, 2, (IDLE,)) and comm.num_posted == 2
    pulse.begin(4)
    pulse.poll(voted)
    assert pulse.poll(IDLE) == Roster(4, 1, (voted,)) and comm.num_posted == 3
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
