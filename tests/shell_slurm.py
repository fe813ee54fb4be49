"""A Slurm of shell scripts, in which tests call ``tlt`` and see what it asks for."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from launch_ranks import ROOT

from tlt_hpc.cli import submissions
from tlt_hpc.cli import submit as submit_module
from tlt_hpc.cli.main import main

TINY = str(ROOT / "jobs" / "tiny.toml")
DEFAULT = {"nodes=1", "ntasks-per-node=2", "cpus-per-task=1", "time=24:00:00", "signal=USR2@120", "requeue"}
"""What a job on CPUs with run.ranks = 2 asks for."""


def program(file: Path, body: str) -> Path:
    """A program of lines of shell."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/bash\n{body}\n")
    file.chmod(0o755)
    return file


@dataclass
class Cluster:
    """A Slurm of shell scripts in an empty folder: its jobs are 4321, 4322, ..., and nothing is in its queue."""

    path: Path
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    checked: list[tuple[Any, ...]] = field(default_factory=list)
    """What was given to preflight, each time."""

    def program(self, name: str, body: str) -> None:
        program(self.path / "bin" / name, body)

    def queue(self, *jobs: str) -> None:
        """Have squeue print ``jobs``, each as JOB|STATE|REASON."""
        (self.path / "queue").write_text("".join(f"{job}\n" for job in jobs))

    def tlt(self, *words: str, status: int = 0) -> str:
        """Run a command; returns what it printed, its one line on standard error last."""
        self.capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["tlt", *words])
            try:
                found = main()
            except SystemExit as end:
                found = int(end.code or 0)
        out, err = self.capsys.readouterr()
        assert found == status, out + err
        assert err.count("\n") <= 1, err
        return str(out + err)

    def submit(self, *words: str, status: int = 0) -> str:
        return self.tlt("submit", *words, status=status)

    @property
    def asked(self) -> set[str]:
        """The options of the last job that was submitted; empty if there was none since this was read."""
        script = self.path / "script"
        lines = script.read_text().splitlines() if script.exists() else []
        script.unlink(missing_ok=True)
        named = ("#SBATCH --job-name", "#SBATCH --output", "#SBATCH --open-mode")
        return {line[10:] for line in lines if line.startswith("#SBATCH --") and not line.startswith(named)}

    @property
    def cancelled(self) -> str:
        """What scancel was called with since this was read."""
        file = self.path / "cancelled"
        text = file.read_text() if file.exists() else ""
        file.unlink(missing_ok=True)
        return text

    def failed(self) -> None:
        """Submit a job, and let it end without a word."""
        self.submit(TINY, "--folder=sub")
        assert self.asked == DEFAULT


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cluster:
    """Slurm's commands on PATH, its variables unset, and preflight replaced by a record of its calls."""
    path, found = tmp_path, Cluster(tmp_path, monkeypatch, capsys)
    found.program("srun", "true")
    number = f"echo >>{path}/count; echo Submitted batch job $((4320 + $(wc -l <{path}/count)))"
    found.program("sbatch", f"cp $1 {path}/script; env -0 >{path}/seen; {number}")
    found.program("squeue", f"cat {path}/queue")
    found.program("scancel", f"echo $* >{path}/cancelled")
    found.queue()
    monkeypatch.setenv("PATH", f"{path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin")
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(path)
    for module in (submit_module, submissions):
        monkeypatch.setattr(module, "preflight", lambda *given: found.checked.append(given))
    return found
