"""What a rank that makes no progress finds out about the others by reading their status files repeatedly."""

from __future__ import annotations

from pathlib import Path

from tlt_hpc.cluster.watch.beat import Member
from tlt_hpc.cluster.watch.record import DamagedRecordError, Record, read_record
from tlt_hpc.cluster.watch.verdict import Sighting, judge

SILENT_LOOKS = (12, 120)
"""Looks for which another rank's heartbeat may not move: as many as this one's phase allows, within these bounds."""
SURE_READINGS = 2
"""A culprit must be found so often in a row: a record may be a few looks old."""
FILES_A_LOOK = 64
"""Read per look by all ranks together, about: a wait for a rank that works may last for hours."""
_WORDS = {"T": "its process is stopped", "t": "a debugger holds its process", "Z": "its process is dead",
          "D": "its process is stuck in the system, as on a file system that hangs"}  # fmt: skip
_UNANSWERED = "its process runs, but its interpreter does not: a call into a library that does not return"


class Diagnosis:
    """Begun by a rank that has stalled, dropped when it makes progress again; ``folder`` has the status files.

    Of the stalled ranks the lowest reads the files of all; the others read on only until they see that it has stalled.
    """

    def __init__(self, folder: Path, member: Member) -> None:
        self._folder, self._member = folder, member
        self._looks = self._num_found = 0
        self._every = max(1, member.size // FILES_A_LOOK)
        self._allowed = SILENT_LOOKS[1]
        self._heartbeats: dict[int, tuple[int, int]] = {}
        """rank -> heartbeat, and the look at which it was first seen."""
        self._line: str | None = None

    def look(self, limit: int) -> str | None:
        """One more look; returns the line with which this rank ends the job now, or None.

        Args:
            limit: looks without progress that this rank's phase allows.
        """
        self._looks += 1
        self._allowed = min(max(limit, SILENT_LOOKS[0]), SILENT_LOOKS[1])
        return self._line if self._num_found >= SURE_READINGS else None

    def read(self, own: Record) -> None:
        """Read the others' files, if it is time, and judge; runs in the status writer's thread."""
        if self._looks % self._every:
            return
        found = list[Sighting]()
        for rank in range(self._member.size):
            seen = Sighting(rank, own) if rank == own.rank else self._sight(rank)
            if rank < own.rank and _is_diagnosing(seen):
                found = []
                break
            found.append(seen)
        self._line = judge(found)
        self._num_found = self._num_found + 1 if self._line is not None else 0

    def _sight(self, rank: int) -> Sighting:
        """What a rank's file says about this start of the job."""
        try:
            record = read_record(self._folder, rank)
        except FileNotFoundError:
            return Sighting(rank, None, "there is no file")
        except (OSError, DamagedRecordError) as error:
            return Sighting(rank, None, str(error))
        if record.start != self._member.start:
            return Sighting(rank, None, "it is an earlier start's")
        heartbeat, first_seen = self._heartbeats.get(rank, (-1, 0))
        if record.heartbeat != heartbeat:
            self._heartbeats[rank] = (record.heartbeat, self._looks)
        elif not record.ending and self._looks - first_seen >= self._allowed:
            process = describe(record.pid) if rank in self._member.neighbours else ""
            return Sighting(rank, record, silent=True, process=process)
        return Sighting(rank, record)


def _is_diagnosing(seen: Sighting) -> bool:
    """Whether a rank reads the others' files itself."""
    return seen.record is not None and seen.record.stalled and not seen.silent


def is_due(record: Record, written: Record | None, heartbeat_looks: int) -> bool:
    """Whether a record is to be written: its phase or state is new, or it is time for a heartbeat."""
    if written is None or record.heartbeat - written.heartbeat >= heartbeat_looks:
        return True
    return _state_of(record) != _state_of(written)


def _state_of(record: Record) -> tuple[object, ...]:
    waits = record.stalled and record.waiting
    return (record.start, record.phase, record.step, record.stalled, waits, record.ending)


def process_state(pid: int) -> str:
    """The state of a process of this host as one letter, as ``ps`` shows it; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def describe(pid: int) -> str:
    """Why a process does not move its heartbeat, in words."""
    state = process_state(pid)
    return _WORDS.get(state, _UNANSWERED) if state else "its process is gone"
