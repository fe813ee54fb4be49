"""How the members of a submission stand, from Slurm's queue, the jobs' exit statuses and the runs' folders."""

from __future__ import annotations

import re
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
_NODES = re.compile(rb"^nodes (\S+): ", re.MULTILINE)
"""What sbatch/env.sh writes into the log at each start."""
_LAST_WORDS = re.compile(rb"^(?:tlt|sbatch/env\.sh|slurmstepd: error|srun: error): .+", re.MULTILINE)
"""Lines that say why a job ended."""


@dataclass(frozen=True)
class MemberStatus:
    """How one member stands; ``state`` is ``finished``, ``stopped early``, ``failed (status N)`` or, in lower case,
    what Slurm says, with its reason for a job that waits."""

    member: SubmittedRun
    state: str
    is_live: bool
    """Whether it still waits or runs, so that it is not to be submitted again."""
    node: str
    log: Path | None
    steps: int
    reward: float | None
    """Mean of the last step; None before there is one."""


def read_statuses(submission: Submission, queue: Mapping[str, QueuedJob]) -> list[MemberStatus]:
    """How all members stand.

    Raises:
        UserError: a run's metrics are damaged, or the status of a job cannot be read.
    """
    return [member_status(submission, member, queue) for member in submission.members]


def member_status(submission: Submission, member: SubmittedRun, queue: Mapping[str, QueuedJob]) -> MemberStatus:
    """How one member stands, by its newest job."""
    job = member.jobs[-1] if member.jobs else ""
    log = log_of(submission, job) if job else None
    queued = queue.get(job)
    state = job_state(queued, read_status(submission.jobs_folder, job)) if job else "not submitted"
    lines = run_lines(submission, member)
    last = list(lines.values())[-1] if lines else {}
    is_live = queued is not None and queued.is_live
    node = (queued.nodes if queued is not None else "") or node_in(log)
    return MemberStatus(member, state, is_live, node, log, len(lines), last.get(_REWARD))


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


def run_lines(submission: Submission, member: SubmittedRun) -> dict[int, Line]:
    """The lines of metrics of a member's run, by step.

    Raises:
        UserError: they are damaged.
    """
    return read_lines(RunFolder(submission.store / member.run).metrics)


def log_of(submission: Submission, job: str) -> Path:
    return submission.jobs_folder / f"{job}_0_log.out"


def node_in(log: Path | None) -> str:
    """The nodes of the last start that a log tells of; empty where it tells of none."""
    found = _NODES.findall(log.read_bytes()) if log is not None and log.is_file() else []
    return found[-1].decode() if found else ""


def last_words(status: MemberStatus) -> str:
    """Why a member failed, by its log; empty if it did not, or if the log does not say."""
    if not status.state.startswith("failed") or status.log is None or not status.log.is_file():
        return ""
    found = _LAST_WORDS.findall(status.log.read_bytes())
    own = [line for line in found if line.startswith((b"tlt", b"sbatch"))] or found
    return own[-1].decode(errors="replace") if own else ""


# --- as text ---


def status_table(statuses: Sequence[MemberStatus]) -> str:
    """Member, state, step, reward, node and log, a line for each member."""
    rows = [
        (
            status.member.name,
            status.state,
            str(status.steps),
            "" if status.reward is None else f"{status.reward:.3f}",
            status.node,
            "" if status.log is None else shown(status.log),
        )
        for status in statuses
    ]
    return in_columns(("member", "state", "step", "reward", "node", "log"), rows)


def in_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of columns that are as wide as they must be."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join(line.rstrip() for line in lines)


def shown(path: Path) -> str:
    """A path from here, where it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
