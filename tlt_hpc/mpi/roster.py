"""What a rank tells the others during a rollout, and the decisions that follow from it. Pure: imports no MPI.

All ranks see the same sequence of rosters, so a decision that depends on a roster alone is the same on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class State(IntEnum):
    """The activity of a rank: generating, waiting, or while it waits training the drafter or generating ahead."""

    BUSY = 0
    IDLE = 1
    TRAINING = 2
    AHEAD = 3


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


@dataclass(frozen=True, eq=False)
class Roster:
    """All ranks' statuses in one round of one rollout, in rank order; in round 0 nobody has reported yet.

    A busy rank reads a roster between rounds of decoding and needs few of its numbers, so they stay in one array: to
    make the statuses of 512 ranks takes a millisecond.
    """

    epoch: int
    round: int
    records: NDArray[np.int64]
    """[R, 5], the fields of ``Status``."""

    @classmethod
    def before_first_round(cls, epoch: int, num_ranks: int) -> Roster:
        """The roster of round 0, in which all ``num_ranks`` ranks are assumed to be BUSY."""
        return cls(epoch, 0, np.array([Status(State.BUSY, 0, 0, 0)] * num_ranks, np.int64))

    @property
    def statuses(self) -> list[Status]:
        """The statuses by rank."""
        return [
            Status(State(state), sequences_left, tokens, drafter_steps, bool(stop))
            for state, sequences_left, tokens, drafter_steps, stop in self.records.tolist()
        ]

    @cached_property
    def num_busy(self) -> int:
        """Ranks that still generate."""
        return int(np.count_nonzero(self.records[:, 0] == State.BUSY))

    @cached_property
    def has_stop_vote(self) -> bool:
        """True if any rank votes to stop."""
        return bool(self.records[:, 4].any())

    @property
    def is_over(self) -> bool:
        """True if the rollout ends with this round: no rank is BUSY, or some rank votes to stop."""
        return self.num_busy == 0 or self.has_stop_vote

    def others_still_generate(self, rank: int) -> bool:
        """True if a rank other than ``rank`` still generates, and none votes to stop.

        This roster may still show ``rank`` as BUSY, for a round or two. Where no other rank is, the rollout is about to
        end, and training of an idle one is not worth it.
        """
        unreported = bool(self.records[rank, 0] == State.BUSY)
        return not self.has_stop_vote and self.num_busy > unreported
