"""Runs that faults strike: how one is started, what it has left, and what two runs of the same job have in common."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt_hpc.cluster.launcher import find_mpiexec
from tlt_hpc.common.errors import UserError
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.rollout_log import read_step
from tlt_hpc.storage.step_lines import read_lines

ROOT = Path(__file__).resolve().parents[2]
HANG_SECONDS = 240.0
"""Without a committed step; more is a hang. The watch ends a rollout after a quarter of it."""
HANG_STATUS = 71
"""The status with which the watch ends a job that hangs."""
MARK = "TLT_FAULT_CAMPAIGN"
"""In the environment of a run's processes: its folder."""


@dataclass(frozen=True)
class Job:
    """A run that is started again and again, in different folders."""

    ranks: int
    settings: tuple[str, ...]
    python: tuple[str, ...] = (sys.executable, "-m", "mpi4py")
    """Starts a rank; or forks of a process that has the libraries (tests/launch_ranks.py)."""

    def start(
        self, place: Path, log: Path, variables: dict[str, str] | None = None, *settings: str
    ) -> subprocess.Popen[bytes]:
        """Start ``place/run`` in a session of its own, its output in ``log``.

        ``variables``: those that ``fault_rank.py`` reads; without them nothing happens to the run.
        """
        launcher = [find_mpiexec(), "-n", str(self.ranks)] if self.ranks > 1 else []
        program = ["tools/fault_rank.py"] if variables else ["-m", "tlt_hpc"]
        command = [*launcher, *self.python, *program, "train", *self.settings, *settings]
        command += [f"run.ranks={self.ranks}", f"run.folder={place}", "run.name=run"]
        fixed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TLT_RANKS": str(self.ranks), "COLUMNS": "300"}
        environment = {**os.environ, **fixed, MARK: str(place), **(variables or {})}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def run(self, place: Path, log: Path, variables: dict[str, str] | None = None, *settings: str) -> tuple[int, str]:
        """Exit status and output of a start; a hang is ended."""
        process = self.start(place, log, variables, *settings)
        advances_until(process, place, lambda: False)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return process.returncode, log.read_text(errors="replace")

    def succeed(self, place: Path, log: Path, variables: dict[str, str] | None = None, *settings: str) -> None:
        """The same of a start without a fault.

        Raises:
            UserError: it fails.
        """
        status, text = self.run(place, log, variables, *settings)
        if status:
            raise UserError(f"the run without a fault in {place} ended with status {status}: {text[-500:]}")


def forking(ranks: int, settings: tuple[str, ...]) -> Job:
    """A job whose ranks are forks of a process that has their imports."""
    sys.path.append(str(ROOT / "tests"))
    from launch_ranks import forked  # type: ignore[import-not-found]

    return Job(ranks, settings, tuple(forked()))


def advances_until(process: subprocess.Popen[Any], folder: Path, is_time: Callable[[], bool]) -> bool:
    """Wait until it is time, or the run has ended; returns False if no step is committed for too long."""
    done, since = num_steps(folder), time.monotonic()
    while process.poll() is None and not is_time():
        if num_steps(folder) != done:
            done, since = num_steps(folder), time.monotonic()
        if time.monotonic() - since > HANG_SECONDS:
            return False
        time.sleep(0.05)
    return True


def ends_within(process: subprocess.Popen[Any], seconds: float) -> bool:
    """Return whether a process ends in so many seconds."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(seconds, 0.0))
    return process.returncode is not None


def send(number: signal.Signals, processes: Iterable[int]) -> None:
    """Send a signal to each process that still exists."""
    for process in list(processes):
        with suppress(ProcessLookupError):
            os.kill(process, number)


def ranks_in(place: Path) -> dict[int, int]:
    """Rank -> process id, of the run in ``place``; not the processes that a rank has forked."""
    found: dict[int, tuple[int, int]] = {}
    mark = f"\0{MARK}={place}\0".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment, command = b"\0" + (path / "environ").read_bytes(), (path / "cmdline").read_bytes()
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        match = re.search(rb"\0(?:PMI_RANK|OMPI_COMM_WORLD_RANK)=(\d+)\0", environment)
        if match and mark in environment and b"mpi4py" in command:
            found[int(path.name)] = int(match[1]), parent
    return {rank: process for process, (rank, parent) in found.items() if parent not in found}


# -- what a run has left --------------------------------------------------------------------------------------------


def num_steps(place: Path) -> int:
    """Return the number of committed steps."""
    return len(lines_of(place))


def lines_of(place: Path) -> set[int]:
    """The steps whose lines a run has; none if it has a line that cannot be read."""
    try:
        return set(read_lines(RunFolder(place / "run").metrics))
    except UserError:
        return set()


def texts(run: RunFolder, step: int) -> dict[object, tuple[list[int], float]] | str:
    """The responses of a step and their rewards, by key, or why they cannot be read."""
    try:
        records = [read_step(path) for path in run.rollout_logs(step)]
    except DamagedFile as error:
        return str(error)
    return {
        rollout.key: (rollout.response_tokens.tolist(), float(reward))
        for record in records
        for rollout, reward in zip(record.rollouts, record.rewards, strict=True)
    }


def outcome_of(place: Path, steps: int) -> dict[str, Any]:
    """What two runs of the same job have in common at their ends: texts and rewards, policy, last checkpoint."""
    run = RunFolder(place / "run")
    found: dict[str, Any] = {f"texts of step {step + 1}": texts(run, step) for step in range(steps)}
    found["committed steps"] = lines_of(place)
    found["policy"] = run.finished.exists() and json.loads(run.finished.read_text())["policy_sha256"]
    saved = run.checkpoints / f"step-{steps:06d}"
    return found | {path.name: path.read_bytes() for path in saved.glob("policy-*")}


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """In what two outcomes differ, a few words each."""
    return [f"differs in {name}" for name in sorted(found.keys() | wanted) if found.get(name) != wanted.get(name)]
