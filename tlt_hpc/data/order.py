"""Which row each draw of a run takes: pure functions of seed and draw, the same on every rank and at every start.

The step is the cursor: draw n of step s is number s x prompts_per_step + n, and no state has to be saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.config import ConfigError

Indices = NDArray[np.int64]
Keeps = Callable[[int], bool]
"""Whether a row is drawn at all."""


def shuffled(num_rows: int, seed: int, epoch: int, kind: str = "epoch") -> Indices:
    """A permutation [N]: rows sorted by a hash of (seed, epoch, row), SplitMix64's finaliser (Steele et al., 2014).

    A shuffle by hand, since libraries may change theirs from version to version.
    """
    start = int.from_bytes(hashlib.sha256(f"{kind}/{seed}/{epoch}".encode()).digest()[:8], "little")
    z = np.arange(1, num_rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)), kind="stable")


class Draws:
    """The rows of a run's draws: every epoch has each row that ``keeps`` accepts once; without ``keeps`` every row.

    Where draw n lies depends on the rows left out before it, so the first epoch is judged from its beginning as far as
    draws have come: what is judged depends on the number alone, and never on what was drawn before. From the second
    epoch on all rows are judged, and a draw follows by division.
    """

    def __init__(self, num_rows: int, seed: int, keeps: Keeps | None, name: str) -> None:
        # a step may span two epochs
        self._order = lru_cache(maxsize=2)(partial(shuffled, num_rows, seed))
        self._num_rows, self._keeps, self._name = num_rows, keeps, name
        self._is_good = np.full(num_rows, keeps is None)
        self._first: list[int] = []
        """Accepted rows of the first epoch, as far as it has been judged."""
        self._num_judged = 0

    def rows(self, start: int, stop: int) -> list[int]:
        """The rows of the draws ``start`` to ``stop``.

        Raises:
            ConfigError: no row is left.
        """
        count = self._num_rows
        if self._keeps is not None:
            while len(self._first) < stop and self._num_judged < self._num_rows:
                self._judge(stop - len(self._first), self._keeps)
            if stop <= len(self._first):
                return self._first[start:stop]
            count = len(self._first)
        if not count:
            raise ConfigError(f"data.source = {self._name!r} has no usable row; `tlt data inspect` says why")
        places = (divmod(number, count) for number in range(start, stop))
        return [int(self._epoch(epoch)[place]) for epoch, place in places]

    def look_ahead(self, count: int) -> None:
        """Judge the first ``count`` rows of the first epoch, unless that has been done."""
        if self._keeps is not None:
            self._judge(count - self._num_judged, self._keeps)

    def _judge(self, count: int, keeps: Keeps) -> None:
        """Judge the next rows of the first epoch, in the order of the files: the first mistake is named first."""
        block = self._order(0)[self._num_judged : self._num_judged + max(count, 0)]
        for row in np.sort(block):
            self._is_good[row] = keeps(int(row))
        self._first += block[self._is_good[block]].tolist()
        self._num_judged += len(block)

    def _epoch(self, epoch: int) -> Indices:
        order = self._order(epoch)
        return order if self._keeps is None else order[self._is_good[order]]


class Refills:
    """Rows that replace a step's zero-variance groups, in an order of their own; none twice in a step if avoidable.

    Step s begins at place s x ``stride``, counted over all epochs.
    """

    def __init__(self, num_rows: int, seed: int, stride: int, keeps: Keeps | None) -> None:
        self._order = lru_cache(maxsize=2)(partial(shuffled, num_rows, seed, kind="refill"))
        self._num_rows, self._stride, self._keeps = num_rows, stride, keeps

    def rows(self, step: int, own: Collection[int], count: int) -> list[int]:
        """The step's first ``count`` rows; fewer are the beginning of more. ``own`` are rows of the step itself."""
        taken, found = set(own), list[int]()
        start = step * self._stride
        # twice as many places as rows: the rest of one epoch, and a whole one, which has every row
        for number in range(start, start + 2 * self._num_rows):
            if len(found) == count:
                break
            epoch, place = divmod(number, self._num_rows)
            row = int(self._order(epoch)[place])
            if row not in taken and (self._keeps is None or self._keeps(row)):
                taken.add(row)
                found.append(row)
        # all of the data is in the step already: its rows come again, in order
        again = [*found, *own]
        return (again * (count // len(again) + 1))[:count]
