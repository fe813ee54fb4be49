"""The row of each draw of a run, a pure function of seed and draw, the same on every rank and at every start.

The step is the cursor: draw n of step s is number s x prompts_per_step + n, and no state has to be saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


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
    """The rows of a run's draws: every epoch has each row of ``is_kept`` [N] once."""

    def __init__(self, is_kept: NDArray[np.bool_], seed: int) -> None:
        self._is_kept, self._num_kept, self._seed = is_kept, int(is_kept.sum()), seed
        self._epoch = lru_cache(maxsize=2)(self._shuffle)  # a step may span two epochs

    def rows(self, start: int, stop: int) -> list[int]:
        """The rows of the draws ``start`` to ``stop``."""
        places = (divmod(number, self._num_kept) for number in range(start, stop))
        return [int(self._epoch(epoch)[place]) for epoch, place in places]

    def _shuffle(self, epoch: int) -> Indices:
        order = shuffled(len(self._is_kept), self._seed, epoch)
        return order[self._is_kept[order]]


class Refills:
    """Rows that replace a step's zero-variance groups, in an order of their own; none twice in a step if avoidable.

    Step s begins at place s x ``stride``, counted over all epochs.
    """

    def __init__(self, is_kept: NDArray[np.bool_], seed: int, stride: int) -> None:
        self._order = lru_cache(maxsize=2)(partial(shuffled, len(is_kept), seed, kind="refill"))
        self._is_kept, self._stride = is_kept, stride

    def rows(self, step: int, own: Collection[int], count: int) -> list[int]:
        """The step's first ``count`` rows; fewer are the beginning of more. ``own`` are rows of the step itself."""
        taken, found = set(own), list[int]()
        start, num_rows = step * self._stride, len(self._is_kept)
        # twice as many places as rows: the rest of one epoch, and a whole one, which has every row
        for number in range(start, start + 2 * num_rows):
            if len(found) == count:
                break
            epoch, place = divmod(number, num_rows)
            row = int(self._order(epoch)[place])
            if row not in taken and self._is_kept[row]:
                taken.add(row)
                found.append(row)
        # all of the data is in the step already: its rows come again, in order
        again = [*found, *own]
        return (again * (count // len(again) + 1))[:count]
