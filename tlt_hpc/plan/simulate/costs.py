"""Seconds that a replica needs to bring each of its live sequences one token further, by strategy and batch.

Knows not where they come from: a card's figures (``card.py``), a cost profile, or a run's own log (``measured.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """Shapes: ``S`` strategies, the first of them allowed at every batch, which is plain decoding where others are
    named; ``B`` batches 1 to the most sequences live.

    A round of strategy s over b sequences whose contexts hold c positions in all takes
    ``accept x (token_seconds[s, b - 1] + position_seconds[s, b - 1] x c)`` seconds and brings each sequence ``accept``
    tokens further; only the quotient counts here.
    """

    names: tuple[str, ...]
    token_seconds: Floats
    position_seconds: Floats
    prompt_token_seconds: float = 0.0
    """Of reading a prompt, a token."""
    allowed: NDArray[np.bool_] | None = None
    """[S, B]: where a strategy may be chosen; None: everywhere."""

    def __post_init__(self) -> None:
        assert self.token_seconds.shape == self.position_seconds.shape == (len(self.names), self.most_live)

    @property
    def most_live(self) -> int:
        return int(self.token_seconds.shape[1])

    @property
    def plain(self) -> Costs:
        """Without speculation."""
        return replace(
            self,
            names=self.names[:1],
            token_seconds=self.token_seconds[:1],
            position_seconds=self.position_seconds[:1],
            allowed=None,
        )

    def below(self, threshold: int) -> Costs:
        """Speculation only where at most so many sequences are live."""
        allowed = np.ones(self.token_seconds.shape, bool) if self.allowed is None else self.allowed.copy()
        allowed[1:, threshold:] = False
        return replace(self, allowed=allowed)

    def up_to(self, max_live: int) -> Costs:
        """For batches up to ``max_live``; beyond the largest known one, seconds of it times the ratio of batches."""
        have = np.minimum(np.arange(max_live), self.most_live - 1)
        ratio = np.maximum(1.0, np.arange(1, max_live + 1) / self.most_live)
        return replace(
            self,
            token_seconds=self.token_seconds[:, have] * ratio,
            position_seconds=self.position_seconds[:, have],
            allowed=None if self.allowed is None else self.allowed[:, have],
        )

    def best(self, live: NDArray[np.int64], positions: Floats) -> tuple[Floats, NDArray[np.int64]]:
        """The chooser, were it never wrong: seconds a token at each batch and number of positions, and the strategy.

        ``live`` of 0 costs nothing.
        """
        column = np.maximum(live, 1) - 1
        least = self.token_seconds[0][column] + self.position_seconds[0][column] * positions
        chosen = np.zeros(live.shape, np.int64)
        for index in range(1, len(self.names)):
            seconds = self.token_seconds[index][column] + self.position_seconds[index][column] * positions
            is_better = seconds < least
            if self.allowed is not None:
                is_better &= self.allowed[index][column]
            least = np.where(is_better, seconds, least)
            chosen[is_better] = index
        return np.where(live > 0, least, 0.0), chosen


def with_speed_ups(plain: Costs, speed_ups: Mapping[str, Sequence[float] | Floats]) -> Costs:
    """Strategies that are so many times as fast as plain decoding, at each batch."""
    factors = np.array([np.ones(plain.most_live), *speed_ups.values()])
    return replace(
        plain,
        names=(*plain.names, *speed_ups),
        token_seconds=plain.token_seconds[:1] / factors,
        position_seconds=plain.position_seconds[:1] / factors,
    )
