"""The private Slurm harms nothing else."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import pytest
from local_slurm import TOOL

from tlt_hpc.common.errors import UserError


@pytest.fixture
def tool() -> dict[str, Any]:
    return runpy.run_path(str(TOOL))


def test_it_removes_its_own_folder_and_leaves_that_of_something_else(tool: dict[str, Any], tmp_path: Path) -> None:
    settings = tmp_path / "slurm.conf"
    settings.write_text("SlurmctldPort=6817\nNodeName=node[1-4] CPUs=2\n")
    with pytest.raises(UserError, match="files of something else"):
        tool["start"](tmp_path)
    tool["main"].__globals__["check_machine"] = lambda: None
    assert tool["main"](["stop", "--folder", str(tmp_path)]) == 0
    assert settings.is_file()
    settings.write_text(f"{tool['MARK']}\n")
    assert tool["main"](["stop", "--folder", str(tmp_path)]) == 0
    assert not tmp_path.exists()


def test_a_process_that_reuses_a_daemons_number_is_left_alone(tool: dict[str, Any], tmp_path: Path) -> None:
    for daemon in ("munged", "slurmctld", "slurmd-node1"):
        (tmp_path / f"{daemon}.pid").write_text(f"{os.getpid()}\n")
    tool["stop"](tmp_path)  # would end this very process
    assert not list(tmp_path.glob("*.pid"))
