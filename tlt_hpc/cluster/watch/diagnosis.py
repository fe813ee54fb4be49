"""Which rank blocks the others: a rank that makes no progress reads the status files of all, repeatedly, and judges.

A rank that is stuck in work of its own is named first, then one whose heartbeat has stopped. If all ranks wait, the
line compares the collectives that they wait in. Nobody is named while a rank that makes progress may still arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.cluster.topology import format_cores
from tlt_hpc.cluster.watch.rank_progress import Member, Phase
from tlt_hpc.cluster.watch.record import Record, read_record, status_file
from tlt_hpc.common.files import DamagedText

SILENT_LOOKS = (12, 120)
"""Looks for which another rank's heartbeat may not move: as many as this one's phase allows, within these bounds."""
SURE_READINGS = 2
"""A culprit must be found so often in a row: a record may be a few looks old."""
FILES_A_LOOK = 64
"""Read per look by all ranks together, about: a wait for a rank that works may last for hours."""
_WORDS = {"T": "its process is stopped", "t": "a debugger holds its process", "Z": "its process is dead",
          "D": "its process is stuck in the system, as on a file system that hangs"}  # fmt: skip
_UNANSWERED = "its process runs, but its interpreter does not: a call into a library that does not return"
_ORDER = [phase.value for phase in Phase]


@dataclass(frozen=True)
class StatusReading:
    """Content of a rank's status file as it was read."""

    rank: int
    record: Record | None
    problem: str = ""
    """Why there is no record."""
    silent: bool = False
    """Its heartbeat has not moved for longer than a live rank's can."""
    process: str = ""
    """The state of a silent rank's process, if it is on the reader's host."""


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

    def count_and_get_verdict(self, limit: int) -> str | None:
        """One more look; returns the line with which this rank ends the job now, or None.

        Args:
            limit: looks without progress that this rank's phase allows.
        """
        self._looks += 1
        self._allowed = min(max(limit, SILENT_LOOKS[0]), SILENT_LOOKS[1])
        return self._line if self._num_found >= SURE_READINGS else None

    def read_and_judge_others(self, own: Record) -> None:
        """Read the others' files, if it is time, and judge; runs in the status writer's thread."""
        if self._looks % self._every:
            return
        found = list[StatusReading]()
        for rank in range(self._member.size):
            seen = StatusReading(rank, own) if rank == own.rank else self._read_sighting(rank)
            if rank < own.rank and _is_diagnosing(seen):
                found = []
                break
            found.append(seen)
        self._line = describe_blocking_rank(found)
        self._num_found = self._num_found + 1 if self._line is not None else 0

    def _read_sighting(self, rank: int) -> StatusReading:
        """What a rank's file says about this start of the job."""
        try:
            record = read_record(status_file(self._folder, rank))
        except FileNotFoundError:
            return StatusReading(rank, None, "there is no file")
        except (OSError, DamagedText) as error:
            return StatusReading(rank, None, str(error))
        if record.start != self._member.start:
            return StatusReading(rank, None, "it is an earlier start's")
        heartbeat, first_seen = self._heartbeats.get(rank, (-1, 0))
        if record.heartbeat != heartbeat:
            self._heartbeats[rank] = (record.heartbeat, self._looks)
        elif not record.ending and self._looks - first_seen >= self._allowed:
            process = describe_process_state(record.pid) if rank in self._member.neighbours else ""
            return StatusReading(rank, record, silent=True, process=process)
        return StatusReading(rank, record)


def _is_diagnosing(seen: StatusReading) -> bool:
    """Whether a rank reads the others' files itself."""
    return seen.record is not None and seen.record.stalled and not seen.silent


