"""What a run's files say of it at one moment. Reads status files and the last lines of metrics; knows no screen.

Nothing is opened for writing, nothing is locked and nobody is asked: any number of readers change nothing for the job.
"""

from __future__ import annotations

import itertools
import json
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.errors import UserError
from tlt_hpc.owner import read_owner
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.no_run import no_run
from tlt_hpc.storage.step_lines import STEP, Line
from tlt_hpc.watch.record import DamagedRecordError, Record, decode, read_verdict, status_file

TAIL_BYTES = 1 << 18
"""Of the metrics' end that is read: some tens of steps, whatever the run's length."""
SPEED_STEPS = 10
"""Steps that the time to go is reckoned from."""


@dataclass(frozen=True)
class RunFacts:
    """What of a run's configuration a view needs."""

    name: str
    mode: str
    num_steps: int
    num_responses: int
    """Of a step, before any refills."""
    ranks_per_replica: int


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
        if not last:
            return None
        seconds = [float(line["timing_s/step"]) for line in last]
        return (self.facts.num_steps - self.num_done) * sum(seconds) / len(seconds)

    def moved_since(self, before: RunState) -> bool:
        """Whether any rank has given a sign of life in between."""
        beats = {(record.start, record.rank): record.heartbeat for record in before.records}
        return any(beats.get((record.start, record.rank)) != record.heartbeat for record in self.records)


def read_state(path: Path) -> RunState:
    """Read a run's folder.

    Raises:
        UserError: there is no run.
    """
    folder = RunFolder(path)
    facts = _read_facts(folder)
    owner = None
    with suppress(OSError):  # a file system that hesitates: the next look tells
        owner = read_owner(folder.status)
    records = _read_records(folder.status, owner.start if owner else "")
    start = records[0].start if records else owner.start if owner else ""
    return RunState(
        seconds=time.monotonic(),
        folder=path,
        facts=facts,
        lines=read_last_lines(folder.metrics),
        records=records,
        age=_age_of(folder.status, records),
        owner=owner.name if owner else "",
        ends_at=owner.ends_at if owner else None,
        is_finished=folder.finished.is_file(),
        verdict=_verdict_of(folder.status, start),
    )


def read_last_lines(path: Path) -> dict[int, Line]:
    """The last committed steps' lines by step, of the file's last ``TAIL_BYTES``; none where there is no file."""
    try:
        with path.open("rb") as file:
            start = max(0, path.stat().st_size - TAIL_BYTES)
            file.seek(start)
            texts = file.read().split(b"\n")
    except FileNotFoundError:
        return {}
    rows: dict[int, Line] = {}
    for text in texts[start > 0 :]:  # the first of a part is likely cut
        try:
            row = json.loads(text)
            rows[int(row[STEP])] = row
        except (ValueError, KeyError, TypeError):  # the end of the file, or one that is just being replaced
            continue
    return dict(sorted(rows.items()))


def _read_facts(folder: RunFolder) -> RunFacts:
    try:
        tree = tomllib.loads(folder.config.read_text(encoding="utf-8"))
        run, rollout = tree["run"], tree["rollout"]
        num_responses = int(rollout["prompts_per_step"]) * int(rollout["group_size"])
        parallel = int(rollout.get("tensor_parallel", 1))
        mode = str(tree["speculation"]["mode"])
        return RunFacts(str(run["name"]), mode, int(run["num_steps"]), num_responses, max(1, parallel))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(no_run(folder.path, "config.toml")) from None
    except OSError as error:
        raise UserError(f"{folder.config}: {error.strerror}; see to it that you may read it") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder.config} is no run's configuration ({error}); give a run's folder") from None


def _read_records(status: Path, start: str) -> tuple[Record, ...]:
    """By rank; without an owner those of the lowest rank's start. One that cannot be read just now is left out."""
    found: list[Record] = []
    for rank in itertools.count():
        path = status_file(status, rank)
        if not path.exists():
            break
        record = _read_record(path)
        if record is not None and record.start == (start := start or record.start):  # an earlier start had more ranks
            found.append(record)
    return tuple(found)


def _read_record(path: Path) -> Record | None:
    """A rank's, read up to three times: one that is just being written over a network may be seen in part."""
    for _ in range(3):
        with suppress(OSError, DamagedRecordError):
            return decode(path.read_bytes())
    return None


def _age_of(status: Path, records: Sequence[Record]) -> float | None:
    written = []
    for record in records:
        with suppress(OSError):
            written.append(status_file(status, record.rank).stat().st_mtime)
    return max(0.0, time.time() - max(written)) if written else None


def _verdict_of(status: Path, start: str) -> str:
    """Why this start was ended; an earlier one's is none of it."""
    try:
        told = read_verdict(status)
    except OSError:
        return ""
    return told[1] if told is not None and told[0] == start else ""
