"""The private Slurm: it comes up, runs steps on several nodes, gives out GPUs, requeues; it harms nothing else."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from local_slurm import TOOL, LocalSlurm, refuse


@pytest.fixture
def tool() -> dict[str, Any]:
    return runpy.run_path(str(TOOL))


def call(*arguments: str | Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({} if path is None else {"PATH": path})
    return subprocess.run(
        [sys.executable, TOOL, *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slurm
def test_steps_run_on_every_node(slurm: LocalSlurm) -> None:
    told = slurm.run("srun", "--nodes=4", "--ntasks-per-node=2", "bash", "-c", 'echo "$SLURMD_NODENAME $SLURM_LOCALID"')
    assert sorted(told.splitlines()) == [f"node{node} {rank}" for node in (1, 2, 3, 4) for rank in (0, 1)]


@pytest.mark.slurm
def test_gpus_are_given_out(slurm: LocalSlurm) -> None:
    told = slurm.run("srun", "--nodes=1", "--gpus-per-node=2", "bash", "-c", 'echo "$CUDA_VISIBLE_DEVICES"')
    assert told == "0,1\n"


@pytest.mark.slurm
def test_a_requeued_job_starts_again_within_seconds(slurm: LocalSlurm, tmp_path: Path) -> None:
    log = tmp_path / "log"
    wrapped = 'if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then scontrol requeue $SLURM_JOB_ID; sleep 60; fi; echo again'
    job = slurm.sbatch(f"--output={log}", "--requeue", "--open-mode=append", "--wrap", wrapped, cwd=tmp_path)
    assert slurm.wait(job, {"COMPLETED", "FAILED", "CANCELLED"}) == "COMPLETED"
    assert slurm.show(job)["Restarts"] == "1"
    assert "again" in log.read_text()


@pytest.mark.slurm
def test_status_and_a_second_start_leave_it_as_it_is(slurm: LocalSlurm) -> None:
    folder = Path(slurm.environment["SLURM_CONF"]).parent
    before = {path.name: path.read_text() for path in folder.glob("*.pid")}
    assert len(before) == 6
    again = call("start", "--folder", folder)
    assert again.stdout == f"export SLURM_CONF={folder / 'slurm.conf'}\n"
    assert {path.name: path.read_text() for path in folder.glob("*.pid")} == before
    status = call("status", "--folder", folder)
    assert status.returncode == 0
    assert status.stdout.count(" up\n") == 6
    other = call("start", "--folder", folder, "--nodes", "2")
    assert (other.returncode, other.stderr.count("one of 4 nodes is up")) == (1, 1)


def test_what_is_missing_is_told_with_the_command_that_installs_it(tool: dict[str, Any], tmp_path: Path) -> None:
    programs = tool["missing_packages"].__globals__
    programs["search_path"] = lambda: str(tmp_path)
    with pytest.raises(tool["SlurmError"], match=r"apt-get install .* munge slurmctld slurmd slurm-client$"):
        tool["check_programs"]()


def test_a_folder_of_something_else_is_neither_used_nor_removed(tool: dict[str, Any], tmp_path: Path) -> None:
    settings = tmp_path / "slurm.conf"
    settings.write_text("SlurmctldPort=6817\nNodeName=node[1-4] CPUs=2\n")
    with pytest.raises(tool["SlurmError"], match="files of something else"):
        tool["start"](tool["Cluster"](tmp_path))
    assert call("stop", "--folder", tmp_path, "--purge").returncode == 0
    assert settings.is_file()
    assert call("status", "--folder", tmp_path).returncode == 1


def test_a_process_that_took_over_a_daemons_number_is_left_alone(tool: dict[str, Any], tmp_path: Path) -> None:
    cluster = tool["Cluster"](tmp_path, nodes=1)
    for daemon in cluster.daemons:
        cluster.pid_file(daemon).write_text(f"{os.getpid()}\n")
    tool["stop"](cluster)  # would end this very process
    assert not list(tmp_path.glob("*.pid"))


def test_without_slurm_tests_are_skipped_and_in_ci_they_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no Slurm here"):
        refuse("no Slurm here")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no Slurm here"):
        refuse("no Slurm here")
