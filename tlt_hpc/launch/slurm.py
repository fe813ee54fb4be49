"""What Slurm says of the allocation this process is in, and the request to be queued again."""

from __future__ import annotations

import logging
import math
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 30.0
"""How long Slurm's controller may take to answer before it counts as not answering."""
SOON_SECONDS = 10.0
"""The same where there is no time for more."""
_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
_PREEMPTED = re.compile(r"\bPreemptTime=\d")
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+)", re.MULTILINE)


class SlurmError(RuntimeError):
    """Slurm did not do what was asked; its text is one line."""


@dataclass(frozen=True)
class Allocation:
    """A job of Slurm's that this process runs in."""

    job_id: str
    restarts: int
    """How often it was queued again."""

    def seconds_left(self, within: float | None = None) -> float | None:
        """Until its time limit; None where it has none. Slurm has ``within`` seconds to answer.

        Raises:
            SlurmError: ``squeue`` is not there, does not answer, or knows no such job.
        """
        return parse_time(_ask("squeue", "--noheader", f"--jobs={self.job_id}", "--format=%L", within=within))

    def is_preempted(self) -> bool:
        """Whether Slurm is about to end it for the sake of another job.

        Raises:
            SlurmError: ``scontrol`` is not there, does not answer, or knows no such job.
        """
        found = _PREEMPTED.search(_ask("scontrol", "--oneliner", "show", "job", self.job_id))
        return found is not None

    def requeue(self) -> None:
        """Have it queued again; Slurm then ends what runs of it.

        Raises:
            SlurmError: Slurm refuses, for instance since requeueing is off.
        """
        _ask("scontrol", "requeue", self.job_id)


def allocation(environment: Mapping[str, str]) -> Allocation | None:
    """The allocation that the environment tells of; None outside of Slurm."""
    if "SLURM_JOB_ID" not in environment:
        return None
    names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
    # by its own number alone the first member of an array stands for all of them
    is_member = all(name in environment for name in names)
    job_id = "_".join(environment[name] for name in names) if is_member else environment["SLURM_JOB_ID"]
    return Allocation(job_id, int(environment.get("SLURM_RESTART_COUNT", "0")))


def ask_seconds_left(environment: Mapping[str, str]) -> float | None:
    """Seconds until the allocation ends as Slurm has it now; infinite without an end, None where Slurm does not tell.

    For who would go on without an answer: it is not waited for as long as others are.
    """
    job = allocation(environment)
    if job is None:
        return None
    try:
        left = job.seconds_left(SOON_SECONDS)
    except SlurmError as error:
        logger.warning("whether the time limit has been moved is not known: %s", error)
        return None
    return math.inf if left is None else left


def kill_wait() -> float:
    """Seconds from SIGTERM to SIGKILL on this cluster.

    Raises:
        SlurmError: ``scontrol`` is not there, does not answer, or does not tell.
    """
    found = _KILL_WAIT.search(_ask("scontrol", "show", "config"))
    if found is None:
        raise SlurmError("`scontrol show config` tells no KillWait")
    return float(found[1])


def parse_time(text: str) -> float | None:
    """Seconds of Slurm's ``days-hours:minutes:seconds``; None where there is no limit.

    Raises:
        SlurmError: it is no time.
    """
    text = text.strip()
    if text == "UNLIMITED":
        return None
    found = _TIME.fullmatch(text)
    if found is None:
        raise SlurmError(f"Slurm tells {text!r} where a time was asked for")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _ask(command: str, *arguments: str, within: float | None = None) -> str:
    within = ANSWER_SECONDS if within is None else within
    path = shutil.which(command)
    if path is None:
        raise SlurmError(f"there is no {command} on PATH")
    line = " ".join((command, *arguments))
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=within, check=False)
    except subprocess.TimeoutExpired:
        raise SlurmError(f"`{line}` did not answer within {within:.0f} s") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise SlurmError(f"`{line}` said: {said}")
    return done.stdout
