"""Which start of a job may write to its folder: the last that claimed it, once the one before has come to rest.

There is no lock: locks go stale, and parallel file systems lack them. A start that lives moves its heartbeat, which one
that is about to begin looks at; and whoever was taken for dead, such as a rank that was stopped, finds at its next
commit that the folder is another's.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tlt_hpc.errors import UserError
from tlt_hpc.storage.folder import writing_beside
from tlt_hpc.watch.process import look_at
from tlt_hpc.watch.record import DamagedRecordError, Record, read_record

QUIET_SECONDS = 12.0
"""For so long no live rank leaves its record as it is, whatever the file system keeps back."""
PATIENCE_SECONDS = 60.0
"""How long a start that is ending, as after scancel, is waited for."""
_LOOK_SECONDS = 0.25

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """The start that a folder belongs to."""

    start: str
    host: str
    pid: int
    job: str
    """Slurm's number of its job; empty without Slurm."""


def claim_owner(status: Path, start: str) -> None:
    """Make ``start`` the folder's owner; for its rank 0, before anything of the run is written.

    Waits while an earlier start may live. One of the same Slurm job cannot, whatever its ranks on a node that was lost
    still do: Slurm has ended it.

    Raises:
        UserError: an earlier start is at work there.
        WriteError: no room or no permission.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    before = _read(status)
    if (living := _still_living(status, start)) is not None and not (job and before and before.job == job):
        named = f"job {before.job}, " if before and before.job else ""
        raise UserError(
            f"another start of this is at work in {status.parent}: {named}{living.name}, process {living.pid}, in "
            f"{living.place}; wait for it or end it first, or give this one another run.name"
        )
    with writing_beside(status / "owner") as path:
        path.write_text(json.dumps(asdict(Owner(start, socket.gethostname(), os.getpid(), job))), encoding="utf-8")


def check_owner(status: Path, start: str) -> None:
    """See that the folder is there and still this start's, before something is committed; for rank 0.

    Raises:
        UserError: it is not.
    """
    owner = _read(status)
    if owner is None:
        raise UserError(
            f"{status / 'owner'} is gone or damaged: the run's folder was deleted or moved while the run went on; put "
            f"it back in place of what is left of {status.parent}, and start again"
        )
    if owner.start != start:
        named = f"job {owner.job}, " if owner.job else ""
        raise UserError(
            f"a later start has taken over {status.parent} ({named}on {owner.host}, process {owner.pid}): this one "
            "ends; what it has committed is there, and the later one goes on from it"
        )


def _still_living(status: Path, start: str) -> Record | None:
    """Rank 0 of an earlier start, where it moves and does not end; returns at once where that is known to be over."""
    began = moved = time.monotonic()
    first = record = _live_record(status, start)
    is_told = False
    while record is not None and time.monotonic() - moved < QUIET_SECONDS:
        if time.monotonic() - began >= PATIENCE_SECONDS:
            return record
        time.sleep(_LOOK_SECONDS)
        latest = _live_record(status, start)
        if latest is not None and latest.heartbeat != record.heartbeat:
            moved = time.monotonic()
        record = latest
        if not is_told and record is not None and first is not None and record.heartbeat != first.heartbeat:
            is_told = True
            logger.warning("%s, of an earlier start, is at work in %s: waiting for its end", record.name, status.parent)
    return None


def _live_record(status: Path, start: str) -> Record | None:
    """What rank 0 of another start has left, unless that start is known to be over."""
    try:
        record = read_record(status, 0)
    except (FileNotFoundError, DamagedRecordError):
        return None
    if record.ending or record.start == start:
        return None
    if record.host == socket.gethostname():
        process = look_at(record.pid)
        if record.pid == os.getpid() or process is None or process.state == "Z":
            return None
    return record


def _read(status: Path) -> Owner | None:
    try:
        return Owner(**json.loads((status / "owner").read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None
