"""`tlt preflight --script` against a real Slurm: a job that it takes passes, and one that it refuses does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launch_ranks import ROOT
from local_slurm import LocalSlurm

ASKS = """#!/usr/bin/env bash
#SBATCH --partition=main
#SBATCH --ntasks-per-node=1
#SBATCH {}
srun --mpi=pmi2 true
"""
pytestmark = pytest.mark.slurm


def preflight(slurm: LocalSlurm, folder: Path, asked: str, *inside: str) -> dict[str, str]:
    """What the command prints of a script that asks for this, by check: level and finding."""
    script = folder / "job.sh"
    script.write_text(ASKS.format(asked))
    job = ["preflight", "jobs/tiny.toml", f"run.folder={folder / 'runs'}", "model.device=cpu", "--script", str(script)]
    done = subprocess.run(
        [*inside, sys.executable, "-m", "tlt_hpc", *job],
        cwd=ROOT, env={**slurm.environment, "TLT_SRUN_MPI": "pmi2"}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    lines = [(line[9:26].strip(), f"{line[:8].strip()}: {line[26:]}") for line in done.stdout.splitlines()[:-1]]
    found = dict(lines)
    assert (done.returncode == 1) == any(line.startswith("failure") for line in found.values())
    return found


@pytest.mark.mpi
@pytest.mark.ci
def test_a_job_passes_inside_an_allocation_where_ranks_talk_by_srun(slurm: LocalSlurm, tmp_path: Path) -> None:
    found = preflight(slurm, tmp_path, "-N2 --time=10", "salloc", "-N2", "-n2", "-t5", "--quiet")
    assert not [line for line in found.values() if line.startswith("failure")]
    assert found["ranks talk"].startswith("ok: 2 ranks on 2 nodes")
    assert found["sbatch"].startswith("ok: would take it: Job ")
    assert found["mpi"].startswith("ok: srun --mpi=pmi2 for MPICH")
    assert found["partition"] == "ok: main: 10 of at most 1:00:00"


@pytest.mark.mpi
@pytest.mark.ci
def test_a_job_passes_inside_a_step_where_mpiexec_would_wait_for_ever(slurm: LocalSlurm, tmp_path: Path) -> None:
    found = preflight(slurm, tmp_path, "-N2 --time=10", "srun", "-n1", "-t5")
    assert found["ranks talk"].startswith("ok: 2 ranks on this machine, by ")
    shell = slurm.run("srun", "-n1", sys.executable, "-m", "tlt_hpc", "train", "jobs/tiny.toml", "--dry-run")
    assert shell.startswith("srun started one rank, but run.ranks = 2; ")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("asked", "check", "said"),
    [
        ("-N8", "sbatch", "failure: sbatch would refuse the job: "),
        ("-N1 --time=400-0", "partition", "failure: time 400-0 is asked for, and partition 'main' at most 1:00:00"),
        ("-N1 --reservation=none", "sbatch", "failure: sbatch would refuse the job: "),
    ],
)
def test_what_this_slurm_does_not_allow_is_found(
    slurm: LocalSlurm, tmp_path: Path, asked: str, check: str, said: str
) -> None:
    assert preflight(slurm, tmp_path, asked)[check].startswith(said)
