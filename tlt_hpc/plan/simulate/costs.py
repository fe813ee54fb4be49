"""Seconds that a replica needs to advance each of its live sequences by one token, by strategy and batch.

The sources are a GPU's figures (``assumed.py``) and a run's own log (``recorded.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TokenCosts:
    """Costs of ``S`` strategies at ``B`` batches, from 1 to the most live sequences.

    The first strategy is allowed at every batch; it is plain decoding if there are others. A round of strategy s over b
    sequences whose contexts hold c positions in all takes ``accept x (token_seconds[s, b - 1] + position_seconds[s, b -
    1] x c)`` seconds and advances each sequence by ``accept`` tokens; only the quotient counts here.
    """

    names: tuple[str, ...]
    token_seconds: Floats
    position_seconds: Floats
    prompt_token_seconds: float = 0.0
    """Seconds of reading one token of a prompt."""
    allowed: NDArray[np.bool_] | None = None
    """[S, B]: the batches at which a strategy may be chosen; None: all."""

    def __post_init__(self) -> None:
        assert self.token_seconds.shape == self.position_seconds.shape == (len(self.names), self.most_live)

    @property
    def most_live(self) -> int:
        return int(self.token_seconds.shape[1])

    @property
    def plain(self) -> TokenCosts:
        """Without speculation."""
        return replace(
            self,
            names=self.names[:1],
            token_seconds=self.token_seconds[:1],
            position_seconds=self.position_seconds[:1],
            allowed=None,
        )

    def below(self, threshold: int) -> TokenCosts:
        """Speculation only while at most ``threshold`` sequences are live."""
        allowed = np.ones(self.token_seconds.shape, bool) if self.allowed is None else self.allowed.copy()
        allowed[1:, threshold:] = False
        return replace(self, allowed=allowed)

    def up_to(self, max_live: int) -> TokenCosts:
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
        """A chooser that is never wrong: seconds per token at each batch and number of positions, and the strategy.

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


def with_speed_ups(plain: TokenCosts, speed_ups: Mapping[str, Sequence[float] | Floats]) -> TokenCosts:
    """Adds strategies by how many times as fast as plain decoding they are, at each batch."""
    factors = np.array([np.ones(plain.most_live), *speed_ups.values()])
    return replace(
        plain,
        names=(*plain.names, *speed_ups),
        token_seconds=plain.token_seconds[:1] / factors,
        position_seconds=plain.position_seconds[:1] / factors,
    )


def expected(chance: float, depth: int) -> float:
    """Tokens of a round in which each draft is accepted with this chance, given those before it."""
    return float(sum(chance**i for i in range(depth + 1)))


def chance_of(accept: float, depth: int) -> float:
    """The chance with which a round of this depth gives ``accept`` tokens: the inverse of ``expected``."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle, depth) < accept else (low, middle)
    return (low + high) / 2
