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
from local_slurm import ENDED, LocalSlurm

pytestmark = [pytest.mark.slurm, pytest.mark.mpi]

PATIENCE_SECONDS = 180.0
"""Without a sign of progress: on a machine that others use, too, all takes as long as it takes."""
SETTINGS = [
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=200", "rollout.max_live=4",
    "speculation.profile_seconds=0", "checkpoint.every_steps=5",
]  # fmt: skip


class Training:
    """A run under Slurm that is submitted again where Slurm does not queue it again itself."""

    def __init__(self, slurm: LocalSlurm, folder: Path, num_steps: int) -> None:
        self.slurm, self.folder, self.num_steps = slurm, folder, num_steps
        folder.mkdir()
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
        """Wait, as long as the run gets on.

        Raises:
            AssertionError: nothing has been done for too long.
        """
        end, seen = time.monotonic() + PATIENCE_SECONDS, None
        while not reached():
            assert time.monotonic() < end, f"{what}: nothing new for {PATIENCE_SECONDS} s\n{self.said()}"
            now = self.num_done, self.said(), self.slurm.state(self.job)
            if now != seen:
                end, seen = time.monotonic() + PATIENCE_SECONDS, now
            time.sleep(0.2)

    def until_ended(self, state: str) -> None:
        """Wait until its job has ended so."""
        self.until(lambda: self.slurm.state(self.job) in ENDED, f"the end of job {self.job}")
        assert self.slurm.state(self.job) == state, self.said()

    def until_back(self, restarts: int) -> None:
        """Wait until Slurm runs it for the so-many-th time after the first."""
        self.until(
            lambda: self.slurm.show(self.job)["Restarts"] == str(restarts) and self.slurm.state(self.job) == "RUNNING",
            f"restart {restarts} of job {self.job}",
        )

    @property
    def nodes(self) -> list[str]:
        """Where it runs."""
        return self.slurm.run("scontrol", "show", "hostnames", self.slurm.show(self.job)["NodeList"]).split()

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
    restarts, nodes = int(training.slurm.show(training.job)["Restarts"]), ",".join(training.nodes)
    urgent = training.slurm.sbatch(
        "--partition=urgent", "--exclusive", f"--nodelist={nodes}", "--output=/dev/null", "--wrap", "sleep 1"
    )
    training.until(lambda: training.slurm.state(urgent) in ENDED, "the end of the job that preempts")
    training.until_back(restarts + 1)


def requeue(training: Training) -> None:
    """The user, or an operator, queues it again."""
    restarts = int(training.slurm.show(training.job)["Restarts"])
    training.slurm.run("scontrol", "requeue", training.job)
    training.until_back(restarts + 1)


def cancel(training: Training) -> None:
    """The user stops it, which is never answered by queueing again, and submits it anew."""
    training.slurm.run("scancel", training.job)
    training.until_ended("CANCELLED")
    assert f"job {training.job} is queued again" not in training.said().rpartition("stopped early")[2]
    training.submit()


def lose_node(training: Training) -> None:
    """A node goes down under it; Slurm queues it again, on others."""
    restarts, node = int(training.slurm.show(training.job)["Restarts"]), training.nodes[0]
    training.slurm.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    training.until_back(restarts + 1)
    if "down" in training.slurm.run("sinfo", "-h", "-n", node, "-o", "%T"):  # else it has reported for work by itself
        training.slurm.run("scontrol", "update", f"nodename={node}", "state=resume")


def drain(training: Training) -> None:
    """An operator drains its nodes, and queues it again, which takes it to others."""
    restarts, nodes = int(training.slurm.show(training.job)["Restarts"]), training.nodes
    training.slurm.run("scontrol", "update", f"nodename={','.join(nodes)}", "state=drain", "reason=test")
    training.slurm.run("scontrol", "requeue", training.job)
    training.until_back(restarts + 1)
    assert not set(training.nodes) & set(nodes)
    training.slurm.run("scontrol", "update", f"nodename={','.join(nodes)}", "state=resume")


def kill(training: Training) -> None:
    """kill -9 of a rank: the job fails, and the user submits it anew."""
    ranks = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if is_rank_of(path, training.job)]
    assert ranks
    os.kill(random.choice(ranks), signal.SIGKILL)
    training.until_ended("FAILED")
    training.submit()


def is_rank_of(path: Path, job: str) -> bool:
    """Whether a process, by its environment's file, is a rank of a job."""
    try:
        environment, command = path.read_bytes(), (path.parent / "cmdline").read_bytes()
    except OSError:  # gone, or its zombie
        return False
    return f"SLURM_JOB_ID={job}\0".encode() in environment and b"PMI_RANK=" in environment and b"mpi4py" in command


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("num_steps", "blows"),
    [
        (9, (limit, preempt, cancel)),
        pytest.param(
            60, (limit, preempt, requeue, lose_node, cancel, limit, kill, preempt, drain, limit),
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_job_that_is_struck_ends_as_if_it_had_not_been(slurm, tmp_path, num_steps, blows):
    source = random.Random(num_steps)
    training, straight = (Training(slurm, tmp_path / name, num_steps) for name in ("struck", "straight"))
    straight.submit()  # beside it, on the other two nodes
    training.submit()
    for number, strike in enumerate(blows, 1):
        goal = training.num_done + source.randint(1, max(1, num_steps // len(blows) - 2))
        training.until(lambda goal=goal: training.num_done >= goal, f"{goal} steps")
        time.sleep(source.uniform(0, 1.5))  # anywhere in a step
        assert training.num_done < num_steps, f"too fast to be struck a {number}th time"
        done = training.num_done
        strike(training)
        assert training.num_done >= done, "a committed step was lost"
    for each in (training, straight):
        each.until_ended("COMPLETED")
        assert "Traceback" not in each.said()
    assert training.policy() == straight.policy()
