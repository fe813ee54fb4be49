"""The Python that a job's ranks will run, found by sbatch/env.sh as in the job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tlt_hpc
from tlt_hpc.config import UserError
from tlt_hpc.plan.preflight.program import ask

_CLONE = Path(tlt_hpc.__file__).resolve().parent.parent
_ENVIRONMENT = _CLONE / "sbatch" / "env.sh"
_SECONDS = 60.0
"""Python starts twice, loads mpi4py and sets up conda: seconds, more on a slow file system."""
_SHELL = 'set -euo pipefail; PROJECT=$1 STORE=$1; source "$2" >&2; exec $TLT_CONTAINER python -c "$3"'
_QUESTION = """
import importlib.util, json, pathlib, platform, sys
torch = importlib.util.find_spec("torch")
text = pathlib.Path(torch.origin).with_name("version.py").read_text() if torch and torch.origin else ""
print(json.dumps([sys.executable, sys.prefix, platform.python_version(), text]))
"""
"""Reads what torch was built for; importing it would take seconds."""
_IN_AN_IMAGE = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")


@dataclass(frozen=True)
class JobPython:
    """A Python and the torch in it."""

    program: str
    prefix: Path
    """Prefix of its environment."""
    version: str
    torch: str
    """Version; empty: not installed."""
    torch_cuda: str
    """The CUDA version that torch is built for, such as ``12.8``; empty for a CPU build."""

    @property
    def is_this(self) -> bool:
        """Whether this process runs in the same environment."""
        return self.prefix.resolve() == Path(sys.prefix).resolve()


def find_python(asks_slurm: bool) -> JobPython:
    """The job's Python: this one, unless the job's batch script will search for one.

    Raises:
        UserError: the batch script would not find one.
    """
    is_elsewhere = asks_slurm and _ENVIRONMENT.is_file() and not any(name in os.environ for name in _IN_AN_IMAGE)
    if not is_elsewhere:
        return _python_of(subprocess.check_output([sys.executable, "-c", _QUESTION], text=True))
    answer = ask(["bash", "-c", _SHELL, "bash", str(_CLONE), str(_ENVIRONMENT), _QUESTION], _SECONDS)
    if answer.status:
        raise UserError(f"the job would find no Python: {answer.last_line}; name its environment in TLT_ENVIRONMENT")
    return _python_of(answer.out)


def _python_of(answer: str) -> JobPython:
    program, prefix, version, text = json.loads(answer)
    return JobPython(program, Path(prefix), version, _of_torch("__version__", text), _of_torch("cuda", text))


def _of_torch(name: str, text: str) -> str:
    """A string that torch's version.py sets; empty if it sets None or there is no torch."""
    found = re.search(rf"^{name}\b[^=]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else ""
