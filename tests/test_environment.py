"""Each start of a run records its environment; torn lines do not prevent reading the others."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_world import OneRank
from launch_ranks import ROOT

import tlt_hpc
from tlt_hpc.checkpoint.claim import claim_run_folder_all_ranks
from tlt_hpc.common.source import read_git_commit
from tlt_hpc.config import ConfigError, UserError, load_config
from tlt_hpc.look.environment import RankPlace, collect_start_environment, hosts_of
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.records import Environment, Host, add_environment, read_environments

ENVIRONMENT = Environment(
    time="2026-11-22T12:00:00+00:00",
    version="0.1.0",
    commit="0123456789abcdef" * 2 + "01234567",
    source="0a1b2c3d4e5f",
    python="3.11.2",
    packages={"torch": "2.13.0", "numpy": "2.4.6"},
    cuda="12.8",
    mpi="Open MPI v5.0.6\nmore of it",
    hosts=(Host("gpu-1", 8, "EPYC", 64, 10**12, {"H100": 8}), Host("gpu-2", 4, "EPYC", 32, 10**12, {})),
    threads="1",
    slurm={"job": "4711"},
    command=("python", "-m", "tlt_hpc", "train", "jobs/tiny.toml"),
)


@pytest.mark.parametrize("torn", ('{"time": "2026', '{"time": "2026"}', "[1]", "\0\0\0"))
def test_what_is_written_is_read_back_also_beside_a_torn_line(tmp_path: Path, torn: str) -> None:
    path, later = tmp_path / "environment.jsonl", replace(ENVIRONMENT, commit="", cuda="")
    add_environment(path, later)
    with path.open("a") as file:
        file.write(json.dumps(asdict(ENVIRONMENT) | {"key of a later version": 1}) + "\n" + torn)
    found, problems = read_environments(path)
    assert found == [later, ENVIRONMENT] and len(problems) == 1 and f"{path}:3 is cut off" in problems[0]
    add_environment(path, ENVIRONMENT)
    found, problems = read_environments(path)
    assert found == [later, ENVIRONMENT, ENVIRONMENT] and len(problems) == 1, "the next line is whole"


def test_ranks_of_a_host_share_its_cores_and_gpus() -> None:
    places = [RankPlace(host, "EPYC", frozenset(cores), 8, "H100" if gpu else "", gpu) for host, cores, gpu in (
        ("b", {0}, "GPU-1"), ("a", {0}, ""), ("b", {0, 1}, "GPU-1"), ("b", {1, 2}, "GPU-2")
    )]  # fmt: skip
    assert hosts_of(places) == (Host("b", 3, "EPYC", 3, 8, {"H100": 2}), Host("a", 1, "EPYC", 1, 8, {}))


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(name, value)
    place = RankPlace.here("here")
    assert place.cores == os.sched_getaffinity(0) and place.memory_bytes > 2**28 and place.processor
    world = SimpleNamespace(mpi_version="MPICH 5\n\0", placement=("ranks on here:",))
    found = collect_start_environment(world, [place], "", (0, 20, 21, 22))
    assert found.version == tlt_hpc.__version__ and found.mpi == "MPICH 5" and found.slurm["job"] == "11_3"
    assert found.packages.keys() >= {"torch", "mpi4py", "deepspeed", "transformers", "h5py", "numpy"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found.time)
    assert list(found.command) == sys.orig_argv
    assert found.placement == ("ranks on here:",) and found.never_sampled == "0, 20-22"


# --- the commit of a clone ---


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_git_s_own(tmp_path: Path) -> None:
    """None before the first commit; then on a branch, in a worktree, packed."""

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", str(tmp_path / "clone"), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "clone").mkdir()
    git("init")
    assert read_git_commit(tmp_path / "clone") == ""
    git("commit", "--allow-empty", "-m", "one")
    git("worktree", "add", "-b", "side", str(tmp_path / "tree"))
    for _ in range(2):
        assert (
            read_git_commit(tmp_path / "clone") == read_git_commit(tmp_path / "tree") == git("rev-parse", "HEAD") != ""
        )
        git("pack-refs", "--all")


# --- the claim of a folder ---


def test_a_start_that_is_refused_leaves_no_line(tmp_path: Path) -> None:
    def start(*changes: str) -> RunFolder:
        config = load_config(ROOT / "jobs" / "tiny.toml", [f"run.folder={tmp_path}", *changes])
        claim_run_folder_all_ranks(RunFolder(config.folder), config, OneRank(), environment=ENVIRONMENT)
        return RunFolder(config.folder)

    folder = start()
    with pytest.raises(ConfigError, match=r"run\.seed"):
        start("run.seed=5")
    assert read_environments(folder.environment) == ([ENVIRONMENT], [])
    folder.environment.unlink()
    folder.environment.mkdir()
    with pytest.raises(UserError, match=r"cannot write .*environment\.jsonl"):
        start()
