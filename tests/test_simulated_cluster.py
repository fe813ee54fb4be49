"""A slice of the simulated cluster's schedules, those that once failed, and what shows that they can."""

from __future__ import annotations

import inspect
import logging
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from launch_ranks import ROOT, run_python
from simulated_cluster import LARGE, SCENARIOS, Plan, error_of, plan_of, play, run_seeds
from simulated_modules import simulated

from tlt_hpc import train
from tlt_hpc.checkpoint.save import Save
from tlt_hpc.cli import rank_commands
from tlt_hpc.cluster.stopping import StopFlag
from tlt_hpc.mpi import owner
from tlt_hpc.mpi.progress import ProgressThread
from tlt_hpc.mpi.pulse import Pulse
from tlt_hpc.mpi.replica import ReplicaPulse
from tlt_hpc.mpi.world import World
from tlt_hpc.run.session import Session

SLICE, BIG_SLICE = 1600, 100_000


MORE = [pytest.param(range(first, SLICE, 4), marks=pytest.mark.ci) for first in (1, 2, 3)]
REST = pytest.param(range(SLICE, BIG_SLICE), marks=[pytest.mark.slow, pytest.mark.timeout(7200)])


@pytest.mark.parametrize("seeds", [range(0, SLICE, 4), *MORE, REST])
def test_a_slice_of_the_seeds(seeds: range) -> None:
    ran, failures = run_seeds(seeds)
    assert not failures, "\n".join(failures)
    assert set(SCENARIOS) == set(ran) and ran.total() == len(seeds)


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
    program = "from test_simulated_cluster import *\nwith simulated():\n    ends = ends_of_some()\nprint(ends)"
    done = run_python("-c", program, cwd=ROOT / "tests", PYTHONHASHSEED="1")
    assert done.stdout.strip() == str(ends_of_some()), done.stderr


def ends_of_some() -> list[tuple[int, float]]:
    """Steps and times at which some schedules end."""
    return [(cluster.steps, cluster.now) for cluster in (play(plan_of(seed)) for seed in (1, 3, 5, 17, 44))]


# -- broken on purpose ----------------------------------------------------------------------------------------------


CHANGED = {
    "a rank leaves by its own request": (
        Session, "generate", ".is_over:", ".is_over and not self.world.stop_requested:", 0, "leaves with 0",
    ),
    "a step takes the rank's own request for the roster's": (
        train, "take_step", "if outcome.stopped:", "if job.world.stop_requested:", 502, "not enough values to unpack",
    ),
    "an agreed stop does not reach the others' flags": (
        World, "allgather_with_stop_vote", "if agreed:", "if False:", 7, "and the flag of",
    ),
    "nobody waits for the progress thread": (
        ProgressThread, "running", "with self._lock:", "if True:", 1988, "progress thread has failed",
    ),
    "a roster is read from the buffer of the next round": (
        Pulse, "_take_and_post_round", "self._received.copy()", "self._received", 3, "ScheduleError: (0, 1): b",
    ),
    "a rank of a replica leaves by its own roster": (
        ReplicaPulse, "poll", "is_leaving = bool(self._replica.heard)", "is_leaving = roster.is_over", 262,
        "no end after",
    ),
    "a job is queued again after SIGTERM, and not at its time limit": (
        rank_commands, "requeue_stopped_job", "if stop is Stop.TIME and", "if stop is Stop.KILL and", 61,
        "asks 1 times to be",
    ),
    "a request to stop is lost": (
        StopFlag, "request", "self._asked.append", "self._asked or self._asked.append", 261, "vote",
    ),
    "a checkpoint is made before all shards are there": (
        Save, "_wait_for_file_lists", "while not", "while False and not", 66, "ends with statuses",
    ),
    "a line is written without the logs of the other ranks": (
        train, "write_and_commit_step_all_ranks", ".run_on_all_ranks(", ".run_first_and_broadcast(", 61,
        "begins with step",
    ),
    "a clock that jumps counts": (
        owner, "_is_alive", "time.monotonic()", "time.time()", 3255, "in which its owner is at work",
    ),
}  # fmt: skip
"""The function, what of it is replaced by what, the first seed that finds it, and as what."""


@pytest.mark.parametrize("what", CHANGED)
def test_a_changed_line_is_found(what: str, modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, old, new, seed, found = CHANGED[what]
    source = textwrap.dedent(inspect.getsource(getattr(place, name)))
    assert old in source and not error_of(plan_of(seed))
    scope: dict[str, Any] = {}
    changed = source.replace(old, new).replace("super()", f"super({place.__name__}, self)")  # outside of its class
    exec(changed, inspect.unwrap(getattr(place, name)).__globals__, scope)
    monkeypatch.setattr(place, name, scope[name])
    assert found in error_of(plan_of(seed))
