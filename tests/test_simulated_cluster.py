"""A slice of the simulated cluster's schedules, those that once failed, and what shows that they can."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from simulated_cluster import LARGE, Plan, error_of, plan_of, play, run_seeds
from simulated_modules import CLOCK, simulated
from simulated_mpi import Comm, Group, Request
from simulated_processes import RUNNING, Cluster, Process, ScheduleError

from tlt_hpc import train
from tlt_hpc.checkpoint.save import Save
from tlt_hpc.cli import rank_commands
from tlt_hpc.cluster.stopping import Stop, StopFlag
from tlt_hpc.mpi import owner
from tlt_hpc.mpi.progress import ProgressThread
from tlt_hpc.mpi.pulse import Pulse
from tlt_hpc.mpi.replica import ReplicaPulse
from tlt_hpc.mpi.roster import Roster
from tlt_hpc.mpi.world import World
from tlt_hpc.run.session import Session

SLICE, BIG_SLICE = 2400, 100_000


@pytest.mark.parametrize("part", range(4))
def test_a_slice_of_the_seeds(part: int) -> None:
    tally = run_seeds(SLICE * part // 4, SLICE * (part + 1) // 4)
    assert not tally.failures, "\n".join(tally.failures)
    assert {"rollout", "job", "owners"} == set(tally.schedules) and sum(tally.schedules.values()) == SLICE // 4


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_seeds() -> None:
    tally = run_seeds(SLICE, BIG_SLICE)
    assert not tally.failures, "\n".join(tally.failures)


def test_every_size_occurs_among_the_million() -> None:
    sizes = {plan_of(seed).ranks for seed in range(0, 1_000_000, LARGE)}
    assert sizes == set(range(2, 513))


ONCE_FAILED = {
    "a rank with a stop to vote for span until the round was over": Plan(3019, "rollout", 2, 2, 3),
    "two starts that claimed at the same moment both ended": Plan(692, "owners", 3, 2, 1),
    "a start that was stopped for long removed lines of the next": Plan(2510, "owners", 2, 5, 0),
    "a timer and the main thread both queued a job again": Plan(160007, "job", 6, 4, 1),
}


@pytest.fixture
def modules() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with simulated():
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("what", ONCE_FAILED)
def test_what_once_failed(what: str, modules: None) -> None:
    play(ONCE_FAILED[what])


def test_a_seed_is_one_schedule_in_any_process(modules: None) -> None:
    program = (
        "from test_simulated_cluster import *\n"
        "with simulated():\n"
        "    ends = ends_of_some()\n"
        "print(ends)"
    )  # fmt: skip
    command, place = [sys.executable, "-c", program], Path(__file__).parent
    told = subprocess.run(command, cwd=place, env={"PYTHONHASHSEED": "1"}, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str(ends_of_some())


def ends_of_some() -> list[tuple[int, float]]:
    """Steps and times at which some schedules end."""
    return [(cluster.steps, cluster.now) for cluster in (play(plan_of(seed)) for seed in (1, 3, 5, 17, 44))]


# -- broken on purpose ----------------------------------------------------------------------------------------------


def first_error(scenario: str, most: int = 400) -> str:
    """Of the first schedule of a scenario that fails."""
    plans = (plan_of(seed) for seed in range(1, 100 * most))
    some = [plan for _, plan in zip(range(most), (each for each in plans if each.scenario == scenario), strict=False)]
    return next(filter(None, map(error_of, some)), "")


def test_a_rank_that_leaves_a_round_late_is_found(modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange: Callable[..., None] = Pulse._exchange

    def late(pulse: Any, roster: Roster, status: Any) -> None:
        exchange(pulse, roster, status)
        if pulse._request is None and pulse._comm.rank == 1:
            pulse._post(pulse._roster, status)

    monkeypatch.setattr(Pulse, "_exchange", late)
    assert "rank 1 has posted" in first_error("rollout")


def test_a_release_before_the_last_rank_has_finished_is_found(modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Roster, "over", property(lambda self: self.num_busy <= 1 or self.stopping))
    assert "leaves rollout" in first_error("rollout")


def test_a_stop_that_is_lost_is_found(modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    request = StopFlag.request

    def first_alone(flag: StopFlag, kind: Stop, reason: str) -> None:
        if flag.kind is Stop.NONE:
            request(flag, kind, reason)

    monkeypatch.setattr(StopFlag, "request", first_alone)
    assert "vote" in first_error("rollout", 600)


def test_a_checkpoint_that_is_made_before_all_shards_are_there_is_found(
    modules: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Save, "_await_lists", lambda save: list(save._part.glob("*.list")))
    assert "ends with statuses" in first_error("job", 60)


@pytest.mark.ci
def test_a_line_that_is_written_before_the_logs_is_found(modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def log_step(world: Any, folder: Any, step: int, record: Any, line: Any) -> None:
        world.once(lambda: train.commit(folder, world.size, step, line))
        world.all_or_none(lambda: train.write_step(folder.rollout_log(step, world.rank), record))

    monkeypatch.setattr(train, "log_step", log_step)
    assert "begins with step" in first_error("job", 120)


@pytest.mark.ci
def test_a_clock_that_jumps_is_found(modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "time", SimpleNamespace(monotonic=CLOCK.time, sleep=CLOCK.sleep))
    assert "in which its owner is at work" in first_error("owners", 300)


CHANGED = {
    "a rank leaves by its own request": (
        Session, "generate", ".over:", ".over and not self.world.stop_requested:", 0, "leaves with 0",
    ),
    "a step takes the rank's own request for the roster's": (
        train, "take_step", "if tail.stopped:", "if job.world.stop_requested:", 502, "not enough values to unpack",
    ),
    "an agreed stop does not reach the others' flags": (
        World, "exchange", "if agreed:", "if False:", 7, "and the flag of",
    ),
    "nobody waits for the progress thread": (
        ProgressThread, "running", "with self._lock:", "if True:", 1988, "progress thread has failed",
    ),
    "a roster is read from the buffer of the next round": (
        Pulse, "_exchange", "self._received.copy()", "self._received", 3, "ScheduleError: (0, 1): b",
    ),
    "a rank of a replica leaves by its own roster": (
        ReplicaPulse, "poll", "is_leaving = bool(self._replica.heard)", "is_leaving = roster.over", 262, "no end after",
    ),
    "a job is queued again after SIGTERM, and not at its time limit": (
        rank_commands, "stop_early", "if stop is Stop.TIME and", "if stop is Stop.KILL and", 61, "asks 1 times to be",
    ),
}  # fmt: skip
"""The function, what of it is replaced by what, the first seed that finds it, and as what."""


@pytest.mark.parametrize("what", CHANGED)
def test_a_changed_line_is_found(what: str, modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, old, new, seed, told = CHANGED[what]
    source = textwrap.dedent(inspect.getsource(getattr(place, name)))
    assert source.count(old) == 1 and not error_of(plan_of(seed))
    scope: dict[str, Any] = {}
    changed = source.replace(old, new).replace("super()", f"super({place.__name__}, self)")  # outside of its class
    exec(changed, inspect.unwrap(getattr(place, name)).__globals__, scope)
    monkeypatch.setattr(place, name, scope[name])
    assert told in error_of(plan_of(seed))


# -- the simulated MPI ----------------------------------------------------------------------------------------------


def ranks(size: int, work: Callable[[Comm], Any], weak: bool) -> list[Any]:
    """What ``work`` returns on each rank."""
    cluster, results = Cluster("a test", weak=weak), [None] * size
    group = Group([Process(cluster, "node0", {}) for _ in range(size)])
    RUNNING.append(cluster)
    try:
        for rank, process in enumerate(group.processes):

            def run(rank: int = rank) -> int:
                results[rank] = work(Comm(group, rank))
                return 0

            process.start(run)
        cluster.run(100_000)
    finally:
        cluster.close()
        RUNNING.pop()
    return results


def wait(request: Request) -> float:
    while not request.Test():
        RUNNING[-1].sleep(1e-3)
    return RUNNING[-1].now


@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("size", [2, 3, 8, 13])
def test_collectives_give_what_they_should_and_no_rank_leaves_too_early(size: int, weak: bool) -> None:
    def work(comm: Comm) -> Any:
        own = np.array([comm.rank, 7 * comm.rank], np.int64)
        every, total, told = np.zeros((comm.size, 2), np.int64), np.zeros(2, np.int64), np.array([comm.rank])
        requests = [comm.Iallgather(own, every), comm.Iallreduce(own, total, "sum"), comm.Ibcast(told, size - 1)]
        for request in requests:
            wait(request)
        RUNNING[-1].sleep(0.5 * comm.rank)
        entered = RUNNING[-1].now
        return every.tolist(), total.tolist(), told.tolist(), entered, wait(comm.Ibarrier())

    found = ranks(size, work, weak)
    rows = [[rank, 7 * rank] for rank in range(size)]
    assert all(each[:3] == (rows, np.sum(rows, 0).tolist(), [size - 1]) for each in found)
    assert min(left for *_, left in found) >= max(entered for *_, entered, _ in found)


def test_collectives_in_another_order_are_an_error() -> None:
    def work(comm: Comm) -> Any:
        wait(comm.Ibarrier() if comm.rank else comm.Ibcast(np.zeros(1), 0))

    with pytest.raises(ScheduleError, match=r"collective 0: rank . is in"):
        ranks(2, work, weak=False)


def test_a_send_buffer_that_is_changed_too_early_is_an_error() -> None:
    def work(comm: Comm) -> Any:
        own, every = np.zeros(1), np.zeros((comm.size, 1))
        request = comm.Iallgather(own, every)
        own[:] = 1
        wait(request)

    with pytest.raises(ScheduleError, match="has changed what it sends"):
        ranks(2, work, weak=False)


def test_a_schedule_that_does_not_end_is_an_error() -> None:
    def work(comm: Comm) -> Any:
        return wait(comm.Ibarrier()) if comm.rank else None

    start = time.monotonic()
    with pytest.raises(ScheduleError, match="no end after"):
        ranks(2, work, weak=False)
    assert time.monotonic() - start < 60
