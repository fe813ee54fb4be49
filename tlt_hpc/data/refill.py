"""Which rows replace a step's dead groups: a pure function of data, seed and step, whatever was drawn before."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tlt_hpc.data.order import EpochOrder, keeping_last


class Refills:
    """Rows beside a step's own, in an order and from a place of their own; none twice in a step while there are others.

    ``order`` gives the rows of an epoch, ``start`` a step's first place in it, counted over all epochs.
    """

    def __init__(
        self, num_rows: int, order: EpochOrder, start: Callable[[int], int], keeps: Callable[[int], bool]
    ) -> None:
        self._num_rows, self._order, self._start, self._keeps = num_rows, keeping_last(order), start, keeps

    def rows(self, step: int, own: Collection[int], count: int) -> list[int]:
        """The step's first ``count`` rows of this kind; fewer are a beginning of more.

        Args:
            own: the rows that the step itself drew.
        """
        taken, found = set(own), list[int]()
        # twice as many places as rows: the rest of one epoch, and a whole one, which has every row
        for number in range(self._start(step), self._start(step) + 2 * self._num_rows):
            if len(found) == count:
                break
            epoch, place = divmod(number, self._num_rows)
            row = int(self._order(epoch)[place])
            if row not in taken and self._keeps(row):
                taken.add(row)
                found.append(row)
        # the whole of the data is in the step already: its rows come again, in order
        again = [*found, *own]
        return (again * (count // len(again) + 1))[:count]
