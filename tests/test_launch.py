"""Starting ranks: what counts as launched, and the command and environment of those that `tlt` starts itself."""

from __future__ import annotations

import sys

import pytest

from tlt_hpc.launch import local


@pytest.mark.parametrize(
    ("environment", "rank", "count"),
    [
        ({}, None, None),
        ({"PMI_RANK": "3", "PMI_SIZE": "8"}, 3, 8),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, 0, 2),
        ({"PMIX_RANK": "5", "SLURM_STEP_NUM_TASKS": "64"}, 5, 64),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, 1, 4),
        # a batch script, outside any step, has SLURM_PROCID too, and is no rank
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None, None),
    ],
)
def test_who_was_launched(environment, rank, count):
    assert local.launched_rank(environment) == rank
    assert local.launched_count(environment) == count


def test_the_command_ends_all_ranks_when_one_raises(monkeypatch):
    monkeypatch.setattr(local, "find_mpiexec", lambda: "/opt/mpi/bin/mpiexec")
    command = local.launch_command(3, ["train", "jobs/tiny.toml"])
    runner = [sys.executable, "-m", "mpi4py", "-m", "tlt_hpc"]
    assert command == ["/opt/mpi/bin/mpiexec", "-n", "3", *runner, "train", "jobs/tiny.toml"]


def test_one_thread_a_rank_unless_the_user_says_otherwise():
    assert local.launch_environment(2, {})["OMP_NUM_THREADS"] == "1"
    assert local.launch_environment(2, {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"
    assert local.launch_environment(2, {})["TLT_RANKS"] == "2"


def test_no_mpiexec_is_one_line_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="no mpiexec beside this Python or on PATH; `pip install mpich`"):
        local.find_mpiexec()
