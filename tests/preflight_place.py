"""A correct environment for a job: a model, a data set, a Slurm of shell scripts. Tests plant problems in it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from launch_ranks import ROOT
from shell_slurm import program

from tlt_hpc.cli.main import parse
from tlt_hpc.extras.preflight import mpi, system_checks
from tlt_hpc.extras.preflight.checklist import check_job_of_options
from tlt_hpc.extras.preflight.program import ProgramOutput
from tlt_hpc.extras.preflight.results import Finding
from tlt_hpc.models.tokenizer import package_asset_folder

NODES = "main*|up|1-00:00:00|256000|gpu:a100:4(S:0-1)"
SCRIPT = """#!/usr/bin/env bash
#SBATCH --account=science
#SBATCH --partition=main  # a comment
#SBATCH -N2
#SBATCH --ntasks-per-node 1
#SBATCH --time=10:00:00
#SBATCH --mem=16G
#SBATCH --signal=USR2@120
#SBATCH --requeue
srun --mpi="$TLT_SRUN_MPI" python -P -m mpi4py -m tlt_hpc train jobs/tiny.toml
"""


@dataclass
class Place:
    """A correct environment for a job, and methods to change it."""

    path: Path
    monkeypatch: pytest.MonkeyPatch
    arguments: list[str] = field(default_factory=list)
    """Arguments of the command after the job."""

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def data(self) -> Path:
        return self.path / "data.jsonl"

    def write(self, name: str, text: str) -> Path:
        file = self.path / name
        file.write_text(text)
        return file

    def command(self, name: str, script: str) -> Path:
        """A program on PATH."""
        return program(self.path / "bin" / name, script)

    def prints(self, name: str, text: str, status: int = 0) -> Path:
        """A program that prints a text."""
        shown = self.write(f"{name}-says-{len(list(self.path.iterdir()))}.txt", text)
        return self.command(name, f"cat '{shown}'\nexit {status}")

    def slurm(
        self,
        nodes: str = NODES,
        kinds: str = "MPI plugin types are...\n\tpmi2\n\tpmix\n",
        script: str = SCRIPT,
        requeue: int = 1,
    ) -> None:
        """Add a Slurm with these answers, and a script that asks it for two nodes."""
        self.command("scontrol", f"echo 'JobRequeue = {requeue}'")
        self.prints("sinfo", nodes + "\n")
        self.prints("srun", kinds)
        self.prints("sbatch", "sbatch: Job 1 to start at 2026-01-01T00:00:00\n")
        self.arguments += ["--script", str(self.write("job.sh", script))]

    def torch_for(self, cuda: str) -> None:
        """Have a torch for that CUDA installed."""
        self.monkeypatch.setattr(system_checks, "torch_build", lambda: ("2.13.0", cuda))

    def set(self, *overrides: str) -> None:
        self.arguments += overrides

    def check(self) -> dict[str, Finding]:
        """What the command finds, by the checks' names."""
        return dict(check_job_of_options(parse(self.command_line())))

    def command_line(self) -> list[str]:
        return ["preflight", str(ROOT / "jobs" / "tiny.toml"), *self.base(), *self.arguments]

    def base(self) -> list[str]:
        run = self.path / "runs"
        keys = {"model.path": self.model, "data.source": self.data, "run.folder": run, "data.max_prompt_tokens": 64}
        return [f"{key}={value}" for key, value in keys.items()]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The embedded model, forty problems, and the answers of a working MPI, without starting it."""
    path, place = tmp_path, Place(tmp_path, monkeypatch)
    shutil.copytree(package_asset_folder("tiny"), place.model)
    rows = [{"prompt": f"gcd({2 * n},{3 * n})=", "answer": str(n)} for n in range(1, 41)]
    place.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{path / 'bin'}:/usr/bin:/bin")
    for name in [name for name in os.environ if name.startswith(("SBATCH_", "SLURM_", "TLT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(mpi, "run_program", answer_of_mpich)
    place.torch_for("")
    return place


def answer_of_mpich(command: list[str], seconds: float, environment: object = None) -> ProgramOutput:
    """What a working MPICH answers to the checks of MPI."""
    told = {"ranks": 2, "hosts": ["here"], "version": "MPICH Version: 4.3.1", "files": ["/opt/mpi/libmpi.so.12"]}
    return ProgramOutput(0, json.dumps(told), "")
