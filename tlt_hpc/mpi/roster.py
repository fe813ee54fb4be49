"""What a rank tells the others during a rollout, and the decisions that follow from it. Pure: imports no MPI.

All ranks see the same sequence of rosters, so a decision that depends on a roster alone is the same on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class State(IntEnum):
    """What a rank does: it generates, waits for the others, or trains the drafter while it waits."""

    BUSY = 0
    IDLE = 1
    TRAINING = 2


class Status(NamedTuple):
    """One rank's part of a roster.

    ``tokens`` counts what the rank has generated in this rollout so far, ``drafter_steps`` its micro-steps in this
    rollout; ``stop`` is its vote to end the rollout early.
    """

    state: State
    sequences_left: int
    tokens: int
    drafter_steps: int
    stop: bool = False


class StatusTable:
    """All ranks' statuses as one array, [R, 5] int64 with the fields of ``Status``.

    A busy rank reads a roster between rounds of decoding and needs few of its entries, so a ``Status`` is created only
    when it is asked for: for all of 512 ranks that takes a millisecond.
    """

    def __init__(self, records: NDArray[np.int64]) -> None:
        self._records = records
        self.num_busy = int(np.count_nonzero(records[:, 0] == State.BUSY))
        self.stopping = bool(records[:, 4].any())

    @classmethod
    def of(cls, statuses: Sequence[Status]) -> StatusTable:
        """A table of these statuses, in rank order."""
        return cls(np.array(statuses, np.int64))

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, rank: int) -> Status:
        state, sequences_left, tokens, drafter_steps, stop = self._records[rank].tolist()
        return Status(State(state), sequences_left, tokens, drafter_steps, bool(stop))

    def __iter__(self) -> Iterator[Status]:
        return (self[rank] for rank in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StatusTable) and np.array_equal(self._records, other._records)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True)
class Roster:
    """All ranks' statuses in one round of one rollout, in rank order; in round 0 nobody has reported yet."""

    epoch: int
    round: int
    statuses: StatusTable

    @classmethod
    def before_first_round(cls, epoch: int, num_ranks: int) -> Roster:
        """The roster of round 0, in which all ``num_ranks`` ranks are assumed to be BUSY."""
        return cls(epoch, 0, StatusTable.of([Status(State.BUSY, 0, 0, 0)] * num_ranks))

    @property
    def num_busy(self) -> int:
        """Ranks that still generate."""
        return self.statuses.num_busy

    @property
    def num_idle(self) -> int:
        """Ranks that have nothing left to generate, whether they train or wait."""
        return len(self.statuses) - self.num_busy

    @property
    def stopping(self) -> bool:
        """Whether any rank votes to stop."""
        return self.statuses.stopping

    @property
    def over(self) -> bool:
        """Whether the rollout ends with this round: no rank is BUSY, or some rank votes to stop."""
        return self.num_busy == 0 or self.stopping

    def worth_training(self, min_idle: int, rank: int) -> bool:
        """Whether ``rank``, which has finished, should train: ``min_idle`` ranks have finished and another has not.

        The rank counts itself as idle even where this roster does not show it yet, which takes a round or two. Where
        it is the only BUSY rank of the roster, the rollout is about to end, and training is not worth it.
        """
        unreported = self.statuses[rank].state == State.BUSY
        return not self.stopping and self.num_busy > unreported and self.num_idle + unreported >= min_idle
