"""What a rank that stands still finds out about the others, reading after reading of their status files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tlt_hpc.cluster.watch.beat import Member
from tlt_hpc.cluster.watch.process import describe
from tlt_hpc.cluster.watch.record import DamagedRecordError, Record, read_record
from tlt_hpc.cluster.watch.verdict import Sighting, judge

SILENT_LOOKS = (12, 120)
"""For how long another rank's heartbeat may stand still: as long as this one's phase allows, within these bounds."""
SURE_READINGS = 2
"""Somebody must be found so often in a row: a record may be a few looks old."""
FILES_A_LOOK = 64
"""That all ranks together read in one look at most, about: a wait for one that works may last for hours."""


class Inquiry:
    """Begun by a rank that stands still in ``folder``, dropped when it moves again.

    Of the ranks that stand still the lowest reads the files of all; the others see in its own that it does.
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
        """One more look: the line with which this rank ends the job now, None where it does not.

        Args:
            limit: looks for which this rank's phase allows it to stand still.
        """
        self._looks += 1
        self._allowed = min(max(limit, SILENT_LOOKS[0]), SILENT_LOOKS[1])
        return self._line if self._num_found >= SURE_READINGS else None

    def read(self, own: Record) -> None:
        """Read the others' files, where it is time, and judge; the scribe's to do."""
        if self._looks % self._every:
            return
        found = list[Sighting]()
        for rank in range(self._member.size):
            seen = Sighting(rank, own) if rank == own.rank else self._sight(rank)
            if rank < own.rank and _inquires(seen):
                found = []
                break
            found.append(seen)
        self._line = judge(found)
        self._num_found = self._num_found + 1 if self._line is not None else 0

    def _sight(self, rank: int) -> Sighting:
        return self._with_silence(sight(self._folder, self._member, rank), self._looks, self._allowed)

    def _with_silence(self, seen: Sighting, at: int, allowed: int) -> Sighting:
        record = seen.record
        if record is None or record.ending:
            return seen
        heartbeat, first_seen = self._heartbeats.get(seen.rank, (-1, 0))
        if record.heartbeat != heartbeat:
            self._heartbeats[seen.rank] = (record.heartbeat, at)
            return seen
        if at - first_seen < allowed:
            return seen
        process = describe(record.pid) if record.rank in self._member.neighbours else ""
        return replace(seen, silent=True, process=process)


def _inquires(seen: Sighting) -> bool:
    """Whether a rank is about to find out by itself."""
    return seen.record is not None and seen.record.stalled and not seen.record.ending and not seen.silent


def sight(folder: Path, member: Member, rank: int) -> Sighting:
    """What a rank's file tells of this start of the job."""
    try:
        record = read_record(folder, rank)
    except FileNotFoundError:
        return Sighting(rank, None, "there is no file")
    except (OSError, DamagedRecordError) as error:
        return Sighting(rank, None, str(error))
    if record.start != member.start:
        return Sighting(rank, None, "it is an earlier start's")
    return Sighting(rank, record)


def is_due(record: Record, written: Record | None, heartbeat_looks: int) -> bool:
    """Whether a record is to be written: what it says of the phase is new, or it is time for a sign of life."""
    if written is None or record.heartbeat - written.heartbeat >= heartbeat_looks:
        return True
    return _of_note(record) != _of_note(written)


def _of_note(record: Record) -> tuple[object, ...]:
    waits = record.stalled and record.waiting
    return (record.start, record.phase, record.step, record.stalled, waits, record.ending)
