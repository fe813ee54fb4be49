"""What a run's files say of it at one moment. Reads status files and the last lines of metrics; knows no screen.

Nothing is opened for writing, nothing is locked and nobody is asked: any number of readers change nothing for the job.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import TypeAdapter, ValidationError

from tlt_hpc.cluster.watch.record import DamagedRecordError, Record, read_record_at, read_verdict, status_file
from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import Count, DamagedText, naming, open_regular, read_toml, told
from tlt_hpc.common.words import count
from tlt_hpc.mpi.owner import read_owner
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.no_run import no_run
from tlt_hpc.storage.step_lines import Line, parse_lines

TAIL_BYTES = 1 << 18
"""Of the metrics' end that is read: some tens of steps, whatever the run's length."""
SPEED_STEPS = 10
"""Steps that the time to go is reckoned from."""
STEP_SECONDS = "timing_s/step"
_MOST_SECONDS = 1e9
"""That a step can take: more is no time."""


@dataclass(frozen=True)
class _Run:
    name: str
    num_steps: Count


@dataclass(frozen=True)
class _Rollout:
    prompts_per_step: Count
    group_size: Count
    tensor_parallel: Annotated[int, Ge(1)] = 1


@dataclass(frozen=True)
class _Speculation:
    mode: str


@dataclass(frozen=True)
class _Model:
    path: str = ""


@dataclass(frozen=True)
class _Config:
    """What a view needs of a run's configuration, and no more: of another version, too, it can be told."""

    run: _Run
    rollout: _Rollout
    speculation: _Speculation
    model: _Model = _Model()


_CONFIG = TypeAdapter(_Config)


@dataclass(frozen=True)
class RunFacts:
    """What of a run's configuration a view needs."""

    name: str
    mode: str
    num_steps: int
    num_responses: int
    """Of a step, before any refills."""
    ranks_per_replica: int
    model: str = ""
    """Its path; empty where the configuration does not tell."""


@dataclass(frozen=True)
class RunState:
    """What the files said when they were read (``seconds``, monotonic)."""

    seconds: float
    folder: Path
    facts: RunFacts
    lines: Mapping[int, Line]
    """The last committed steps."""
    records: tuple[Record, ...]
    """The ranks', of the newest start alone, by rank."""
    age: float | None
    """Seconds since a rank has last written its record, by the file system's clock; None without records."""
    owner: str
    """Job, host and process of that start; empty where nobody has claimed the folder."""
    ends_at: float | None
    """When its allocation ends, in seconds since the epoch; None where that is not known."""
    is_finished: bool
    verdict: str
    """Why the watch has ended it; empty where it has not."""
    problems: tuple[str, ...] = ()
    """What could not be read and is left out, a line each."""

    @property
    def num_done(self) -> int:
        """Committed steps."""
        return max(self.lines, default=-1) + 1

    @property
    def ending(self) -> str:
        """How the ranks ended; empty while one of them has not said so."""
        endings = {record.ending for record in self.records}
        return "" if not endings or "" in endings else ", ".join(sorted(endings))

    @property
    def num_left(self) -> int | None:
        """Responses of the rollout under way that are not finished; None where no rank is in one."""
        told = [left for left in self.left_by_replica if left >= 0]
        return sum(told) if told else None

    @property
    def left_by_replica(self) -> tuple[int, ...]:
        """Responses that each replica has to go, as its first rank tells; -1 where it is in no rollout."""
        firsts = [record for record in self.records if record.rank % self.facts.ranks_per_replica == 0]
        return tuple(record.sequences_left if record.phase == "rollout" else -1 for record in firsts)

    @property
    def seconds_to_go(self) -> float | None:
        """Of the steps that are left, at the speed of the last ones; None before there is one."""
        last = list(self.lines.values())[-SPEED_STEPS:]
        seconds = [line[STEP_SECONDS] for line in last if 0 <= line.get(STEP_SECONDS, -1) < _MOST_SECONDS]
        return (self.facts.num_steps - self.num_done) * sum(seconds) / len(seconds) if seconds else None

    def moved_since(self, before: RunState) -> bool:
        """Whether any rank has given a sign of life in between."""
        beats = {(record.start, record.rank): record.heartbeat for record in before.records}
        return any(beats.get((record.start, record.rank)) != record.heartbeat for record in self.records)


