"""Owns what a rank tells the others during a rollout and the decisions read from it; pure, knows no MPI.

Every rank sees the same sequence of rosters, so whatever is a function of a roster alone is decided alike by all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class State(IntEnum):
    """What a rank is doing: generating, waiting for the others, or training the drafter while it waits."""

    BUSY = 0
    IDLE = 1
    TRAINING = 2


_BUSY = int(State.BUSY)


class Status(NamedTuple):
    """One rank's part of a roster.

    ``tokens`` counts what the rank has generated in this rollout so far, ``drafter_steps`` its micro-steps in this
    rollout; ``stop`` is its vote to end the rollout early. One is made before every round of decoding.
    """

    state: State
    sequences_left: int
    tokens: int
    drafter_steps: int
    stop: bool = False


NOT_HEARD_OF = Status(State.BUSY, sequences_left=0, tokens=0, drafter_steps=0)
"""Stands for a rank before the first round: it may be busy for all that the others know."""


class Heard:
    """All ranks' statuses as they came, [R, 5] int64 with a status's fields; made into ``Status`` when asked for.

    A rank sees a roster in every round of decoding and asks for few of its statuses: at 512 ranks to make all of them
    would take a millisecond.
    """

    def __init__(self, records: NDArray[np.int64]) -> None:
        self._records = records
        self.num_busy = len(records) - int(np.count_nonzero(records[:, 0] - _BUSY))
        self.stopping = bool(np.count_nonzero(records[:, 4]))

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, rank: int) -> Status:
        state, sequences_left, tokens, drafter_steps, stop = self._records[rank].tolist()
        return Status(State(state), sequences_left, tokens, drafter_steps, bool(stop))

    def __iter__(self) -> Iterator[Status]:
        return (self[rank] for rank in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Heard | tuple) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True)
class Roster:
    """All ranks' statuses in one round of one rollout, in rank order; round 0 is before anybody was heard of."""

    epoch: int
    round: int
    statuses: tuple[Status, ...] | Heard

    @classmethod
    def before_first_round(cls, epoch: int, num_ranks: int) -> Roster:
        """The roster of round 0, in which all ``num_ranks`` ranks are BUSY."""
        return cls(epoch, 0, (NOT_HEARD_OF,) * num_ranks)

    @cached_property
    def num_busy(self) -> int:
        """Ranks that still generate."""
        if isinstance(self.statuses, Heard):
            return self.statuses.num_busy
        return sum(status.state == State.BUSY for status in self.statuses)

    @property
    def num_idle(self) -> int:
        """Ranks that have nothing left to generate, whether they train or wait."""
        return len(self.statuses) - self.num_busy

    @cached_property
    def stopping(self) -> bool:
        """Whether any rank votes to stop."""
        if isinstance(self.statuses, Heard):
            return self.statuses.stopping
        return any(status.stop for status in self.statuses)

    @property
    def over(self) -> bool:
        """Whether the rollout ends with this round: nobody is BUSY, or somebody votes to stop."""
        return self.num_busy == 0 or self.stopping

    def worth_training(self, min_idle: int, rank: int) -> bool:
        """Whether ``rank``, which has finished, should train: ``min_idle`` ranks have, and another goes on.

        It counts itself whether or not the others have heard of it yet: that takes a round or two. Where it alone has
        not been heard of, the rollout is over in all but name.
        """
        unheard = self.statuses[rank].state == State.BUSY
        return not self.stopping and self.num_busy > unheard and self.num_idle + unheard >= min_idle
