"""How the tasks of a submission stand, from Slurm's queue, the jobs' exit statuses and the runs' folders."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.cluster.slurm import QueuedJob
from tlt_hpc.cluster.submission import Key, Submission, Task
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.step_lines import Line, read_lines

FINISHED = "finished"
STOPPED_EARLY = 75
"""Exit status of a command that was stopped and can go on."""
_REWARD = "critic/rewards/mean"
_NODES = re.compile(rb"^nodes (\S+): ", re.MULTILINE)
"""What sbatch/env.sh writes into the log at each start."""
_LAST_WORDS = re.compile(rb"^(?:tlt|sbatch/env\.sh|slurmstepd: error|srun: error): .+", re.MULTILINE)
"""Lines that say why a job ended."""


@dataclass(frozen=True)
class TaskStatus:
    """How one task stands; ``state`` is ``finished``, ``stopped early``, ``failed (status N)`` or, in lower case,
    what Slurm says, with its reason for a job that waits."""

    task: Task
    state: str
    is_live: bool
    """Whether it still waits or runs, so that it is not to be submitted again."""
    node: str
    log: Path | None
    steps: int = 0
    reward: float | None = None
    """Mean of the last step; None before there is one, and for other stages than training."""


def read_status(
    submission: Submission, queue: Mapping[str, QueuedJob], exit_status: Callable[[str], int | None]
) -> list[TaskStatus]:
    """How all tasks stand; ``exit_status`` is what a job has left, None where nothing.

    Raises:
        UserError: a run's metrics are damaged.
    """
    return [task_status(submission, task, queue, exit_status) for task in submission.tasks]


def task_status(
    submission: Submission, task: Task, queue: Mapping[str, QueuedJob], exit_status: Callable[[str], int | None]
) -> TaskStatus:
    """How one task stands: the job of it that runs, else the newest that has ended, else the first that waits."""
    told = [(job, *job_state(submission, job, queue, exit_status)) for job in task.jobs]
    live = [row for row in told if row[2]]
    running = [row for row in live if not row[1].startswith("pending")]
    ended = [row for row in told if not row[2]]
    done = [row for row in ended if row[1] == FINISHED]
    job, state, is_live = next(iter([*running, *done, *live, *reversed(ended)]), ("", "not submitted", False))
    log = log_of(submission, job) if job else None
    node = (queue[job].nodes if job in queue else "") or node_in(log)
    lines = run_lines(submission, task) if task.stage == "train" else {}
    last = list(lines.values())[-1] if lines else {}
    return TaskStatus(task, state, is_live, node, log, len(lines), last.get(_REWARD))


def job_state(
    submission: Submission, job: str, queue: Mapping[str, QueuedJob], exit_status: Callable[[str], int | None]
) -> tuple[str, bool]:
    """A job's state in words, and whether it still waits or runs."""
    queued = queue.get(job)
    if queued is not None and queued.is_live:
        waits = queued.state == "PENDING" and queued.reason not in ("", "None")
        return queued.state.lower() + f" ({queued.reason})" * waits, True
    if submission.is_local and is_running(job) and exit_status(job) is None:
        return "running", True
    return ended_state(queued, exit_status(job)), False


def ended_state(queued: QueuedJob | None, status: int | None) -> str:
    """The state of a job that has ended, by its exit status, or by Slurm's word where it left none."""
    if status is None:
        known = queued is not None and queued.state not in ("COMPLETED", "FAILED")
        return queued.state.lower().replace("_", " ") if queued and known else "failed (it was killed)"
    return {0: FINISHED, STOPPED_EARLY: "stopped early"}.get(status, f"failed (status {status})")


def unfinished(statuses: Sequence[TaskStatus]) -> set[Key]:
    """Those that neither wait nor run nor have finished: what ``resubmit`` submits again."""
    return {status.task.key for status in statuses if not status.is_live and status.state != FINISHED}


def run_lines(submission: Submission, task: Task) -> dict[int, Line]:
    """The lines of metrics of a task's run, by step.

    Raises:
        UserError: they are damaged.
    """
    return read_lines(RunFolder(submission.store / task.run).metrics)


def log_of(submission: Submission, job: str) -> Path:
    return submission.jobs_folder / f"{job}_0_log.out"


def node_in(log: Path | None) -> str:
    """The nodes of the last start that a log tells of; empty where it tells of none."""
    found = _NODES.findall(log.read_bytes()) if log is not None and log.is_file() else []
    return found[-1].decode() if found else ""


def last_words(status: TaskStatus) -> str:
    """Why a task failed, by its log; empty where it did not, or where the log does not tell."""
    has_failed = status.state.startswith("failed") and status.log is not None and status.log.is_file()
    found = _LAST_WORDS.findall(status.log.read_bytes()) if has_failed and status.log is not None else []
    own = [line for line in found if line.startswith((b"tlt", b"sbatch"))] or found
    return own[-1].decode(errors="replace") if own else ""


def is_running(pid: str) -> bool:
    """Whether a process of this machine runs."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


# --- as text ---


def status_table(statuses: Sequence[TaskStatus]) -> str:
    """Member, stage, state, step, reward, node and log, a line for each task."""
    head = ("member", "stage", "state", "step", "reward", "node", "log")
    rows = [
        (
            status.task.member,
            status.task.stage,
            status.state,
            str(status.steps) if status.task.stage == "train" else "",
            "" if status.reward is None else f"{status.reward:.3f}",
            status.node,
            "" if status.log is None else shown(status.log),
        )
        for status in statuses
    ]
    return in_columns(head, rows)


def in_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of columns that are as wide as they must be."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join(line.rstrip() for line in lines)


def shown(path: Path) -> str:
    """A path from here, where it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
