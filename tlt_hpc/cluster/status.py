"""How the members of a submission stand, from Slurm's queue, the jobs' exit statuses and the runs' folders."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tlt_hpc.cluster.executor import read_status
from tlt_hpc.cluster.slurm import QueuedJob
from tlt_hpc.cluster.submission import Submission, SubmittedRun
from tlt_hpc.common.files import LINES_BYTES, DamagedText, parse_json, read_bytes, told
from tlt_hpc.config import UserError
from tlt_hpc.storage.folder import RunFolder, writing_beside
from tlt_hpc.storage.step_lines import Line, read_lines

FINISHED = "finished"
STOPPED_EARLY = 75
"""Exit status of a command that was stopped and can continue."""
_REWARD = "critic/rewards/mean"
_LAST_WORDS = re.compile(rb"^(?:tlt|sbatch/env\.sh|slurmstepd: error|srun: error): .+", re.MULTILINE)
"""Lines that say why a job ended."""
_LAST = 10
"""Steps that the mean reward is taken over: one step's is noisy."""
_MEANS = {
    f"reward, last {_LAST}": (_REWARD, _LAST),
    "length": ("response_length/mean", _LAST),
    "accept length": ("drafter/spec_decode/mean_acceptance_length", _LAST),
    "tokens/s": ("perf/throughput", 0),
    "s/step": ("timing_s/step", 0),
}
"""Columns of the results: the figure, and over how many of the last steps its mean is taken (0: all)."""


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


def last_words(status: MemberStatus) -> str:
    """Why a member failed, by its log; empty if it did not, or if the log does not say."""
    if not status.state.startswith("failed") or status.log is None or not status.log.is_file():
        return ""
    found = _LAST_WORDS.findall(status.log.read_bytes())
    own = [line for line in found if line.startswith((b"tlt", b"sbatch"))] or found
    return own[-1].decode(errors="replace") if own else ""


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


# --- results ---


def write_results(submission: Submission, statuses: Sequence[MemberStatus]) -> Path:
    """Write a row for each member as CSV into the submission's folder, empty where a run has no such figure.

    Raises:
        UserError: a run's evaluations are damaged.
        WriteError: no room or no permission.
    """
    rows = [
        {"member": status.member.name, **dict(override.partition("=")[::2] for override in status.member.own)}
        | {"state": status.state, "steps": len(status.lines)}
        | means(list(status.lines.values()))
        | newest_evaluation(submission.store / status.member.run / "evaluations.jsonl")
        for status in statuses
    ]
    path = submission.folder / "results.csv"
    with writing_beside(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(column for row in rows for column in row)))
        writer.writeheader()
        writer.writerows(rows)
    return path


def means(lines: Sequence[Line]) -> dict[str, Any]:
    """Means over a run's steps."""
    values = {name: [line[key] for line in lines[-last:] if key in line] for name, (key, last) in _MEANS.items()}
    return {name: fmean(found) if found else None for name, found in values.items()}


def newest_evaluation(path: Path) -> dict[str, Any]:
    """The figures of a run's newest evaluation, under verl's names; none where there is none.

    Raises:
        UserError: the file is damaged.
    """
    try:
        newest = parse_json(read_bytes(path, LINES_BYTES).rstrip().rpartition(b"\n")[2], dict[str, Any])
        return {key: value for key, value in newest.items() if key.startswith("val-core/")}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(told(error)) from None
    except DamagedText as error:
        raise UserError(f"{path} is damaged ({error}); fix or remove it, and collect again") from None
