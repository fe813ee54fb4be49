"""Which start of a job may write to its folder: the last one that claimed it, after the one before has ended.

There is no lock: locks go stale, and parallel file systems lack them. Instead a new start watches the heartbeat of the
one before until it stops moving. A start that was wrongly taken for dead, such as one that was suspended, finds at its
next commit that the folder belongs to another start.
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

from tlt_hpc.cluster.slurm import job_number
from tlt_hpc.cluster.watch.diagnosis import process_state
from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.cluster.watch.record import HEARTBEAT_SECONDS, Record, read_record, status_file
from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import Count, DamagedText, Moment, read_json
from tlt_hpc.storage.folder import sync, writing_atomically

QUIET_SECONDS = 12.0
"""No live rank leaves its record unchanged for so long, even on a file system that caches writes."""
MAX_WAIT_SECONDS = 60.0
"""How long to wait for a start that is ending, as after scancel."""
HEARTBEAT_WAIT_SECONDS = HEARTBEAT_SECONDS + 3.0
"""Within this time a live rank moves its record, on file systems that cache writes only briefly."""
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
        """Job, process and host in words."""
        return f"{f'job {self.job}, ' if self.job else ''}process {self.pid} on {self.host}"


def claim_owner(status: Path, start: str) -> None:
    """Make ``start`` the folder's owner; for its rank 0, before anything of the run is written.

    Waits while another start may be alive. An earlier start of the same Slurm job cannot be, even if ranks on a lost
    node still run: Slurm has ended it before it queued the job again.

    Raises:
        UserError: another start is at work there.
        WriteError: no space or no permission.
    """
    job, restarts = job_number(os.environ), os.environ.get("SLURM_RESTART_COUNT", "")
    before = read_owner(status)
    is_over = before is not None and bool(job) and before.job == job and before.restarts != restarts
    if not is_over and _is_alive(status, start, QUIET_SECONDS, MAX_WAIT_SECONDS):
        named = "" if before is None else f" ({before.name})"
        raise UserError(
            f"this run is already running{named} in {status.parent}; wait for it or end it first, or give this one "
            "another run.name"
        )
    own = Owner(start, socket.gethostname(), os.getpid(), job, restarts, BEAT.ends_at)
    claim = status / f"owner-{start}"  # two starts that claim at the same moment write different files
    with writing_atomically(claim) as path:
        path.write_text(json.dumps(asdict(own)), encoding="utf-8")
    claim.replace(status / "owner")
    sync(status)
    check_owner(status, start)  # of two starts that come here at the same moment the later stays


def check_owner(status: Path, start: str) -> None:
    """Check that the folder exists and still belongs to this start, before something is committed; for rank 0.

    Raises:
        UserError: it is not.
    """
    owner = read_owner(status)
    if owner is None:
        raise UserError(
            f"{status / 'owner'} is gone or damaged: the run's folder was deleted or moved while it ran; put "
            f"it back in place of what is left of {status.parent}, and start again"
        )
    if owner.start != start:
        raise UserError(
            f"another start has taken over {status.parent} ({owner.name}): this one ends; what it has committed is "
            "there, and the other resumes from it"
        )


def check_owner_all_ranks(world: World, status: Path, start: str) -> None:
    """``check_owner`` on rank 0, before any rank writes; collective.

    Raises:
        UserError: on all ranks.
    """
    world.run_first_and_broadcast(lambda: check_owner(status, start))


def read_running_owner(status: Path) -> str:
    """Job, process and host of a start that works in a folder now; empty if none moves its heartbeat."""
    owner = read_owner(status)
    if owner is None or not _is_alive(status, "", HEARTBEAT_WAIT_SECONDS, max_wait_seconds=0.0):
        return ""
    return owner.name


def _is_alive(status: Path, start: str, quiet_seconds: float, max_wait_seconds: float) -> bool:
    """Whether another start than ``start`` moves its heartbeat, and still does so after ``max_wait_seconds``.

    Returns False as soon as it has ended, or has left no sign of life for ``quiet_seconds``.
    """
    began = moved = time.monotonic()
    seen = _read_last_sign(status, start)
    while seen is not None and time.monotonic() - moved < quiet_seconds:
        if moved > began and time.monotonic() - began >= max_wait_seconds:
            return True
        time.sleep(_LOOK_SECONDS)
        latest = _read_last_sign(status, start)
        if latest is not None and latest != seen:
            if start and moved == began:
                logger.warning(
                    "another start is at work in %s: waiting up to %g s for its end", status.parent, max_wait_seconds
                )
            moved = time.monotonic()
        seen = latest
    return False


def _read_last_sign(status: Path, start: str) -> Record | Owner | None:
    """Rank 0's record of another start that may be alive, or its claim if it has no record yet; else None."""
    owner = read_owner(status)
    try:
        record = read_record(status_file(status, 0))
    except (FileNotFoundError, DamagedText):
        record = None
    if owner is not None and owner.start != start and (record is None or record.start != owner.start):
        return None if _is_dead(owner.host, owner.pid) else owner
    if record is None or record.ending or record.start == start or _is_dead(record.host, record.pid):
        return None
    return record


def _is_dead(host: str, pid: int) -> bool:
    """Whether a process is known to have ended: it was on this host, and is gone or is this one."""
    return host == socket.gethostname() and (pid == os.getpid() or process_state(pid) in ("", "Z"))


def read_owner(status: Path) -> Owner | None:
    """The folder's owner; None if no start has claimed it, or the file is damaged.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return read_json(status / "owner", Owner)
    except (FileNotFoundError, DamagedText):
        return None
