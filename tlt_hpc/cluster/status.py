"""How the members of a submission stand, from Slurm's queue and the jobs' exit statuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.cluster.executor import read_status
from tlt_hpc.cluster.slurm import QueuedJob
from tlt_hpc.cluster.submission import Submission, SubmittedRun

FINISHED = "finished"
STOPPED_EARLY = 75
"""Exit status of a command that was stopped and can continue."""


@dataclass(frozen=True)
class MemberStatus:
    """How one member stands; ``state`` is ``finished``, ``stopped early``, ``failed (status N)`` or, in lower case,
    what Slurm says, with its reason for a job that waits."""

    member: SubmittedRun
    state: str
    is_live: bool
    """Whether it still waits or runs, so that it is not to be submitted again."""
    is_blocked: bool
    """Whether its job waits for one that has failed, and so for ever."""
    log: Path | None


def read_statuses(submission: Submission, queue: Mapping[str, QueuedJob]) -> list[MemberStatus]:
    """How all members stand, by the newest job of each.

    Raises:
        UserError: the status of a job cannot be read.
    """
    return [member_status(submission, member, queue) for member in submission.members]


def member_status(submission: Submission, member: SubmittedRun, queue: Mapping[str, QueuedJob]) -> MemberStatus:
    """How one member stands, by its newest job."""
    if not member.jobs:
        return MemberStatus(member, "not submitted", False, False, None)
    job = member.jobs[-1]
    queued, log = queue.get(job), submission.jobs_folder / f"{job}_0_log.out"
    state = job_state(queued, read_status(submission.jobs_folder, job))
    if queued is None:
        return MemberStatus(member, state, False, False, log)
    return MemberStatus(member, state, queued.is_live, queued.is_blocked, log)


def job_state(queued: QueuedJob | None, status: int | None) -> str:
    """The state of a job: Slurm's while it waits or runs, then by its exit status, or Slurm's if it left none."""
    if queued is not None and queued.is_blocked:
        return "blocked: a job before it has failed"
    if queued is not None and queued.is_live:
        waits = queued.state == "PENDING" and queued.reason not in ("", "None")
        return queued.state.lower() + f" ({queued.reason})" * waits
    if status not in (0, STOPPED_EARLY) and queued is not None and queued.state not in ("COMPLETED", "FAILED"):
        return queued.state.lower().replace("_", " ")
    if status is None:
        return "failed (no exit status)"
    return {0: FINISHED, STOPPED_EARLY: "stopped early"}.get(status, f"failed (status {status})")


def unfinished(statuses: Sequence[MemberStatus]) -> set[str]:
    """The names of those that neither wait nor run nor have finished: what ``resubmit`` submits again."""
    return {status.member.name for status in statuses if not status.is_live and status.state != FINISHED}
