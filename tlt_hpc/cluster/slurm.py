"""Questions to Slurm: about the allocation of this process, the queue and the settings; and the request to requeue."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from tlt_hpc.config import UserError

ANSWER_SECONDS = 30.0
"""How long Slurm's controller may take to answer before it counts as not answering."""
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
)
"""States in which a job has ended; in all others it waits or runs."""
_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
_PREEMPTED = re.compile(r"\bPreemptTime=\d")
_FIELD = re.compile(r"(\w+)=(\S*)")
_KILL_WAIT = re.compile(r"^KillWait *= *(\d+)", re.MULTILINE)


class SlurmError(RuntimeError):
    """Slurm did not do what was asked; its text is one line."""


@dataclass(frozen=True)
class Allocation:
    """A job of Slurm's that this process runs in."""

    job_id: str
    restarts: int
    """How often it was queued again."""

    def seconds_left(self, within: float | None = None) -> float | None:
        """Until its time limit; None where it has none.

        Args:
            within: seconds that Slurm may take to answer; None: as for every question.

        Raises:
            SlurmError: ``squeue`` is not there, does not answer, or knows no such job.
        """
        return parse_time(_ask("squeue", "--noheader", f"--jobs={self.job_id}", "--format=%L", within=within))

    def is_preempted(self) -> bool:
        """Whether Slurm is about to end it for the sake of another job.

        Raises:
            SlurmError: ``scontrol`` is not there, does not answer, or knows no such job.
        """
        return _PREEMPTED.search(_show("job", self.job_id)) is not None

    def is_waiting(self) -> bool:
        """Whether it is queued, as after ``requeue``.

        Raises:
            SlurmError: as ``is_preempted``.
        """
        return dict(_FIELD.findall(_show("job", self.job_id))).get("JobState") == "PENDING"

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


@dataclass(frozen=True)
class QueuedJob:
    """A line of ``squeue``."""

    state: str
    nodes: str
    reason: str
    """Why it waits, if it does."""

    @property
    def is_live(self) -> bool:
        return self.state not in ENDED


def read_queue() -> Mapping[str, QueuedJob]:
    """This user's jobs by number, each member of an array on its own (``17_3``); empty where there is no Slurm.

    Those that ended a short while ago are included; no accounting database (``sacct``) is needed.

    Raises:
        UserError: Slurm does not answer.
    """
    if shutil.which("squeue") is None:
        return {}
    given = ("--noheader", "--array", "--states=all", f"--user={os.geteuid()}", "--format=%i|%T|%N|%r")
    try:
        return parse_queue(_ask("squeue", *given))
    except SlurmError as error:
        raise UserError(f"{error}; try again where Slurm answers") from None


def parse_queue(text: str) -> dict[str, QueuedJob]:
    """What ``squeue`` printed, in the format that ``read_queue`` asks for."""
    rows = (line.strip().split("|") for line in text.splitlines() if line.strip())
    return {job: QueuedJob(state, nodes, reason) for job, state, nodes, reason in rows}


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


def _show(what: str, name: str) -> str:
    return _ask("scontrol", "--oneliner", "show", what, name)


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
