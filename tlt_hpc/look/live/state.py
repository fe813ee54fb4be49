"""The state of a run at one moment, from its status files and the last lines of metrics.jsonl.

Files are only read, without locks: any number of readers do not affect the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from tlt_hpc.cluster.watch.record import DamagedRecordError, Record, read_record_at, read_verdict, status_file
from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import DamagedText, read_toml, told
from tlt_hpc.look.run_log import read_last_lines
from tlt_hpc.mpi.owner import read_owner
from tlt_hpc.storage.folder import RunFolder, no_run
from tlt_hpc.storage.step_lines import Line

SPEED_STEPS = 10
"""Number of last steps that the remaining time is estimated from."""
STEP_SECONDS = "timing_s/step"
_MAX_STEP_SECONDS = 1e9
"""Longer steps are not plausible."""
T = TypeVar("T")


@dataclass(frozen=True)
class WatchedConfig:
    """The part of a run's configuration that a view needs. Other keys are ignored, so that any version can be read."""

    name: str
    num_steps: int
    num_responses: int
    """Responses of a step, without refills."""
    tensor_parallel: int
    mode: str
    model: str


@dataclass(frozen=True)
class RunState:
    """What the files said when they were read, at ``seconds`` of the monotonic clock."""

    seconds: float
    folder: Path
    config: WatchedConfig
    lines: Mapping[int, Line]
    """The last committed steps."""
    records: tuple[Record, ...]
    """Status records of the newest start, by rank."""
    owner: str
    """Job, host and process of that start; empty if nobody has claimed the folder."""
    ends_at: float | None
    """End of its allocation, in seconds since the epoch; None if unknown."""
    is_finished: bool
    verdict: str
    """Why the watch has ended it; empty if it has not."""
    problems: tuple[str, ...] = ()
    """One line for each thing that could not be read."""
    age: float | None = None
    """Seconds since a rank last wrote its status; None if none could be read."""

    @property
    def num_done(self) -> int:
        """Number of committed steps."""
        return max(self.lines, default=-1) + 1

    @property
    def ending(self) -> str:
        """How the ranks ended; empty while any rank has not."""
        endings = {record.ending for record in self.records}
        return "" if not endings or "" in endings else ", ".join(sorted(endings))

    @property
    def num_left(self) -> int | None:
        """Unfinished responses of the current rollout; None if no rank is in one."""
        told = [left for left in self.left_by_replica if left >= 0]
        return sum(told) if told else None

    @property
    def left_by_replica(self) -> tuple[int, ...]:
        """Unfinished responses of each replica, from its first rank; -1 outside of a rollout."""
        firsts = [record for record in self.records if record.rank % self.config.tensor_parallel == 0]
        return tuple(record.sequences_left if record.phase == "rollout" else -1 for record in firsts)

    @property
    def seconds_to_go(self) -> float | None:
        """Estimated time of the remaining steps, at the speed of the last ones; None before the first."""
        last = list(self.lines.values())[-SPEED_STEPS:]
        seconds = [line[STEP_SECONDS] for line in last if 0 <= line.get(STEP_SECONDS, -1) < _MAX_STEP_SECONDS]
        return (self.config.num_steps - self.num_done) * sum(seconds) / len(seconds) if seconds else None

    def moved_since(self, before: RunState) -> bool:
        """Whether any rank's heartbeat has changed since ``before``."""
        beats = {(record.start, record.rank): record.heartbeat for record in before.records}
        return any(beats.get((record.start, record.rank)) != record.heartbeat for record in self.records)


def read_state(path: Path) -> RunState:
    """Read a run's folder.

    Raises:
        UserError: there is no run.
    """
    folder, problems = RunFolder(path), list[str]()
    config = _read_config(folder)
    owner = _tried(lambda: read_owner(folder.status), problems)
    records = _read_records(folder.status, owner.start if owner else "", problems)
    start = records[0].start if records else owner.start if owner else ""
    return RunState(
        seconds=time.monotonic(),
        folder=path,
        config=config,
        lines=read_last_lines(folder.metrics, problems),
        records=records,
        owner=owner.name if owner else "",
        ends_at=owner.ends_at if owner else None,
        is_finished=folder.finished.is_file(),
        verdict=_verdict_of(folder.status, start, problems),
        problems=tuple(problems),
        age=_age_of(folder.status, records),
    )


def _tried(read: Callable[[], T], problems: list[str]) -> T | None:
    """What ``read`` returns; None if a file is not there or, with a line in ``problems``, cannot be read this time."""
    try:
        return read()
    except FileNotFoundError:  # not written yet, or removed in the meantime
        return None
    except OSError as error:  # a slow file system: the next look may succeed
        problems.append(told(error))
        return None


def _read_config(folder: RunFolder) -> WatchedConfig:
    try:
        table = read_toml(folder.config)
        rollout = table["rollout"]
        return WatchedConfig(
            name=str(table["run"]["name"]),
            num_steps=int(table["run"]["num_steps"]),
            num_responses=int(rollout["prompts_per_step"]) * int(rollout["group_size"]),
            tensor_parallel=max(1, int(rollout.get("tensor_parallel", 1))),
            mode=str(table["speculation"]["mode"]),
            model=str(table.get("model", {}).get("path", "")),
        )
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(no_run(folder.path, "config.toml")) from None
    except OSError as error:
        raise UserError(told(error)) from None
    except KeyError as error:
        why = f"it has no {error.args[0]}"
    except (DamagedText, AttributeError, TypeError, ValueError, OverflowError) as error:
        why = str(error)
    raise UserError(f"{folder.config} is no run's configuration ({why}); give a run's folder")


def _read_records(status: Path, start: str, problems: list[str]) -> tuple[Record, ...]:
    """Records by rank; without an owner, those of the first rank's start. Unreadable ones are left out."""
    found: list[Record] = []
    names = _tried(lambda: {path.name for path in status.iterdir()}, problems) or set()
    for path in (status_file(status, rank) for rank in range(len(names))):
        if path.name not in names:
            break
        record = _tried(partial(_read_record, path), problems)
        if record is not None and record.start == (start := start or record.start):  # an earlier start had more ranks
            found.append(record)
    return tuple(found)


def _read_record(path: Path) -> Record | None:
    """Read a rank's record, up to three times: while it is written over a network, it may be seen in part.

    Raises:
        OSError: it does not exist or cannot be read.
    """
    for _ in range(3):
        with suppress(DamagedRecordError):
            return read_record_at(path)
    return None


def _age_of(status: Path, records: Sequence[Record]) -> float | None:
    written = []
    for record in records:
        with suppress(OSError):
            written.append(status_file(status, record.rank).stat().st_mtime)
    return max(0.0, time.time() - max(written)) if written else None


def _verdict_of(status: Path, start: str, problems: list[str]) -> str:
    """Why the watch ended this start; verdicts on earlier starts are ignored."""
    word = _tried(lambda: read_verdict(status), problems)
    return word[1] if word is not None and word[0] == start else ""
