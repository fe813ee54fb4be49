"""The state of a run at one moment, from its status files and its log.

Files are only read, without locks: any number of readers do not affect the job.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from tlt_hpc.cluster.slurm import SlurmError, read_queue
from tlt_hpc.cluster.status import job_state
from tlt_hpc.cluster.watch.record import Record, read_record, read_verdict
from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import DamagedText, os_error_text
from tlt_hpc.look.columns import COLUMNS
from tlt_hpc.look.cost import Cost, cost_of
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.mpi.owner import read_owner
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.records import DrafterFacts, read_facts

SPEED_STEPS = 10
"""Number of last steps that the remaining time is estimated from."""
_START_SECONDS = 300.0
"""What the imports of many ranks may take on a shared file system."""
_MAX_STEP_SECONDS = 1e9
"""Longer steps are not plausible."""
_TAIL_BYTES = 1 << 18
"""Read of metrics.jsonl at each look: about a hundred steps, more than a screen shows."""
_RECORD = re.compile(r"rank-\d+")
T = TypeVar("T")


@dataclass(frozen=True)
class RunState:
    """The content of a run's files when they were read, at ``seconds`` of the monotonic clock."""

    seconds: float
    log: RunLog
    records: tuple[Record, ...]
    """Status records of the newest start, by rank."""
    owner: str
    """Job, host and process of that start; empty if nobody has claimed the folder."""
    claimed_at: float | None
    """When it claimed the folder, in seconds since the epoch."""
    ends_at: float | None
    """End of its allocation, in seconds since the epoch; None if unknown."""
    is_finished: bool
    verdict: str
    """Why the watch has ended it; empty if it has not."""
    status_problems: tuple[str, ...]
    """One line for each status file that could not be read."""
    job: str = ""
    """Slurm's number of the job of that start; empty without Slurm."""
    queued: str | None = None
    """Slurm's state of that job while it waits or runs, in lower case, empty once it has ended; None: not known."""
    drafter: DrafterFacts | None = None
    """What a warm-up's last validation found; None before it, and in other runs."""

    @property
    def num_done(self) -> int:
        """Number of committed steps."""
        return max(self.log.lines, default=-1) + 1

    @property
    def num_steps(self) -> int:
        """Number of steps that the run is to have; those that are done if that is unknown."""
        return max(self.log.config_int("run", "num_steps"), self.num_done)

    @property
    def num_responses(self) -> int:
        """Responses of a step, without refills; 0 if unknown."""
        return self.log.config_int("rollout", "prompts_per_step") * self.log.config_int("rollout", "group_size")

    @property
    def tensor_parallel(self) -> int:
        """Ranks of a replica."""
        return self.log.config_int("rollout", "tensor_parallel") or 1

    @property
    def ending(self) -> str:
        """The endings of the ranks in words; empty while any rank runs."""
        endings = {record.ending for record in self.records}
        return "" if not endings or "" in endings else ", ".join(sorted(endings))

    @property
    def may_be_queued(self) -> bool:
        """True if the job of a run that has stopped waits or runs, or may do so where Slurm has not answered."""
        may_be = bool(self.job) and not self.verdict and self.ending in ("", "stopped early")
        return may_be and self.queued != ""

    @property
    def is_stalled(self) -> bool:
        """True if a rank makes no progress."""
        return any(record.stalled for record in self.records)

    @property
    def unfinished_by_replica(self) -> tuple[int, ...]:
        """Unfinished responses of each replica that is in a rollout, from its first rank."""
        records = [record for record in self.records if record.rank % self.tensor_parallel == 0]
        return tuple(one.sequences_left for one in records if one.phase == "rollout" and one.sequences_left >= 0)

    @property
    def seconds_to_go(self) -> float | None:
        """Estimated seconds of the remaining steps, at the speed of the last ones; None before the first."""
        last = self.log.metric(COLUMNS["step"].metric)[-SPEED_STEPS:]
        seconds = [value for value in last.tolist() if 0 <= value < _MAX_STEP_SECONDS]
        return (self.num_steps - self.num_done) * sum(seconds) / len(seconds) if seconds else None

    @property
    def cost(self) -> Cost | None:
        """The cost of all steps, if those that are not read took as much as the others; None if it is unknown."""
        cost = cost_of(self.log)
        return cost and cost.times(self.num_done / len(self.log.lines))

    @property
    def is_starting(self) -> bool:
        """True if a start has claimed the folder and has not had the time to report."""
        return not self.records and self.claimed_at is not None and time.time() - self.claimed_at < _START_SECONDS

    def heartbeat_changed_since(self, before: RunState) -> bool:
        """True if any rank's heartbeat has changed since ``before``."""
        beats = {(record.start, record.rank): record.heartbeat for record in before.records}
        return any(beats.get((record.start, record.rank)) != record.heartbeat for record in self.records)


