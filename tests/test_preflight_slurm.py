"""`tlt preflight --slurm` against a real Slurm: a job that it would take passes, and one that it would not does not."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from local_slurm import LocalSlurm

ROOT = Path(__file__).resolve().parent.parent
MPICH = {"TLT_SRUN_MPI": "pmi2"}


@pytest.fixture
def environment(slurm: LocalSlurm) -> Mapping[str, str]:
    return slurm.environment


def preflight(
    environment: Mapping[str, str], folder: Path, *arguments: str, inside: tuple[str, ...] = ()
) -> tuple[int, dict[str, dict[str, Any]]]:
    """The command's status, and its verdicts by name."""
    path = folder / "verdicts.json"
    job = ["preflight", "jobs/tiny.toml", f"run.folder={folder / 'runs'}", "--slurm", "--json", str(path)]
    command = [*inside, sys.executable, "-m", "tlt_hpc", *job, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**environment, **MPICH}, capture_output=True, text=True, timeout=120, check=False
    )
    assert path.exists(), f"{done.stdout}\n{done.stderr}"
    return done.returncode, {one["name"]: one for one in json.loads(path.read_text())["verdicts"]}


@pytest.mark.mpi
def test_a_sound_job_passes_inside_an_allocation_where_ranks_talk_by_srun(
    environment: Mapping[str, str], tmp_path: Path
) -> None:
    asked = ("--nodes", "2", "--ranks-per-node", "1", "--time", "10")
    status, verdicts = preflight(environment, tmp_path, *asked, inside=("salloc", "-N2", "-n2", "-t5", "--quiet"))
    assert {name: one["found"] for name, one in verdicts.items() if one["level"] == "failure"} == {}
    assert status == 0
    assert verdicts["ranks talk"]["found"].startswith("2 ranks on 2 nodes")
    assert verdicts["sbatch"]["found"].startswith("would take it: Job ")
    assert verdicts["mpi"]["found"].startswith("srun --mpi=pmi2 for MPICH")


OVER = {
    "time": "asked for, partition 'main' gives at most",
    "nodes": "8 nodes are asked for, partition 'main' has 4; ask for --nodes=4 or less",
    "gpus": "9 GPUs",
    "sbatch": "would refuse the job: ",
}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--partition", "nowhere"), {"partition": "'nowhere' does not exist here; give one of main, urgent"}),
        (("--nodes", "8", "--ranks-per-node", "1", "--gpus-per-node", "9", "--time", "400-0"), OVER),
    ],
)
def test_what_this_slurm_does_not_allow_is_found(
    environment: Mapping[str, str], tmp_path: Path, asked: tuple[str, ...], said: dict[str, str]
) -> None:
    status, verdicts = preflight(environment, tmp_path, *asked)
    assert status == 1
    for name, text in said.items():
        one = verdicts[name]
        assert one["level"] == "failure" and text in f"{one['found']}; {one['remedy']}"


@pytest.mark.slurm
def test_the_partition_of_a_list_that_takes_the_job_is_found(slurm: LocalSlurm, tmp_path: Path) -> None:
    asked = ("--nodes", "2", "--ranks-per-node", "1", "--time", "90", "--partition")
    slurm.run("scontrol", "create", "PartitionName=long", "Nodes=ALL", "MaxTime=02:00:00")
    try:
        status, alone = preflight(slurm.environment, tmp_path, *asked, "long")
        assert (status, alone["time"]["found"]) == (0, "1.5 h of at most 2 h")
        status, either = preflight(slurm.environment, tmp_path, *asked, "main,long")
        assert status == 0 and either["partition"]["found"].startswith("long is up")
        assert either["sbatch"]["found"].startswith("would take it: Job ")
    finally:
        slurm.run("scontrol", "delete", "PartitionName=long")


ASKS = """#!/usr/bin/env bash
#SBATCH --partition=main
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --time=5
#SBATCH {}
srun --mpi=pmi2 true
"""


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("asked", "level", "gpus", "sbatch"),
    [
        ("--nodes=2 --constraint=h100", "ok", "1 a node, which 4 nodes have (gpu:2)", "on nodes node[3-4] "),
        ("--nodes=3 --constraint=h100", "failure", "1 a node, which 4 nodes have", "refuse"),
        ("--nodes=1 --reservation=none", "failure", "1 a node, which 4 nodes have", "reservation is invalid"),
        ("--nodes=1 --gres=gpu:a100:1", "failure", "1 GPUs of the kind a100", "would refuse the job: "),
    ],
)
def test_a_script_is_held_against_slurm_with_all_that_it_asks_for(
    slurm: LocalSlurm, tmp_path: Path, asked: str, level: str, gpus: str, sbatch: str
) -> None:
    (tmp_path / "job.sh").write_text(ASKS.format(asked).replace("#SBATCH --gpus-per-node=1\n" * ("gres" in asked), ""))
    for nodes, feature in (("node[1-2]", "a100"), ("node[3-4]", "h100")):
        slurm.run(
            "scontrol", "update", f"NodeName={nodes}", f"AvailableFeatures={feature}", f"ActiveFeatures={feature}"
        )
    try:
        _, verdicts = preflight(slurm.environment, tmp_path, "model.device=cpu", "--script", str(tmp_path / "job.sh"))
    finally:
        slurm.run("scontrol", "update", "NodeName=node[1-4]", "AvailableFeatures=", "ActiveFeatures=")
    assert gpus in verdicts["gpus"]["found"]
    assert (verdicts["sbatch"]["level"], sbatch in verdicts["sbatch"]["found"]) == (level, True), verdicts["sbatch"]
    python = verdicts["python"]
    assert (python["level"], python["found"].split(",")[0]) == ("ok", platform.python_version())
