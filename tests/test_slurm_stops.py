"""Whatever Slurm does to a job, it goes on, and ends with the policy of a run that nothing happened to."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from local_slurm import LocalSlurm

pytestmark = [pytest.mark.slurm, pytest.mark.mpi]

PATIENCE_SECONDS = 180.0
SETTINGS = [
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=200", "rollout.max_live=4",
    "speculation.profile_seconds=0", "checkpoint.every_steps=5",
]  # fmt: skip


class Training:
    """A run under Slurm that is submitted again where Slurm does not queue it again itself."""

    def __init__(self, slurm: LocalSlurm, folder: Path, num_steps: int) -> None:
        self.slurm, self.folder, self.num_steps = slurm, folder, num_steps
        self.log = folder / "log"
        self.job = ""

    def submit(self) -> None:
        """Submit, or submit the same again."""
        self.job = self.slurm.sbatch(
            "--partition=main", f"--output={self.log}", "sbatch/smoke.sh", "run.name=run", f"run.folder={self.folder}",
            f"run.num_steps={self.num_steps}", *SETTINGS,
        )  # fmt: skip

    @property
    def num_done(self) -> int:
        """Steps that are committed."""
        path = self.folder / "run" / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def said(self) -> str:
        """The log so far, of all starts."""
        return self.log.read_text() if self.log.exists() else ""

    def until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait.

        Raises:
            AssertionError: it takes too long.
        """
        end = time.monotonic() + PATIENCE_SECONDS
        while not reached():
            assert time.monotonic() < end, f"{what}: not after {PATIENCE_SECONDS} s\n{self.said()}"
            time.sleep(0.1)

    def until_back(self, restarts: int) -> None:
        """Wait until Slurm runs it for the so-many-th time after the first."""
        self.until(
            lambda: self.slurm.show(self.job)["Restarts"] == str(restarts) and self.slurm.state(self.job) == "RUNNING",
            f"restart {restarts} of job {self.job}",
        )

    def policy(self) -> str:
        """The digest that the last start printed."""
        found = re.findall(rf"finished: {self.num_steps} steps, policy ([0-9a-f]+)", self.said())
        assert len(found) == 1, self.said()
        return found[0]


def limit(training: Training) -> None:
    """The signal ahead of the time limit; the run asks to be queued again."""
    restarts, before = int(training.slurm.show(training.job)["Restarts"]), training.said()
    training.slurm.run("scancel", "--signal=USR2", training.job)
    training.until_back(restarts + 1)
    said = training.said()[len(before) :]
    assert f"job {training.job} is queued again, and will go on" in said, said
    assert re.search(r"stopped early \(.*SIGUSR2\)", said), said


def preempt(training: Training) -> None:
    """A job of a partition that goes before takes both nodes; Slurm queues the run again."""
    restarts, nodes = int(training.slurm.show(training.job)["Restarts"]), training.slurm.show(training.job)["NodeList"]
    urgent = training.slurm.sbatch(
        "--partition=urgent", "--exclusive", f"--nodelist={nodes}", "--output=/dev/null", "--wrap", "sleep 1"
    )
    training.slurm.wait(urgent, seconds=PATIENCE_SECONDS)
    training.until_back(restarts + 1)


def requeue(training: Training) -> None:
    """The user, or an operator, queues it again."""
    restarts = int(training.slurm.show(training.job)["Restarts"])
    training.slurm.run("scontrol", "requeue", training.job)
    training.until_back(restarts + 1)


def cancel(training: Training) -> None:
    """The user stops it, which is never answered by queueing again, and submits it anew."""
    training.slurm.run("scancel", training.job)
    assert training.slurm.wait(training.job, seconds=PATIENCE_SECONDS) == "CANCELLED"
    assert f"job {training.job} is queued again" not in training.said().rpartition("stopped early")[2]
    training.submit()


def lose_node(training: Training) -> None:
    """A node goes down under it; Slurm queues it again, on others."""
    restarts = int(training.slurm.show(training.job)["Restarts"])
    node = re.match(r"node\[?(\d)", training.slurm.show(training.job)["NodeList"])
    assert node is not None
    training.slurm.run("scontrol", "update", f"nodename=node{node[1]}", "state=down", "reason=test")
    training.until_back(restarts + 1)
    training.slurm.run("scontrol", "update", f"nodename=node{node[1]}", "state=resume")


def kill(training: Training) -> None:
    """kill -9 of a rank: the job fails, and the user submits it anew."""
    ranks = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if is_rank_of(path, training.job)]
    assert ranks
    os.kill(random.choice(ranks), signal.SIGKILL)
    assert training.slurm.wait(training.job, seconds=PATIENCE_SECONDS) == "FAILED"
    training.submit()


def is_rank_of(path: Path, job: str) -> bool:
    """Whether a process, by its environment's file, is a rank of a job."""
    try:
        environment, command = path.read_bytes(), (path.parent / "cmdline").read_bytes()
    except OSError:  # gone, or its zombie
        return False
    return f"SLURM_JOB_ID={job}\0".encode() in environment and b"PMI_RANK=" in environment and b"mpi4py" in command


@pytest.fixture(scope="module")
def straight(slurm: LocalSlurm, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The policy after so many steps without a break, each number run once."""
    policies: dict[int, str] = {}

    def policy(num_steps: int) -> str:
        if num_steps not in policies:
            training = Training(slurm, tmp_path_factory.mktemp("straight"), num_steps)
            training.submit()
            assert slurm.wait(training.job, seconds=PATIENCE_SECONDS) == "COMPLETED", training.said()
            policies[num_steps] = training.policy()
        return policies[num_steps]

    return policy


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("num_steps", "blows"),
    [
        (12, (limit, preempt, cancel)),
        pytest.param(
            60, (limit, preempt, requeue, lose_node, cancel, limit, kill, preempt, requeue, limit),
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_job_that_is_struck_ends_as_if_it_had_not_been(slurm, straight, tmp_path, num_steps, blows):
    source = random.Random(num_steps)
    training = Training(slurm, tmp_path, num_steps)
    training.submit()
    for number, strike in enumerate(blows, 1):
        goal = training.num_done + source.randint(1, max(1, num_steps // len(blows) - 2))
        training.until(lambda goal=goal: training.num_done >= goal, f"{goal} steps")
        time.sleep(source.uniform(0, 1.5))  # anywhere in a step
        assert training.num_done < num_steps, f"too fast to be struck a {number}th time"
        done = training.num_done
        strike(training)
        assert training.num_done >= done, "a committed step was lost"
    assert slurm.wait(training.job, seconds=PATIENCE_SECONDS) == "COMPLETED", training.said()
    assert training.policy() == straight(num_steps)
    assert "Traceback" not in training.said()
