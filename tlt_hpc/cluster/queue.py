"""What Slurm says of a user's jobs, those included that ended a short while ago. Needs no accounting database."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from tlt_hpc.config import UserError

ANSWER_SECONDS = 60.0
_FORMAT = "%i|%T|%N|%r"
ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""States in which a job has ended; in all others it waits or runs."""


@dataclass(frozen=True)
class QueuedJob:
    """A line of ``squeue``."""

    state: str
    nodes: str
    reason: str
    """Why it waits, where it does."""

    @property
    def is_live(self) -> bool:
        return self.state not in ENDED


def read_queue() -> Mapping[str, QueuedJob]:
    """This user's jobs by number, members of arrays each (``17_3``); none where there is no Slurm.

    Raises:
        UserError: Slurm does not answer.
    """
    if shutil.which("squeue") is None:
        return {}
    command = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.geteuid()}", f"--format={_FORMAT}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"squeue did not answer within {ANSWER_SECONDS:.0f} s; try again") from None
    if done.returncode:
        raise UserError(f"squeue said: {' '.join(done.stderr.split())}; try again where Slurm answers")
    return parse_queue(done.stdout)


def parse_queue(text: str) -> dict[str, QueuedJob]:
    """What ``squeue`` printed, in the format that ``read_queue`` asks for."""
    rows = (line.strip().split("|") for line in text.splitlines() if line.strip())
    return {job: QueuedJob(state, nodes, reason) for job, state, nodes, reason in rows}
