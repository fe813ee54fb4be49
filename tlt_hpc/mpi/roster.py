"""Owns what a rank tells the others during a rollout and the decisions read from it; pure, knows no MPI.

Every rank sees the same sequence of rosters, so whatever is a function of a roster alone is decided alike by all.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property


class State(IntEnum):
    """What a rank is doing: generating, waiting for the others, or training the drafter while it waits."""

    BUSY = 0
    IDLE = 1
    TRAINING = 2


@dataclass(frozen=True)
class Status:
    """One rank's part of a roster.

    ``tokens`` counts what the rank has generated in this rollout so far, ``drafter_steps`` its micro-steps in this
    rollout; ``stop`` is its vote to end the rollout early.
    """

    state: State
    sequences_left: int
    tokens: int
    drafter_steps: int
    stop: bool = False


NOT_HEARD_OF = Status(State.BUSY, sequences_left=0, tokens=0, drafter_steps=0)
"""Stands for a rank before the first round: it may be busy for all that the others know."""


@dataclass(frozen=True)
class Roster:
    """All ranks' statuses in one round of one rollout, in rank order; round 0 is before anybody was heard of."""

    epoch: int
    round: int
    statuses: tuple[Status, ...]

    @classmethod
    def before_first_round(cls, epoch: int, num_ranks: int) -> Roster:
        """The roster of round 0, in which all ``num_ranks`` ranks are BUSY."""
        return cls(epoch, 0, (NOT_HEARD_OF,) * num_ranks)

    @cached_property
    def num_busy(self) -> int:
        """Ranks that still generate."""
        return sum(status.state == State.BUSY for status in self.statuses)

    @property
    def num_idle(self) -> int:
        """Ranks that have nothing left to generate, whether they train or wait."""
        return len(self.statuses) - self.num_busy

    @cached_property
    def stopping(self) -> bool:
        """Whether any rank votes to stop."""
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