def read_state(path: Path) -> RunState:
    """Read a run's folder.

    Raises:
        UserError: there is no run.
    """
    log, problems = RunLog(path, tail_bytes=_TAIL_BYTES), list[str]()
    status = log.folder.status
    owner = _read_or_none(lambda: read_owner(status), problems)
    records = _read_records(status, owner.start if owner else "", problems)
    start = records[0].start if records else owner.start if owner else ""
    verdict = _read_or_none(lambda: read_verdict(status), problems)
    return RunState(
        seconds=time.monotonic(),
        log=log,
        records=records,
        owner=owner.name if owner else "",
        claimed_at=_read_or_none(lambda: (status / "owner").stat().st_mtime, problems) if owner else None,
        ends_at=owner.ends_at if owner else None,
        is_finished=log.folder.finished.is_file(),
        verdict=verdict[1] if verdict and verdict[0] == start else "",  # else it is of an earlier start
        job=owner.job if owner else "",
        drafter=_read_drafter(log.folder, problems),
        status_problems=tuple(problems),
    )


def ask_slurm_state(state: RunState) -> str | None:
    """Ask Slurm for ``RunState.queued``; None if it does not answer or is not here."""
    try:
        queue = read_queue([state.log.folder.path.stat().st_uid])
    except (SlurmError, OSError):  # a copy of the run on another machine, for instance
        return None
    job = queue.get(state.job) or queue.get(state.job.partition("_")[0])
    return job_state(job, None) if job is not None and job.is_live else ""


def _read_drafter(folder: RunFolder, problems: list[str]) -> DrafterFacts | None:
    try:
        return read_facts(folder.path / "drafter") if folder.is_warmup else None
    except UserError as error:
        problems.append(str(error))
        return None


def _read_or_none(read: Callable[[], T], problems: list[str]) -> T | None:
    """What ``read`` returns; None if a file is not there or, with a line in ``problems``, cannot be read this time."""
    try:
        return read()
    except FileNotFoundError:  # not written yet, or removed in the meantime
        return None
    except OSError as error:  # a slow file system: the next look may succeed
        problems.append(os_error_text(error))
        return None


def _read_records(status: Path, start: str, problems: list[str]) -> tuple[Record, ...]:
    """Records by rank; without an owner, those of the first rank's start. Unreadable ones are left out."""
    paths = (
        _read_or_none(lambda: sorted(path for path in status.iterdir() if _RECORD.fullmatch(path.name)), problems) or []
    )
    found = [record for path in paths if (record := _read_or_none(partial(_read_record, path), problems)) is not None]
    start = start or (found[0].start if found else "")
    return tuple(record for record in found if record.start == start)  # an earlier start may have had more ranks


def _read_record(path: Path) -> Record | None:
    """Read a rank's record, up to three times: while it is written over a network, it may be seen in part.

    Raises:
        OSError: it does not exist or cannot be read.
    """
    for _ in range(3):
        with suppress(DamagedText):
            return read_record(path)
    return None
