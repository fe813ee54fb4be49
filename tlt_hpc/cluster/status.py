"""How the members of a submission stand, from Slurm's queue and the jobs' exit statuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tlt_hpc.cluster.executor import read_status
from tlt_hpc.cluster.slurm import QueuedJob, SlurmError, read_queue
from tlt_hpc.cluster.stopping import STOPPED_EARLY
from tlt_hpc.cluster.submission import Submission, SubmittedRun, load_known_submissions
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.records import read_finished

FINISHED, CANCELLED, UNKNOWN = "finished", "cancelled", "not known"


@dataclass(frozen=True)
class MemberStatus:
    """State of one member; ``state`` is ``finished``, ``stopped early``, ``failed (status N)``, ``not known`` or, in
    lower case, what Slurm says, with its reason for a job that waits."""

    member: SubmittedRun
    state: str
    is_live: bool
    """Whether it still waits or runs, so that it is not to be submitted again."""
    is_blocked: bool
    """Whether its job waits for one that has failed, and so for ever."""
    log: Path | None
    """None: its job has not started."""


def read_statuses(submission: Submission, queue: Mapping[str, QueuedJob] | None) -> list[MemberStatus]:
    """Read the exit statuses of all members and return the state of each, by its newest job.

    Args:
        queue: None: Slurm does not answer.

    Raises:
        UserError: the status of a job, or the word of a run that it has finished, cannot be read.
    """
    return [read_member_status(submission, member, queue) for member in submission.members]


def read_member_status(
    submission: Submission, member: SubmittedRun, queue: Mapping[str, QueuedJob] | None
) -> MemberStatus:
    """Read the exit status of one member's newest job and return its state."""
    if not member.jobs:
        return MemberStatus(member, "not submitted", False, False, None)
    job, known = member.jobs[-1], queue or {}
    status, log = read_status(submission.jobs_folder, job), submission.jobs_folder / f"{job}_0_log.out"
    # members that were cancelled before they started share the array's record
    queued = known.get(job) or (known.get(job.partition("_")[0]) if status is None else None)
    is_live, is_blocked = (queued.is_live, queued.is_blocked) if queued else (False, False)
    if queue is None and status in (None, STOPPED_EARLY):  # it may wait or run, for the first time or again
        state = UNKNOWN
    else:
        state = job_state(queued, status, cancelled_file(submission, job).exists())
    has_failed = status not in (None, 0, STOPPED_EARLY) and state != CANCELLED
    if not (is_live or is_blocked or has_failed) and has_done_all_steps(submission.run_folder(member), member):
        state = FINISHED
    return MemberStatus(member, state, is_live, is_blocked, log if log.exists() else None)


def has_done_all_steps(place: Path, member: SubmittedRun) -> bool:
    """Return True if a member's run, in folder ``place``, has done all the steps that it is to have.

    Raises:
        UserError: its word of that is damaged, or cannot be read.
    """
    word = read_finished(RunFolder(place).finished)
    return word is not None and member.num_steps is not None and word.num_steps >= member.num_steps


def cancelled_file(submission: Submission, job: str) -> Path:
    """Return the path of the file that ``tlt submit cancel`` leaves: Slurm forgets a job after a few minutes."""
    return submission.jobs_folder / f"{job}.cancelled"


def job_state(queued: QueuedJob | None, status: int | None, was_cancelled: bool = False) -> str:
    """The state of a job: Slurm's while it waits or runs, then by its exit status, or Slurm's if it left none."""
    if queued is not None and queued.is_blocked:
        return "blocked: a job before it has failed"
    if queued is not None and queued.is_live:
        waits = queued.state == "PENDING" and queued.reason not in ("", "None")
        return queued.state.lower() + f" ({queued.reason})" * waits
    if status != 0 and (was_cancelled or (queued is not None and queued.state == "CANCELLED")):
        return CANCELLED
    if status not in (0, STOPPED_EARLY) and queued is not None and queued.state not in ("COMPLETED", "FAILED"):
        return queued.state.lower().replace("_", " ")
    if status is None:
        return "failed (no exit status)"
    return {0: FINISHED, STOPPED_EARLY: "stopped early"}.get(status, f"failed (status {status})")


def unfinished_member_names(statuses: Sequence[MemberStatus]) -> set[str]:
    """The names of those that neither wait nor run nor have finished: what ``resubmit`` submits again."""
    return {status.member.name for status in statuses if not status.is_live and status.state not in (FINISHED, UNKNOWN)}


@lru_cache(maxsize=16)
def resubmit_command(run: Path, job: str) -> str:
    """The command that submits a job of a run's folder again; empty if no submission from this folder has it.

    Read once: a screen that is redrawn asks again and again.
    """
    has_it = any(job in member.jobs for _, member in _find_submitted_members(run))
    return f"tlt submit resubmit {job}" if has_it else ""


def describe_pending_job(run: Path) -> str:
    """The submitted job that will write a run's folder, and its state, in words; empty if none waits or runs."""
    if not (found := _find_submitted_members(run)):
        return ""
    submission, member = found[-1]
    try:
        status = read_member_status(submission, member, read_queue([submission.user]))
    except SlurmError:
        return ""
    return f"job {member.jobs[-1]} of {submission.folder.name} is {status.state}" * status.is_live


def _find_submitted_members(run: Path) -> list[tuple[Submission, SubmittedRun]]:
    """The members whose run is in this folder and that have jobs, the newest last."""
    known = [(submission, member) for submission in load_known_submissions() for member in submission.members]
    return [(each, member) for each, member in known if member.jobs and each.run_folder(member) == run.resolve()]
