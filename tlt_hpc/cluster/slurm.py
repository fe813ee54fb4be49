"""Questions to Slurm: about the allocation of this process and the queue; and the request to requeue."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tlt_hpc.common.errors import UserError

ANSWER_SECONDS = 30.0
"""How long Slurm's controller may take to answer before it counts as not answering."""
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
)
"""States in which a job has ended; in all others it waits or runs."""
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_RESTARTS = re.compile(r"\bRestarts=(\d+)")
_PREEMPTED = re.compile(r"\bPreemptTime=\d")
_SHELL_OF_SALLOC = "4294967290"
"""Number of the step that is the shell which ``salloc`` opens on a node, where a site has it do so."""
_OF_THE_USER = ("SQUEUE_", "SINFO_", "SCONTROL_", "SLURM_TIME_FORMAT")
"""Variables with which users have Slurm's commands print less, or times otherwise: not what is read here."""


class SlurmError(UserError):
    """Slurm did not do what was asked; its text is one line."""


@dataclass(frozen=True)
class Allocation:
    """A Slurm job that this process runs in."""

    job_id: str
    restarts: int
    """How often it was queued again."""

    def ask_seconds_left(self, within: float = ANSWER_SECONDS) -> float:
        """Until its time limit; infinite where it has none. Slurm may take ``within`` seconds to answer.

        Raises:
            SlurmError: ``squeue`` is not there, does not answer, or knows no such job.
        """
        asked = ("--noheader", f"--jobs={self.job_id}", "--format=%L")
        return parse_slurm_time(ask_slurm("squeue", *asked, within=within).strip())

    def ask_if_preempted(self) -> bool:
        """Ask Slurm, and return True if it is about to end the job for the sake of another.

        Raises:
            SlurmError: ``scontrol`` is not there, does not answer, or knows no such job.
        """
        return _PREEMPTED.search(ask_slurm("scontrol", "--oneliner", "show", "job", self.job_id)) is not None

    def ask_if_requeued(self) -> bool:
        """Ask Slurm, and return True if a ``requeue`` was accepted.

        Raises:
            SlurmError: as ``ask_if_preempted``.
        """
        shown = ask_slurm("scontrol", "--oneliner", "show", "job", self.job_id)
        restarts = _RESTARTS.search(shown)
        return "JobState=PENDING" in shown or (restarts is not None and int(restarts[1]) > self.restarts)

    def requeue(self) -> None:
        """Have it queued again; Slurm then ends what runs of it.

        Raises:
            SlurmError: Slurm refuses, for instance since requeueing is off.
        """
        ask_slurm("scontrol", "requeue", self.job_id)


def allocation(environment: Mapping[str, str]) -> Allocation | None:
    """The allocation that the environment names; None outside of Slurm."""
    job = job_number(environment)
    return Allocation(job, int(environment.get("SLURM_RESTART_COUNT", "0"))) if job else None


def job_number(environment: Mapping[str, str]) -> str:
    """The job that this process is part of, as ``squeue`` prints it: ``17_3`` in an array; empty outside of Slurm."""
    names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
    # by its own number alone the first member of an array stands for all of them
    is_member = all(name in environment for name in names)
    return "_".join(environment[name] for name in names) if is_member else environment.get("SLURM_JOB_ID", "")


def is_task(environment: Mapping[str, str]) -> bool:
    """Return True if srun started this process as a rank, which SLURM_PROCID alone does not say."""
    return environment.get("SLURM_STEP_ID", _SHELL_OF_SALLOC) != _SHELL_OF_SALLOC


@dataclass(frozen=True)
class QueuedJob:
    """A line of ``squeue``."""

    state: str
    reason: str
    """Why it waits, if it does."""

    @property
    def is_blocked(self) -> bool:
        """True if it waits for a job that has failed, and so for ever."""
        return self.reason == "DependencyNeverSatisfied"

    @property
    def is_live(self) -> bool:
        """True if it waits or runs."""
        return self.state not in ENDED and not self.is_blocked


def read_queue(users: Iterable[int] = ()) -> Mapping[str, QueuedJob]:
    """Jobs of this user and of ``users`` by number, each member of an array on its own (``17_3``).

    Those that ended a short while ago are included; no accounting database (``sacct``) is needed.

    Raises:
        SlurmError: Slurm does not answer, or is not here.
    """
    if shutil.which("squeue") is None:
        raise SlurmError("there is no squeue on PATH; call this where Slurm's commands are")
    whose = ",".join(map(str, sorted({os.geteuid(), *users})))
    given = ("--noheader", "--array", "--states=all", f"--user={whose}", "--format=%i|%T|%r")
    return parse_queue(ask_slurm("squeue", *given))


def parse_queue(text: str) -> dict[str, QueuedJob]:
    """Parse the output of ``squeue`` in the format of ``read_queue``; ``17_[0-3]`` counts as the array's own."""
    rows = (line.strip().split("|", 2) for line in text.splitlines() if line.strip())  # a reason may be any text
    return {job.partition("_[")[0]: QueuedJob(state, reason) for job, state, reason in rows}


def parse_slurm_time(text: str) -> float:
    """Seconds of a time in Slurm's format, such as ``90`` (minutes), ``5:00``, ``24:00:00`` or ``2-00``.

    Raises:
        SlurmError: it is no such time.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    match = _TIME.fullmatch(text)
    if match is None:
        raise SlurmError(f"time {text!r} is not in Slurm's format; give it as 90 (minutes), 24:00:00 or 2-00:00:00")
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is None and match[4] is None:  # minutes[:seconds]
        return float(60 * first + second)
    return float(86400 * days + 3600 * first + 60 * second + third)


def ask_slurm(command: str, *arguments: str, within: float = ANSWER_SECONDS) -> str:
    """Run a command of Slurm and return its output, within so many seconds.

    Raises:
        SlurmError: it is not there, does not answer, or fails.
    """
    path = shutil.which(command)
    if path is None:
        raise SlurmError(f"there is no {command} on PATH")
    line = " ".join((command, *arguments))
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_USER)}
    try:
        done = subprocess.run(  # names of jobs and folders need not be valid text
            [path, *arguments], capture_output=True, text=True, errors="replace", timeout=within, check=False, env=own
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"`{line}` did not answer within {within:.0f} s") from None
    if "configuration source" in done.stderr:
        raise SlurmError(f"{command} finds no slurm.conf", "set SLURM_CONF, or call this where Slurm's commands work")
    if done.returncode:
        raise SlurmError(f"`{line}` failed: {' '.join(done.stderr.split()) or f'status {done.returncode}'}")
    return done.stdout
