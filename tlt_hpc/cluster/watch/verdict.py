"""From all ranks' records to the rank that holds up the others, and what for. Pure.

A rank that stands still in work of its own comes before those that wait; one that shows no sign of life comes next;
where all wait, the collectives that they wait in are what differs. Nobody is named while a rank whose counter moves may
still come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tlt_hpc.cluster.watch.beat import Phase
from tlt_hpc.cluster.watch.record import Record

_ORDER = [phase.value for phase in Phase]


@dataclass(frozen=True)
class Sighting:
    """What one look into a rank's status file found."""

    rank: int
    record: Record | None
    problem: str = ""
    """Why there is no record."""
    silent: bool = False
    """Its heartbeat has stood still for longer than a live rank's can."""
    process: str = ""
    """Of a silent rank on the reader's own host: what the system says of its process."""


def judge(sightings: Sequence[Sighting]) -> str | None:
    """Who holds up the others, in one line; None while nobody can be told to.

    Called by a rank whose own counter stands still, so at least one of the records is ``stalled``.
    """
    known = [seen.record for seen in sightings if seen.record is not None and not seen.silent]
    running = [record for record in known if not record.ending]
    if not any(record.stalled for record in running):
        return None
    line = _accuse(sightings, running)
    if line is None:
        return None
    return "; ".join([line, *_unread(sightings)])


def judge_alone(record: Record, why: str) -> str:
    """What a rank can say that sees no record but its own, and ``why`` it does not."""
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
        return None  # one that is at work, or has just come, may set all going
    missing = [seen.rank for seen in sightings if seen.record is None]
    if missing:
        return f"{_ranks(missing)} cannot be seen, while {_waiting(others)}"
    if ended:
        told = ", ".join(f"{record.name} has ended ({record.ending})" for record in ended)
        return f"{told}, while {_waiting(others)}"
    return _of_waiting(others)


def _of_stuck(stuck: Sequence[Record], others: Sequence[Record]) -> str:
    """Of several, those least far: the rest may wait for them where no counter tells, as in torch's collectives."""
    first = min(map(_how_far, stuck))
    least = [record for record in stuck if _how_far(record) == first]
    told = "; ".join(f"{r.name} stands still in {r.place} for {r.seconds:g} s{_at(r)}" for r in least[:3])
    more = f" and {len(least) - 3} more" if len(least) > 3 else ""
    behind = [record for record in stuck if record not in least]
    tail = f"; {_ranks(r.rank for r in behind)} further on, in {behind[0].place}" if behind else ""
    return f"{told}{more}{tail}" + (f"; {_waiting(others)}" if others else "")


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
    """Which ranks wait in which collectives; their numbers tell them apart only where all wait, and all is recent."""
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
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' * (len(spans) > 1 or spans[0][0] != spans[0][1])} {text}"