def read_state(path: Path) -> RunState:
    """Read a run's folder.

    Raises:
        UserError: there is no run.
    """
    folder, problems = RunFolder(path), list[str]()
    facts = _read_facts(folder)
    owner = None
    try:
        owner = read_owner(folder.status)
    except OSError as error:  # a file system that hesitates: the next look tells
        problems.append(told(error))
    records = _read_records(folder.status, owner.start if owner else "", problems)
    start = records[0].start if records else owner.start if owner else ""
    return RunState(
        seconds=time.monotonic(),
        folder=path,
        facts=facts,
        lines=read_last_lines(folder.metrics, problems),
        records=records,
        age=_age_of(folder.status, records),
        owner=owner.name if owner else "",
        ends_at=owner.ends_at if owner else None,
        is_finished=folder.finished.is_file(),
        verdict=_verdict_of(folder.status, start, problems),
        problems=tuple(problems),
    )


def read_last_lines(path: Path, problems: list[str]) -> dict[int, Line]:
    """The last committed steps' lines by step, of the file's last ``TAIL_BYTES``; none where there is no file.

    ``problems`` grows by a line for what is left out.
    """
    try:
        with open_regular(path) as file, naming(path):
            start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(start)
            data = file.read(TAIL_BYTES)
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(told(error))
        return {}
    found = parse_lines(data.partition(b"\n")[2] if start else data)  # the first of a part is likely cut
    if found.faults:
        number, why = found.faults[-1]
        problems.append(f"{path}: {count(len(found.faults), 'line')} that no run writes, such as line {number}"
                        f"{' of its end' if start else ''} ({why})")  # fmt: skip
    return found.by_step


def _read_facts(folder: RunFolder) -> RunFacts:
    try:
        return parse_facts(read_toml(folder.config))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(no_run(folder.path, "config.toml")) from None
    except OSError as error:
        raise UserError(told(error)) from None
    except DamagedText as error:
        raise UserError(f"{folder.config} is no run's configuration ({error}); give a run's folder") from None


def parse_facts(tree: dict[str, Any]) -> RunFacts:
    """What a configuration says of a run.

    Raises:
        DamagedText: it is none.
    """
    try:
        found = _CONFIG.validate_python(tree)
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedText(f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from None
    return RunFacts(
        found.run.name,
        found.speculation.mode,
        found.run.num_steps,
        found.rollout.prompts_per_step * found.rollout.group_size,
        found.rollout.tensor_parallel,
        found.model.path,
    )


def _read_records(status: Path, start: str, problems: list[str]) -> tuple[Record, ...]:
    """By rank; without an owner those of the lowest rank's start. One that cannot be read just now is left out."""
    found: list[Record] = []
    try:
        names = {path.name for path in status.iterdir()}
    except FileNotFoundError:
        return ()
    except OSError as error:
        problems.append(told(error))
        return ()
    for path in (status_file(status, rank) for rank in range(len(names))):
        if path.name not in names:
            break
        try:
            record = _read_record(path)
        except FileNotFoundError:  # it was removed since
            break
        except OSError as error:
            problems.append(told(error))
            continue
        if record is not None and record.start == (start := start or record.start):  # an earlier start had more ranks
            found.append(record)
    return tuple(found)


def _read_record(path: Path) -> Record | None:
    """A rank's, read up to three times: one that is just being written over a network may be seen in part.

    Raises:
        OSError: there is none, or it cannot be read.
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
    """Why this start was ended; an earlier one's is none of it."""
    try:
        word = read_verdict(status)
    except OSError as error:
        problems.append(told(error))
        return ""
    return word[1] if word is not None and word[0] == start else ""