def process_state(pid: int) -> str:
    """The state of a process of this host as one letter, as ``ps`` shows it; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def describe_process_state(pid: int) -> str:
    """Return the reason why a process of this host does not move its heartbeat."""
    state = process_state(pid)
    return _WORDS.get(state, _UNANSWERED) if state else "its process is gone"


# --- the verdict; pure ---


def describe_blocking_rank(sightings: Sequence[StatusReading]) -> str | None:
    """Return the line that names the rank which blocks the others; None while that cannot be decided.

    Called by a rank that has stalled, so at least one of the records is ``stalled``.
    """
    known = [seen.record for seen in sightings if seen.record is not None and not seen.silent]
    running = [record for record in known if not record.ending]
    if not any(record.stalled for record in running):
        return None
    line = _blocking_rank_text(sightings, running)
    return None if line is None else "; ".join([line, *_unreadable_ranks_texts(sightings)])


def describe_lone_stalled_rank(record: Record, why: str) -> str:
    """The line of a rank that sees no record but its own, and ``why``."""
    told = _stuck_ranks_text([record], []) if not record.waiting else f"{record.name}: {_waiting_ranks_text([record])}"
    return f"{told}; what the other ranks do cannot be seen: {why}"


def _blocking_rank_text(sightings: Sequence[StatusReading], running: Sequence[Record]) -> str | None:
    stuck = [record for record in running if record.stalled and not record.waiting]
    silent = [seen for seen in sightings if seen.silent]
    ended = [seen.record for seen in sightings if seen.record is not None and seen.record.ending]
    others = [record for record in running if record.waiting]
    if stuck:
        return _stuck_ranks_text(stuck, others)
    if silent:
        return _silent_ranks_text(silent, others)
    if any(not record.waiting or not record.stalled for record in running):
        return None  # one that makes progress, or has just arrived, may let all continue
    missing = [seen.rank for seen in sightings if seen.record is None]
    if missing:
        return f"{_rank_list_text(missing)} cannot be seen, while {_waiting_ranks_text(others)}"
    if ended:
        told = ", ".join(f"{record.name} has ended ({record.ending})" for record in ended)
        return f"{told}, while {_waiting_ranks_text(others)}"
    return _all_waiting_text(others)


def _stuck_ranks_text(stuck: Sequence[Record], others: Sequence[Record]) -> str:
    """Of several, names those least far: the rest may wait for them uncounted, as in torch's collectives."""
    first = min(map(_how_far, stuck))
    least = [record for record in stuck if _how_far(record) == first]
    told = "; ".join(
        f"{r.name} is stuck in {r.phase_and_step_text} for {r.seconds:g} s{_code_place_text(r)}" for r in least[:3]
    )
    more = f" and {len(least) - 3} more" if len(least) > 3 else ""
    return f"{told}{more}" + (f"; {_waiting_ranks_text(others)}" if others else "")


def _how_far(record: Record) -> tuple[int, int, int]:
    return (-1 if record.step is None else record.step, _ORDER.index(record.phase), record.part_number)


def _silent_ranks_text(silent: Sequence[StatusReading], others: Sequence[Record]) -> str:
    told = []
    for seen in silent:
        assert seen.record is not None
        why = seen.process or "dead, stopped, or cut off from the run's folder"
        told.append(f"{seen.record.name} shows no sign of life ({why}), last seen in {seen.record.phase_and_step_text}")
    return "; ".join(told) + (f"; {_waiting_ranks_text(others)}" if others else "")


def _all_waiting_text(waiting: Sequence[Record]) -> str:
    told = _waiting_ranks_text(waiting, numbered=True)
    if len({(record.waiting, record.number) for record in waiting}) > 1:
        return f"the ranks have parted: {told}"
    return f"{told}, which does not end though all are there: ask the MPI library or the network"


def _waiting_ranks_text(waiting: Iterable[Record], numbered: bool = False) -> str:
    """Which ranks wait in which collectives; the numbers are comparable only if all ranks wait."""
    groups: dict[str, list[Record]] = {}
    for record in waiting:
        name = f"{record.waiting} number {record.number}" if numbered else record.waiting
        groups.setdefault(name, []).append(record)
    return ", ".join(
        f"{_rank_list_text(record.rank for record in group)} wait{'s' * (len(group) == 1)} in {name} "
        f"({group[0].phase_and_step_text})"
        for name, group in groups.items()
    )


def _unreadable_ranks_texts(sightings: Sequence[StatusReading]) -> list[str]:
    problems: dict[str, list[int]] = {}
    for seen in sightings:
        if seen.problem:
            problems.setdefault(seen.problem, []).append(seen.rank)
    return [f"the status of {_rank_list_text(ranks)} cannot be read: {problem}" for problem, ranks in problems.items()]


def _code_place_text(record: Record) -> str:
    return f", at {record.where}" if record.where else ""


def _rank_list_text(numbers: Iterable[int]) -> str:
    """``ranks 0-3, 7`` in words."""
    text = format_cores(numbers).replace(",", ", ")
    return f"rank{'s' * (not text.isdecimal())} {text}"
