"""The private Slurm: a second start changes nothing, and it harms nothing else."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from local_slurm import TOOL, LocalSlurm

from tlt_hpc.common.errors import UserError


@pytest.fixture
def tool() -> dict[str, Any]:
    return runpy.run_path(str(TOOL))


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slurm
def test_a_second_start_leaves_it_as_it_is(slurm: LocalSlurm) -> None:
    folder = Path(slurm.environment["SLURM_CONF"]).parent
    before = {path.name: path.read_text() for path in folder.glob("*.pid")}
    assert len(before) == 6
    again = call("start", "--folder", folder)
    assert (again.returncode, again.stderr) == (
        2,
        f"local_slurm: a Slurm is up in {folder}; to use it: "
        f"export SLURM_CONF={folder / 'slurm.conf'} (`stop` would end its jobs)\n",
    )
    assert {path.name: path.read_text() for path in folder.glob("*.pid")} == before


def test_a_folder_of_something_else_is_neither_used_nor_removed(tool: dict[str, Any], tmp_path: Path) -> None:
    settings = tmp_path / "slurm.conf"
    settings.write_text("SlurmctldPort=6817\nNodeName=node[1-4] CPUs=2\n")
    with pytest.raises(UserError, match="files of something else"):
        tool["start"](tmp_path)
    tool["main"].__globals__["check_machine"] = lambda: None
    assert tool["main"](["stop", "--folder", str(tmp_path)]) == 0
    assert settings.is_file()


def test_nodes_have_the_memory_that_is_asked_for(tool: dict[str, Any], tmp_path: Path) -> None:
    without = {"check_machine": lambda: None, "start_daemon": lambda *_: None, "wait_until": lambda *_: True}
    tool["main"].__globals__.update(without)
    assert tool["main"](["start", "--folder", str(tmp_path), "--memory", "12000"]) == 0
    (nodes,) = (line for line in (tmp_path / "slurm.conf").read_text().splitlines() if line.startswith("NodeName="))
    assert "RealMemory=12000" in nodes.split()


def test_it_removes_its_own_folder(tool: dict[str, Any], tmp_path: Path) -> None:
    tool["main"].__globals__["check_machine"] = lambda: None
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "slurm.conf").write_text(f"{tool['MARK']}\n")
    assert tool["main"](["stop", "--folder", str(folder)]) == 0
    assert not folder.exists()


def test_a_process_that_reuses_a_daemons_number_is_left_alone(tool: dict[str, Any], tmp_path: Path) -> None:
    for daemon in ("munged", "slurmctld", "slurmd-node1"):
        (tmp_path / f"{daemon}.pid").write_text(f"{os.getpid()}\n")
    tool["stop"](tmp_path)  # would end this very process
    assert not list(tmp_path.glob("*.pid"))
