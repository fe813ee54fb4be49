"""Which row the n-th draw of a run takes: pure functions of seed and number, the same on every rank and at every start.

The step is the cursor: draw n of step s is number s x prompts_per_step + n, and no state has to be saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.config import ConfigError

Indices = NDArray[np.int64]
EpochOrder = Callable[[int], Indices]
"""The rows of an epoch, by its number: as many as there are rows."""


class Draws(Protocol):
    """The rows of a run's draws."""

    def rows(self, start: int, stop: int) -> list[int]:
        """The rows of the draws ``start`` to ``stop``."""
        ...


def shuffled(num_rows: int, seed: int, epoch: int, kind: str = "epoch") -> Indices:
    """A permutation [N]: rows sorted by a hash of (seed, epoch, row), SplitMix64's finaliser (Steele et al., 2014).

    A shuffle by hand, since libraries may change theirs from version to version.
    """
    start = int.from_bytes(hashlib.sha256(f"{kind}/{seed}/{epoch}".encode()).digest()[:8], "little")
    z = np.arange(1, num_rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)), kind="stable")


class AllRows:
    """Every row is drawn: where a draw lies follows by division."""

    def __init__(self, num_rows: int, order: EpochOrder) -> None:
        self.num_rows = num_rows
        self.order = keeping_last(order)

    def rows(self, start: int, stop: int) -> list[int]:
        places = (divmod(number, self.num_rows) for number in range(start, stop))
        return [int(self.order(epoch)[place]) for epoch, place in places]


class GoodRows:
    """Rows that ``keeps`` refuses are left out, and each epoch draws every other once.

    Where draw n lies depends on the rows before it, so the first epoch is judged as far as draws have come, from its
    beginning on: what is judged depends on the number alone, and never on what was drawn before. From the second epoch
    on all rows are judged and a draw follows by division again.
    """

    def __init__(self, num_rows: int, order: EpochOrder, keeps: Callable[[int], bool], name: str) -> None:
        self._order, self._keeps, self._name = keeping_last(order), keeps, name
        self._is_good = np.zeros(num_rows, bool)
        self._first: list[int] = []
        self._num_judged = 0

    def rows(self, start: int, stop: int) -> list[int]:
        """As ``Draws.rows``.

        Raises:
            ConfigError: no row is left.
        """
        while len(self._first) < stop and self._num_judged < len(self._is_good):
            self._judge(stop - len(self._first))
        if stop <= len(self._first):
            return self._first[start:stop]
        if not self._first:
            raise ConfigError(f"data.source = {self._name!r} has no usable row; `tlt data inspect` says why")
        places = (divmod(number, len(self._first)) for number in range(start, stop))
        return [int(self._kept(epoch)[place]) for epoch, place in places]

    def look_ahead(self, count: int) -> None:
        """Judge the first ``count`` rows of the first epoch, unless that has been done."""
        self._judge(count - self._num_judged)

    def _judge(self, count: int) -> None:
        """Judge the next rows of the first epoch, in the order of the files: a mistake is named where it is first."""
        block = self._order(0)[self._num_judged : self._num_judged + max(count, 0)]
        for row in np.sort(block):
            self._is_good[row] = self._keeps(int(row))
        self._first += block[self._is_good[block]].tolist()
        self._num_judged += len(block)

    def _kept(self, epoch: int) -> Indices:
        order = self._order(epoch)
        return order[self._is_good[order]]


def keeping_last(order: EpochOrder) -> EpochOrder:
    """The same, the last two epochs kept: a step may span two."""
    return lru_cache(maxsize=2)(order)
