"""How the members of a submission stand, from Slurm's queue, the jobs' exit statuses and the runs' folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.cluster.executor import read_status
from tlt_hpc.cluster.slurm import QueuedJob
from tlt_hpc.cluster.submission import Submission, SubmittedRun
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.step_lines import Line, read_lines

FINISHED = "finished"
STOPPED_EARLY = 75
"""Exit status of a command that was stopped and can continue."""
_REWARD = "critic/rewards/mean"


@dataclass(frozen=True)
class MemberStatus:
    """How one member stands; ``state`` is ``finished``, ``stopped early``, ``failed (status N)`` or, in lower case,
    what Slurm says, with its reason for a job that waits."""

    member: SubmittedRun
    state: str
    is_live: bool
    """Whether it still waits or runs, so that it is not to be submitted again."""
    log: Path | None
    lines: dict[int, Line]
    """Of the run's metrics, by step."""


def read_statuses(submission: Submission, queue: Mapping[str, QueuedJob]) -> list[MemberStatus]:
    """How all members stand, by the newest job of each.

    Raises:
        UserError: a run's metrics are damaged, or the status of a job cannot be read.
    """
    return [member_status(submission, member, queue) for member in submission.members]


def member_status(submission: Submission, member: SubmittedRun, queue: Mapping[str, QueuedJob]) -> MemberStatus:
    """How one member stands, by its newest job."""
    lines = read_lines(RunFolder(submission.store / member.run).metrics)
    if not member.jobs:
        return MemberStatus(member, "not submitted", False, None, lines)
    job = member.jobs[-1]
    queued, log = queue.get(job), submission.jobs_folder / f"{job}_0_log.out"
    state = job_state(queued, read_status(submission.jobs_folder, job))
    return MemberStatus(member, state, queued is not None and queued.is_live, log, lines)


def job_state(queued: QueuedJob | None, status: int | None) -> str:
    """The state of a job: Slurm's while it waits or runs, then by its exit status, or Slurm's if it left none."""
    if queued is not None and queued.is_live:
        waits = queued.state == "PENDING" and queued.reason not in ("", "None")
        return queued.state.lower() + f" ({queued.reason})" * waits
    if status is None:
        known = queued is not None and queued.state not in ("COMPLETED", "FAILED")
        return queued.state.lower().replace("_", " ") if queued and known else "failed (no exit status)"
    return {0: FINISHED, STOPPED_EARLY: "stopped early"}.get(status, f"failed (status {status})")


def unfinished(statuses: Sequence[MemberStatus]) -> set[str]:
    """The names of those that neither wait nor run nor have finished: what ``resubmit`` submits again."""
    return {status.member.name for status in statuses if not status.is_live and status.state != FINISHED}


def status_table(statuses: Sequence[MemberStatus]) -> str:
    """Member, state, steps, reward of the last step and log, a line for each member."""
    rows = [("member", "state", "steps", "reward", "log")]
    for status in statuses:
        reward = list(status.lines.values())[-1].get(_REWARD) if status.lines else None
        rows.append((
            status.member.name, status.state, str(len(status.lines)), "" if reward is None else f"{reward:.3f}",
            str(status.log or ""),
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
