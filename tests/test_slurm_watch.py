"""The watch under Slurm: a rank that dies or hangs ends the whole job soon, as failed, with the one line in its log."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from local_slurm import ROOT
from slurm_training import Training
from test_watch_runs import HANGING

from tlt_hpc.cluster.watch.record import read_record

pytestmark = [pytest.mark.slurm, pytest.mark.mpi]

SOON_SECONDS = 120.0


def fails_soon(training: Training, since: float, num_lines: int = 1) -> list[str]:
    """The lines that the job's log has for its user, once it has ended as failed."""
    training.until_ended("FAILED")
    assert time.monotonic() - since < SOON_SECONDS, training.said()
    lines = [line for line in training.said().splitlines() if line.startswith("tlt: ")]
    assert len(lines) == num_lines and "Traceback" not in training.said(), training.said()
    return lines


@pytest.mark.ci
def test_a_rank_that_is_killed_ends_the_job_and_srun_names_it(slurm, tmp_path):
    training = Training(slurm, tmp_path / "killed", 500)
    training.submit()
    training.until(lambda: training.num_done >= 1, "a step")
    os.kill(read_record(training.folder / "run" / "status", 1).pid, signal.SIGKILL)
    fails_soon(training, time.monotonic(), num_lines=0)
    assert re.search(r"^srun: error: node\d: task 1: Killed$", training.said(), re.MULTILINE)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_job_with_one_line(slurm, tmp_path):
    """Its decoder never returns from a round of the second step; it may take 4 s."""
    training, program = Training(slurm, tmp_path / "hanging", 3), tmp_path / "hanging.py"
    program.write_text(HANGING)
    text = (ROOT / "sbatch" / "smoke.sh").read_text()
    assert "mpi4py -m tlt_hpc train" in text
    training.script = tmp_path / "hanging.sh"
    training.script.write_text(text.replace("mpi4py -m tlt_hpc train", f"mpi4py {program} train"))
    training.submit()
    training.until(lambda: training.num_done >= 1, "a step")
    (line,) = fails_soon(training, time.monotonic())
    assert re.match(r"tlt: the job hangs: rank 1 on \S+ is stuck in rollout of step 1 ", line), line
    assert "stacks are in" in line and Path(training.folder / "run" / "status" / "rank-0001.stacks").exists()
