"""Finds in all ranks' records the rank that blocks the others. Pure.

A rank that is stuck in work of its own is named first, then one whose heartbeat has stopped. If all ranks wait, the
line compares the collectives that they wait in. Nobody is named while a rank that makes progress may still arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tlt_hpc.cluster.topology import format_cores
from tlt_hpc.cluster.watch.beat import Phase
from tlt_hpc.cluster.watch.record import Record

_ORDER = [phase.value for phase in Phase]


@dataclass(frozen=True)
class Sighting:
    """What was found in a rank's status file."""

    rank: int
    record: Record | None
    problem: str = ""
    """Why there is no record."""
    silent: bool = False
    """Its heartbeat has not moved for longer than a live rank's can."""
    process: str = ""
    """The state of a silent rank's process, if it is on the reader's host."""


def judge(sightings: Sequence[Sighting]) -> str | None:
    """Which rank blocks the others, in one line; None while that cannot be decided.

    Called by a rank that has stalled, so at least one of the records is ``stalled``.
    """
    known = [seen.record for seen in sightings if seen.record is not None and not seen.silent]
    running = [record for record in known if not record.ending]
    if not any(record.stalled for record in running):
        return None
    line = _accuse(sightings, running)
    return None if line is None else "; ".join([line, *_unread(sightings)])


def judge_alone(record: Record, why: str) -> str:
    """The line of a rank that sees no record but its own, and ``why``."""
    told = _of_stuck([record], []) if not record.waiting else f"{record.name}: {_waiting([record])}"
    return f"{told}; what the other ranks do cannot be seen: {why}"


def _accuse(sightings: Sequence[Sighting], running: Sequence[Record]) -> str | None:
    stuck = [record for record in running if record.stalled and not record.waiting]
    silent = [seen for seen in sightings if seen.silent]
    ended = [seen.record for seen in sightings if seen.record is not None and seen.record.ending]
    others = [record for record in running if record.waiting]
    if stuck:
        return _of_stuck(stuck, others)
    if silent:
        return _of_silent(silent, others)
    if any(not record.waiting or not record.stalled for record in running):
        return None  # one that makes progress, or has just arrived, may let all continue
    missing = [seen.rank for seen in sightings if seen.record is None]
    if missing:
        return f"{_ranks(missing)} cannot be seen, while {_waiting(others)}"
    if ended:
        told = ", ".join(f"{record.name} has ended ({record.ending})" for record in ended)
        return f"{told}, while {_waiting(others)}"
    return _of_waiting(others)


def _of_stuck(stuck: Sequence[Record], others: Sequence[Record]) -> str:
    """Of several, names those least far: the rest may wait for them uncounted, as in torch's collectives."""
    first = min(map(_how_far, stuck))
    least = [record for record in stuck if _how_far(record) == first]
    told = "; ".join(f"{r.name} is stuck in {r.place} for {r.seconds:g} s{_at(r)}" for r in least[:3])
    more = f" and {len(least) - 3} more" if len(least) > 3 else ""
    return f"{told}{more}" + (f"; {_waiting(others)}" if others else "")


def _how_far(record: Record) -> tuple[int, int, int]:
    return (-1 if record.step is None else record.step, _ORDER.index(record.phase), record.part_number)


def _of_silent(silent: Sequence[Sighting], others: Sequence[Record]) -> str:
    told = []
    for seen in silent:
        assert seen.record is not None
        why = seen.process or "dead, stopped, or cut off from the run's folder"
        told.append(f"{seen.record.name} shows no sign of life ({why}), last seen in {seen.record.place}")
    return "; ".join(told) + (f"; {_waiting(others)}" if others else "")


def _of_waiting(waiting: Sequence[Record]) -> str:
    told = _waiting(waiting, numbered=True)
    if len({(record.waiting, record.number) for record in waiting}) > 1:
        return f"the ranks have parted: {told}"
    return f"{told}, which does not end though all are there: ask the MPI library or the network"


def _waiting(waiting: Iterable[Record], numbered: bool = False) -> str:
    """Which ranks wait in which collectives; the numbers are comparable only if all ranks wait."""
    groups: dict[str, list[Record]] = {}
    for record in waiting:
        name = f"{record.waiting} number {record.number}" if numbered else record.waiting
        groups.setdefault(name, []).append(record)
    return ", ".join(
        f"{_ranks(record.rank for record in group)} wait{'s' * (len(group) == 1)} in {name} ({group[0].place})"
        for name, group in groups.items()
    )


def _unread(sightings: Sequence[Sighting]) -> list[str]:
    problems: dict[str, list[int]] = {}
    for seen in sightings:
        if seen.problem:
            problems.setdefault(seen.problem, []).append(seen.rank)
    return [f"the status of {_ranks(ranks)} cannot be read: {problem}" for problem, ranks in problems.items()]


def _at(record: Record) -> str:
    return f", at {record.where}" if record.where else ""


def _ranks(numbers: Iterable[int]) -> str:
    """``ranks 0-3, 7`` in words."""
    text = format_cores(numbers).replace(",", ", ")
    return f"rank{'s' * (not text.isdecimal())} {text}"
