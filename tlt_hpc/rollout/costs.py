"""What a decoding round costs in seconds, by strategy and batch size: learned from the rounds of the rollouts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tlt_hpc.rollout.strategy import OFF, Strategy

_OFF_ROUNDS = 3
"""Plain rounds that are measured before any other strategy is tried."""
_RECENT_ROUNDS = 15
_STALE_ROUNDS = 256
"""Rounds after which earlier measurements of a strategy count as one belief: the machine may have changed."""


def guessed_cost(strategy: Strategy) -> float:
    """Cost of a round relative to a plain one: a draft step is 0.15, a further verified token 0.05."""
    steps = strategy.depth if strategy.has_drafter else 0
    return 1.0 + 0.15 * steps + 0.05 * strategy.num_drafts


class _Ratio:
    """Measured over guessed seconds: the median of recent rounds and of what was believed before them.

    The lower of two middle values counts, so one slow round beside the belief changes nothing.
    """

    def __init__(self, belief: float | None) -> None:
        self._belief, self._last_round = () if belief is None else (belief,), 0
        self._values: deque[float] = deque(maxlen=_RECENT_ROUNDS)
        self.estimate = 1.0 if belief is None else belief

    def add(self, value: float, at_round: int) -> None:
        if self._values and at_round - self._last_round > _STALE_ROUNDS:
            self._belief = (self.estimate,)
            self._values.clear()
        self._last_round = at_round
        self._values.append(value)
        values = sorted((*self._belief, *self._values))
        self.estimate = values[(len(values) - 1) // 2]


class RoundCosts:
    """Seconds of a round by strategy and live sequences: a guess, times a ratio learned per power of two of the batch.

    A strategy without a ratio at a batch size takes the one it has at the nearest batch size, changed as another
    strategy's ratio changed between the two. Strategies are given by index.
    """

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        self._off = strategies.index(OFF)
        self._guesses = [guessed_cost(strategy) for strategy in strategies]
        self._ratios: list[dict[int, _Ratio]] = [{} for _ in strategies]
        self._tables: dict[int, list[float]] = {}
        self._num_rounds = self._num_off_rounds = 0

    @property
    def ready(self) -> bool:
        """Whether there is a plain round's cost to compare others with."""
        return self._num_off_rounds >= _OFF_ROUNDS

    def is_known(self, index: int) -> bool:
        """Whether the strategy ran in any round."""
        return bool(self._ratios[index])

    def is_measured(self, index: int, num_live: int) -> bool:
        """Whether it ran in a round of about this many sequences."""
        return _bucket(num_live) in self._ratios[index]

    def seconds(self, num_live: int) -> list[float]:
        """Expected seconds of a round, by strategy."""
        bucket = _bucket(num_live)
        if bucket not in self._tables:
            self._tables[bucket] = [guess * self._ratio(index, bucket) for index, guess in enumerate(self._guesses)]
        return self._tables[bucket]

    def add(self, index: int, num_live: int, seconds: float) -> None:
        """A measured round."""
        self._tables.clear()
        self._num_rounds += 1
        self._num_off_rounds += index == self._off
        bucket, ratios = _bucket(num_live), self._ratios[index]
        if bucket not in ratios:
            believable = ratios or (index != self._off and self._ratios[self._off])
            ratios[bucket] = _Ratio(self._ratio(index, bucket) if believable else None)
        ratios[bucket].add(seconds / self._guesses[index], self._num_rounds)

    def _ratio(self, index: int, bucket: int) -> float:
        ratios = self._ratios[index]
        if bucket in ratios:
            return ratios[bucket].estimate
        if not ratios:
            return 1.0 if index == self._off else self._ratio(self._off, bucket)
        near = min(ratios, key=lambda other: abs(other - bucket))
        return ratios[near].estimate * self._change(near, bucket)

    def _change(self, near: int, bucket: int) -> float:
        """How ratios changed from one batch size to another, by a strategy that was measured at both."""
        for ratios in self._ratios:
            if near in ratios and bucket in ratios:
                return ratios[bucket].estimate / ratios[near].estimate
        return 1.0


def _bucket(num_live: int) -> int:
    return (num_live - 1).bit_length()
