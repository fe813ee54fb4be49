"""What a run's files say of it at one moment. Reads status files and the last lines of metrics; knows no screen.

Nothing is opened for writing, nothing is locked and nobody is asked: any number of readers change nothing for the job.
"""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt_hpc.errors import UserError
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.step_lines import STEP, Line
from tlt_hpc.watch.record import DamagedRecordError, Record, decode, status_file, verdict_file

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
        told = [record.sequences_left for record in self.records if record.phase == "rollout"]
        return sum(left for left in told if left >= 0) if any(left >= 0 for left in told) else None

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
    owner = _read_json(folder.status / "owner")
    return RunState(
        seconds=time.monotonic(),
        folder=path,
        facts=facts,
        lines=read_last_lines(folder.metrics),
        records=_read_records(folder.status, str(owner.get("start", ""))),
        owner=_name_of(owner),
        ends_at=owner.get("ends_at"),
        is_finished=folder.finished.is_file(),
        verdict=_read_text(verdict_file(folder.status)),
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
        return RunFacts(str(run["name"]), str(tree["speculation"]["mode"]), int(run["num_steps"]), num_responses)
    except OSError as error:
        raise UserError(
            f"{folder.path} holds no run ({error.strerror}: config.toml); give a run's folder such as runs/tiny"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder.config} is no run's configuration ({error}); give a run's folder") from None


def _read_records(status: Path, start: str) -> tuple[Record, ...]:
    """By rank from 0 on, up to the first that is not there; without an owner those of rank 0's start."""
    found: list[Record] = []
    while (record := _read_record(status, len(found))) is not None:
        start = start or record.start
        if record.start != start:  # an earlier start had more ranks
            break
        found.append(record)
    return tuple(found)


def _read_record(status: Path, rank: int) -> Record | None:
    """A rank's; where it cannot be read just now, None."""
    try:
        return decode(status_file(status, rank).read_bytes())
    except (OSError, DamagedRecordError):
        return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _name_of(owner: Mapping[str, Any]) -> str:
    if not owner:
        return ""
    job = f"job {owner['job']}, " if owner.get("job") else ""
    return f"{job}process {owner.get('pid')} on {owner.get('host')}"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
