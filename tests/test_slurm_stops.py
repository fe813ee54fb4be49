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

NUM_STEPS = 12


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


def kill(training: Training) -> None:
    """kill -9 of a rank: the job fails, and the user submits it again, with mpirun."""
    found = {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if is_of_rank(path, training.job)}
    ranks = [pid for pid in found if parent_of(pid) not in found]  # the process that watches a node's ranks is a fork
    assert len(ranks) == 2
    os.kill(random.choice(ranks), signal.SIGKILL)
    training.until_ended("FAILED")
    assert re.search(r"^srun: error: node\d: task \d: Killed$", training.said(), re.MULTILINE)
    training.submit("--export=ALL,TLT_LAUNCH=mpirun")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_of_rank(path: Path, job: str) -> bool:
    """Whether a process, by its environment's file, is a rank of a job, or a fork of one."""
    try:
        environment, command = path.read_bytes(), (path.parent / "cmdline").read_bytes()
    except OSError:  # gone, or its zombie
        return False
    return f"SLURM_JOB_ID={job}\0".encode() in environment and b"PMI_RANK=" in environment and b"mpi4py" in command


@pytest.mark.ci
@pytest.mark.timeout(3600)
def test_a_job_that_is_interrupted_ends_with_the_policy_of_one_that_is_not(slurm, tmp_path):
    source = random.Random(NUM_STEPS)
    training, straight = (Training(slurm, tmp_path / name, NUM_STEPS) for name in ("stopped", "straight"))
    training.submit()
    for number, stop in enumerate((limit, preempt, kill, limit)):
        goal = training.num_done + 1
        training.until(lambda goal=goal: training.num_done >= goal, f"{goal} steps")
        time.sleep(source.uniform(0, 1))  # anywhere in a step
        if number == 0:
            straight.submit()  # on the other two nodes, while this one waits for Slurm
        done = training.num_done
        assert done < NUM_STEPS, f"too fast to be stopped after {number} stops"
        stop(training)
        assert training.num_done >= done, "a committed step was lost"
    for each in (training, straight):
        each.until_ended("COMPLETED")
        # a rank whose peer was killed during an update reports that its connection failed
        assert "Traceback" not in each.said() or "/gloo/transport/" in each.said()
    assert training.policy() == straight.policy()
    said = training.said()
    assert said.count(", mpirun, caches in ") == 2 and "User defined signal 2" not in said, said
