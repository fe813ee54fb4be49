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
from typing import TYPE_CHECKING

from tlt_hpc.cluster.watch.beat import BEAT
from tlt_hpc.cluster.watch.process import look_at
from tlt_hpc.cluster.watch.record import HEARTBEAT_SECONDS, DamagedRecordError, Record, read_record
from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import Count, DamagedText, Moment, read_json
from tlt_hpc.storage.folder import writing_beside

QUIET_SECONDS = 12.0
"""For so long no live rank leaves its record as it is, whatever the file system keeps back."""
PATIENCE_SECONDS = 60.0
"""How long a start that is ending, as after scancel, is waited for."""
GLANCE_SECONDS = HEARTBEAT_SECONDS + 3.0
"""Within which a live rank moves its record, on file systems that keep nothing back for long."""
_LOOK_SECONDS = 0.25

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """The start that a folder belongs to."""

    start: str
    host: str
    pid: Count
    job: str
    """Slurm's number of its job; empty without Slurm."""
    restarts: str
    """How often Slurm had queued it again by then; empty for never."""
    ends_at: Moment | None = None
    """When its allocation ends, in seconds since the epoch, as far as was known then."""

    @property
    def name(self) -> str:
        """Job, host and process in words."""
        return f"{f'job {self.job}, ' if self.job else ''}process {self.pid} on {self.host}"


def claim_owner(status: Path, start: str) -> None:
    """Make ``start`` the folder's owner; for its rank 0, before anything of the run is written.

    Waits while another start may live. One of the same Slurm job before it was queued again cannot, whatever its ranks
    on a node that was lost still do: Slurm has ended it.

    Raises:
        UserError: another start is at work there.
        WriteError: no room or no permission.
    """
    job, restarts = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "")
    before = read_owner(status)
    is_over = before is not None and bool(job) and before.job == job and before.restarts != restarts
    if not is_over and (living := _still_living(status, start, before)) is not None:
        where = f"{living.name} in {living.place}" if isinstance(living, Record) else "which has just begun"
        named = "" if before is None else f" ({before.name})"
        raise UserError(
            f"another start of this{named} is at work in {status.parent}: {where}; wait for it or end it first, or "
            "give this one another run.name"
        )
    own = Owner(start, socket.gethostname(), os.getpid(), job, restarts, BEAT.ends_at)
    with writing_beside(status / "owner") as path:
        path.write_text(json.dumps(asdict(own)), encoding="utf-8")
    check_owner(status, start)  # of two that came here at the same moment the later one stays


def check_owner(status: Path, start: str) -> None:
    """See that the folder is there and still this start's, before something is committed; for rank 0.

    Raises:
        UserError: it is not.
    """
    owner = read_owner(status)
    if owner is None:
        raise UserError(
            f"{status / 'owner'} is gone or damaged: the run's folder was deleted or moved while the run went on; put "
            f"it back in place of what is left of {status.parent}, and start again"
        )
    if owner.start != start:
        raise UserError(
            f"another start has taken over {status.parent} ({owner.name}): this one ends; what it has committed is "
            "there, and the other goes on from it"
        )


def agree_on_owner(world: World, status: Path, start: str) -> None:
    """``check_owner`` on rank 0, before any rank writes; collective.

    Raises:
        UserError: on all ranks.
    """
    world.once(lambda: check_owner(status, start))


def find_at_work(status: Path) -> str:
    """Job, host and process of a start that is at work in a folder now; empty where none moves within some seconds."""
    owner = read_owner(status)
    first, until = _signs(status, "", owner), time.monotonic() + GLANCE_SECONDS
    while owner is not None and first is not None and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
        if _signs(status, "", read_owner(status)) not in (None, first):
            return owner.name
    return ""


def _still_living(status: Path, start: str, before: Owner | None) -> Record | Owner | None:
    """Another start that moves and does not end, or the owner where it has left no sign of life yet but may.

    Returns at once where all that was there is known to be over.
    """
    began = moved = time.monotonic()
    seen, is_told = _signs(status, start, before), False
    while seen is not None and time.monotonic() - moved < QUIET_SECONDS:
        if time.monotonic() - began >= PATIENCE_SECONDS:
            return seen
        time.sleep(_LOOK_SECONDS)
        latest = _signs(status, start, read_owner(status))
        if latest is not None and latest != seen:
            moved = time.monotonic()
            if not is_told:
                logger.warning("another start is at work in %s: waiting for its end", status.parent)
            is_told = True
        seen = latest
    return None


def _signs(status: Path, start: str, owner: Owner | None) -> Record | Owner | None:
    """What another start that may live has left last: rank 0's record, or its claim where it has no record yet."""
    try:
        record = read_record(status, 0)
    except (FileNotFoundError, DamagedRecordError):
        record = None
    if owner is not None and owner.start != start and (record is None or record.start != owner.start):
        return None if _is_dead(owner.host, owner.pid) else owner
    if record is None or record.ending or record.start == start or _is_dead(record.host, record.pid):
        return None
    return record


def _is_dead(host: str, pid: int) -> bool:
    """Whether a process is known to be over: it was on this host, and is not there or is this one."""
    if host != socket.gethostname():
        return False
    process = look_at(pid)
    return pid == os.getpid() or process is None or process.state == "Z"


def read_owner(status: Path) -> Owner | None:
    """The folder's owner; None where nobody has claimed it, or what is there is damaged.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return read_json(status / "owner", Owner)
    except (FileNotFoundError, DamagedText):
        return None
