"""A private Slurm of four nodes for the tests of one session, and what tests ask of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch_ranks import ROOT

TOOL = ROOT / "tools" / "local_slurm.py"
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"})
"""Job states that a job does not leave, unless it is requeued."""


@dataclass(frozen=True)
class LocalSlurm:
    """Slurm's commands, in the environment that leads them to the private cluster."""

    environment: Mapping[str, str]
    """Ranks of jobs inherit it: this Python first on the path, the package importable, one thread each."""

    def run(self, *command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
        """What a command prints.

        Raises:
            AssertionError: it failed; shows its output.
        """
        words = [str(word) for word in command]
        done = subprocess.run(
            words,
            env={**self.environment, **variables},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(words)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def sbatch(self, *arguments: str | Path, cwd: Path = ROOT, **variables: str) -> str:
        """Submit, and return the job's number."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd, **variables).strip().partition(";")[0]

    def show(self, job: str) -> dict[str, str]:
        """What scontrol says of a job, by field (JobState, Reason, Restarts, ExitCode, NodeList, ...)."""
        words = self.run("scontrol", "-o", "show", "job", job).split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def state(self, job: str) -> str:
        """A job's state, e.g. RUNNING."""
        return self.show(job)["JobState"]

    def wait(self, job: str, states: Collection[str] = ENDED, seconds: float = 120) -> str:
        """Wait until a job is in one of ``states``, and return which.

        Raises:
            AssertionError: it was not within ``seconds``.
        """
        end = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < end, f"job {job} is {state} after {seconds} s: {json.dumps(self.show(job))}"
            time.sleep(0.2)
        return state


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSlurm]:
    """Four nodes of 2 CPUs, on free ports; skipped where there is no Slurm or no root, and failed there in CI."""
    folder = tmp_path_factory.mktemp("slurm")
    started = subprocess.run(
        [sys.executable, TOOL, "start", "--folder", folder], capture_output=True, text=True, timeout=120, check=False
    )
    is_impossible = "no Slurm here" in started.stderr or "as root only" in started.stderr
    if is_impossible and os.environ.get("CI") != "true":  # .ci/run installs it
        pytest.skip(started.stderr)
    try:
        assert started.returncode == 0, started.stderr
        yield LocalSlurm(environment(folder))
    finally:
        subprocess.run([sys.executable, TOOL, "stop", "--folder", folder], check=True, timeout=120)


def environment(folder: Path) -> dict[str, str]:
    """Of Slurm's commands, without what a surrounding job may have set."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "TLT_"))}
    own["PATH"] = f"{Path(sys.executable).parent}:{own.get('PATH', os.defpath)}"
    # MPICH's addresses, of all of UCX's transports together, now and then exceed a line of Slurm's PMI 2
    own["UCX_TLS"] = "tcp,self"
    return {**own, "SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
