"""Whatever Slurm does to a job, it continues, and ends with the policy of a run that nothing happened to."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from local_slurm import ENDED
from slurm_training import Training

pytestmark = [pytest.mark.slurm, pytest.mark.mpi]


def limit(training: Training) -> None:
    """The signal ahead of the time limit; the run asks to be queued again."""
    restarts, before = int(training.slurm.show(training.job)["Restarts"]), training.said()
    training.slurm.run("scancel", "--signal=USR2", training.job)
    training.until_back(restarts + 1)
    said = training.said()[len(before) :]
    assert f"job {training.job} is queued again and will resume" in said, said
    assert re.search(r"stopped early \(.*SIGUSR2\)", said), said


def preempt(training: Training) -> None:
    """A job of a partition that goes before takes both nodes; Slurm queues the run again."""
    restarts, nodes = int(training.slurm.show(training.job)["Restarts"]), ",".join(training.nodes)
    urgent = training.slurm.sbatch(
        "--partition=urgent", "--exclusive", f"--nodelist={nodes}", "--output=/dev/null", "--wrap", "sleep 1"
    )
    training.until(lambda: training.slurm.state(urgent) in ENDED, "the end of the job that preempts")
    training.until_back(restarts + 1)
    assert f"job {training.job} is preempted: it waits for Slurm to end it and to queue it again" in training.said()
    assert "is not known" not in training.said()


def requeue(training: Training) -> None:
    """The user, or an operator, queues it again."""
    restarts = int(training.slurm.show(training.job)["Restarts"])
    training.slurm.run("scontrol", "requeue", training.job)
    training.until_back(restarts + 1)


def cancel(training: Training) -> None:
    """The user stops it, which is never answered by queueing again, and submits it again."""
    training.slurm.run("scancel", training.job)
    training.until_ended("CANCELLED")
    assert f"job {training.job} is queued again" not in training.said().rpartition("stopped early")[2]
    training.submit()


def kill(training: Training) -> None:
    """kill -9 of a rank: the job fails, and the user submits it again."""
    found = {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if is_of_rank(path, training.job)}
    ranks = [pid for pid in found if parent_of(pid) not in found]  # the process that watches a node's ranks is a fork
    assert len(ranks) == 2
    os.kill(random.choice(ranks), signal.SIGKILL)
    training.until_ended("FAILED")
    assert re.search(r"^srun: error: node\d: task \d: Killed$", training.said(), re.MULTILINE)
    training.submit()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_of_rank(path: Path, job: str) -> bool:
    """Whether a process, by its environment's file, is a rank of a job, or a fork of one."""
    try:
        environment, command = path.read_bytes(), (path.parent / "cmdline").read_bytes()
    except OSError:  # gone, or its zombie
        return False
    return f"SLURM_JOB_ID={job}\0".encode() in environment and b"PMI_RANK=" in environment and b"mpi4py" in command


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("num_steps", "stops"),
    [
        pytest.param(12, (limit, preempt, kill), marks=pytest.mark.ci),
        pytest.param(25, (limit, preempt, requeue, cancel, kill, limit), marks=pytest.mark.slow),
    ],
)
def test_a_job_that_is_interrupted_ends_with_the_policy_of_one_that_is_not(slurm, tmp_path, num_steps, stops):
    source = random.Random(num_steps)
    training, straight = (Training(slurm, tmp_path / name, num_steps) for name in ("stopped", "straight"))
    training.submit()
    for number, stop in enumerate(stops, 1):
        goal = training.num_done + source.randint(1, max(1, num_steps // len(stops) - 2))
        training.until(lambda goal=goal: training.num_done >= goal, f"{goal} steps")
        time.sleep(source.uniform(0, 1))  # anywhere in a step
        if number == 1:
            straight.submit()  # on the other two nodes, while this one waits for Slurm
        assert training.num_done < num_steps, f"too fast to be stopped a {number}th time"
        done = training.num_done
        stop(training)
        assert training.num_done >= done, "a committed step was lost"
    for each in (training, straight):
        each.until_ended("COMPLETED")
        # a rank whose peer was killed during an update reports that its connection failed
        assert "Traceback" not in each.said() or "/gloo/transport/" in each.said()
    assert training.policy() == straight.policy()


@pytest.mark.ci
def test_under_mpirun_the_signal_reaches_the_ranks_and_ends_nothing_else(slurm, tmp_path):
    training = Training(slurm, tmp_path / "run", 9)
    training.submit(limits=("--export=ALL,TLT_LAUNCH=mpirun",))
    training.until(lambda: training.num_done >= 1, "1 step")
    limit(training)
    training.until_ended("COMPLETED")
    said = training.said()
    assert said.count(", mpirun, caches in ") == 2 and "User defined signal 2" not in said, said
