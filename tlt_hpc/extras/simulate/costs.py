"""Seconds that a replica needs to advance each of its live sequences by one token, by strategy and batch.

The sources are a GPU's figures (``assumed.py``) and a run's own log (``recorded.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TokenCosts:
    """Costs of ``S`` strategies at ``B`` batches, from 1 to the most live sequences.

    The first strategy is plain decoding; others cost infinite seconds at batches where they may not be chosen. A round
    of strategy s over b sequences whose contexts hold c positions in all takes ``accept x (token_seconds[s, b - 1] +
    position_seconds[s, b - 1] x c)`` seconds and advances each sequence by ``accept`` tokens; only the quotient counts
    here.
    """

    token_seconds: Floats
    position_seconds: Floats
    prompt_token_seconds: float = 0.0
    """Seconds of reading one token of a prompt."""

    @property
    def most_live(self) -> int:
        """The largest batch, in live sequences."""
        return int(self.token_seconds.shape[1])

    @property
    def plain(self) -> TokenCosts:
        """The costs of plain decoding alone."""
        return replace(self, token_seconds=self.token_seconds[:1], position_seconds=self.position_seconds[:1])

    def up_to(self, max_live: int) -> TokenCosts:
        """The costs of batches up to ``max_live``; beyond the known ones, in the ratio of the batch to the largest."""
        have = np.minimum(np.arange(max_live), self.most_live - 1)
        ratio = np.maximum(1.0, np.arange(1, max_live + 1) / self.most_live)
        return replace(
            self, token_seconds=self.token_seconds[:, have] * ratio, position_seconds=self.position_seconds[:, have]
        )

    def best_token_seconds(self, live: NDArray[np.int64], positions: Floats) -> Floats:
        """Seconds per token of the best strategy at these batches and positions, all of one shape; 0 for none live."""
        column = np.maximum(live, 1) - 1
        seconds = (self.token_seconds[:, column] + self.position_seconds[:, column] * positions).min(0)
        return np.where(live > 0, seconds, 0.0)


def with_speed_ups(plain: TokenCosts, speed_ups: Iterable[Sequence[float] | Floats]) -> TokenCosts:
    """Add strategies that are so many times as fast as plain decoding: factors [B] for each, by batch."""
    factors = np.array([np.ones(plain.most_live), *speed_ups])
    return replace(
        plain, token_seconds=plain.token_seconds[:1] / factors, position_seconds=plain.position_seconds[:1] / factors
    )
