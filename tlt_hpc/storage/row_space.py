"""Which rows of an array that grows are free. Rows that were given back are handed out first, so that the array is
never longer than the most rows held at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Extent:
    """Rows ``first`` .. ``first + count - 1``."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


class RowSpace:
    """``capacity`` rows, of which ``high_water`` were ever held at once."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.high_water = 0
        self.num_held = 0
        self._holes: list[Extent] = []

    @property
    def num_free(self) -> int:
        return self._capacity - self.num_held

    def take(self, count: int) -> tuple[Extent, ...]:
        """So many rows, in as many pieces as the holes make; the lowest first."""
        assert 0 <= count <= self.num_free
        self.num_held += count
        taken: list[Extent] = []
        while count and self._holes:
            hole = self._holes.pop(0)
            taken.append(Extent(hole.first, min(count, hole.count)))
            count -= taken[-1].count
            if taken[-1].count < hole.count:
                self._holes.insert(0, Extent(taken[-1].end, hole.count - taken[-1].count))
        if count:
            taken.append(Extent(self.high_water, count))
            self.high_water += count
        return tuple(_joined(taken))

    def give_back(self, extents: Iterable[Extent]) -> None:
        """Free rows that were taken."""
        extents = list(extents)
        self.num_held -= sum(extent.count for extent in extents)
        self._holes = _joined(sorted([*self._holes, *extents], key=lambda extent: extent.first))


def _joined(extents: list[Extent]) -> list[Extent]:
    """Neighbours that touch as one."""
    joined: list[Extent] = []
    for extent in extents:
        if joined and joined[-1].end == extent.first:
            joined[-1] = Extent(joined[-1].first, joined[-1].count + extent.count)
        else:
            joined.append(extent)
    return joined
