"""What a decoding round costs in seconds, by strategy and batch size: learned from the rounds of the rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from tlt_hpc.rollout.strategy import OFF, Strategy

_OFF_ROUNDS = 3
"""Plain rounds that are measured before any other strategy is tried."""
_SHARES = (0.55, 0.1, 0.35, 0.15, 0.05)
"""Seconds of the terms before any round was measured, at one sequence; a plain round of one sequence takes one."""
_NOISE = 0.15
"""Standard deviation of a round's seconds, relative to what was expected."""
_DRIFT = 1 / 2000
"""Share of its first variance by which a coefficient becomes less certain with each round."""
_ALL_FITTED, _FIT_EVERY = 256, 4
"""After so many rounds, only every fourth one is fitted: the filter takes 20 microseconds of the host."""
_FACTOR, _FIRST_FACTOR = 1.6, 4.0
"""A round counts as at most so many times as long, or as short, as expected: the machine may have done something else
meanwhile. The second is for a strategy that has not run at this batch size.
"""
_PRIOR_ROUNDS = 4.0
_MAX_ROUNDS = 64
_HALF_LIFE = 512
"""Rounds after which a correction that is not measured any more counts half."""


@dataclass
class _Correction:
    """The mean logarithm of measured seconds over those of the model, and how many rounds it rests on."""

    mean: float = 0.0
    num_rounds: float = 0.0
    last_round: int = 0

    def rounds_at(self, now: int) -> float:
        return self.num_rounds * math.exp2((self.last_round - now) / _HALF_LIFE)

    def factor(self, now: int) -> float:
        rounds = self.rounds_at(now)
        return math.exp(self.mean * rounds / (rounds + _PRIOR_ROUNDS))

    def add(self, value: float, now: int) -> None:
        rounds = min(_MAX_ROUNDS, self.rounds_at(now) + 1)
        self.mean += (value - self.mean) / rounds
        self.num_rounds, self.last_round = rounds, now


class RoundCosts:
    """Seconds of a round: a linear model of all rounds, times a correction by strategy and batch size (power of two).

    The model adds the costs of the round, its sequences, verified tokens, draft steps and drafted tokens. Every round
    tells of these five coefficients, so strategies are predicted well at batch sizes at which they never ran. A Kalman
    filter estimates them. A correction is for what is not linear; it fades where it is not measured. Strategies are
    given by index.
    """

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        self._off = strategies.index(OFF)
        self._shapes = [_shape(strategy) for strategy in strategies]
        self._coefficients, self._scale = list(_SHARES), math.inf
        self._covariance: list[list[float]] = []
        self._first_variances: list[float] = []
        self._corrections: list[dict[int, _Correction]] = [{} for _ in strategies]
        self._tables: dict[int, list[float]] = {}
        self._num_rounds = self._num_off_rounds = 0

    @property
    def ready(self) -> bool:
        """Whether there is a plain round's cost to compare others with."""
        return self._num_off_rounds >= _OFF_ROUNDS

    def is_known(self, index: int) -> bool:
        """Whether the strategy ran in any round."""
        return bool(self._corrections[index])

    def is_measured(self, index: int, num_live: int) -> bool:
        """Whether it ran in a round of about this many sequences."""
        return batch_bucket(num_live) in self._corrections[index]

    def seconds(self, num_live: int) -> list[float]:
        """Expected seconds of a round, by strategy."""
        if num_live not in self._tables:
            bucket, now = batch_bucket(num_live), self._num_rounds
            self._tables[num_live] = [
                seconds * (known[bucket].factor(now) if bucket in known else 1.0)
                for seconds, known in zip(self._modelled(self._shapes, num_live), self._corrections, strict=True)
            ]
        return self._tables[num_live]

    def drafting_seconds(self, index: int, num_live: int) -> float:
        """The part of a round that drafts."""
        _, steps, drafted = self._shapes[index]
        *_, each_step, each_drafted = self._coefficients
        return max(0.0, each_step * steps + num_live * each_drafted * drafted)

    def add(self, index: int, num_live: int, seconds: float, rest: tuple[int, int] | None = None) -> None:
        """A measured round; ``rest``: the strategy with which so many of its sequences were drafted for."""
        shape = self._shapes[index]
        verified, steps, drafted = shape
        if rest is not None:
            # what the drafting of the others cost is taken as expected, and the remainder is the round's own
            seconds = max(seconds - self.drafting_seconds(*rest), 0.1 * seconds)
        terms = 1.0, float(num_live), float(num_live * verified), float(steps), float(num_live * drafted)
        if not self.ready:
            self._start(terms, seconds)
        expected = self.seconds(num_live)[index]
        factor = _FACTOR if self.is_measured(index, num_live) else _FIRST_FACTOR
        seconds = min(max(seconds, expected / factor), expected * factor)
        self._tables.clear()
        self._num_rounds += 1
        self._num_off_rounds += index == self._off
        if self._num_rounds < _ALL_FITTED or self._num_rounds % _FIT_EVERY == 0:
            self._fit(terms, seconds, expected)
        correction = self._corrections[index].setdefault(batch_bucket(num_live), _Correction())
        correction.add(math.log(seconds / self._modelled([shape], num_live)[0]), self._num_rounds)

    def _start(self, terms: Sequence[float], seconds: float) -> None:
        """Scale the coefficients to the fastest of the first rounds; each may be off by as much as it is."""
        num_live = terms[1]
        shares = [_SHARES[0], _SHARES[1] / num_live, _SHARES[2] / num_live, _SHARES[3], _SHARES[4] / num_live]
        self._scale = min(self._scale, seconds / sum(map(mul, shares, terms)))
        self._tables.clear()
        self._coefficients = [self._scale * share for share in shares]
        self._first_variances = [value * value for value in self._coefficients]
        self._covariance = [
            [variance if i == j else 0.0 for j in range(len(shares))]
            for i, variance in enumerate(self._first_variances)
        ]

    def _fit(self, terms: Sequence[float], seconds: float, expected: float) -> None:
        """A step of the Kalman filter: coefficients that drift, and a measurement with relative noise."""
        covariance = self._covariance
        for i, first in enumerate(self._first_variances):
            if covariance[i][i] < first:
                covariance[i][i] += _DRIFT * first
        spread = [sum(map(mul, row, terms)) for row in covariance]
        variance = (_NOISE * expected) ** 2 + sum(map(mul, spread, terms))
        gain = (seconds - sum(map(mul, self._coefficients, terms))) / variance
        self._coefficients = [c + gain * s for c, s in zip(self._coefficients, spread, strict=True)]
        self._covariance = [
            [value - s * t / variance for value, t in zip(row, spread, strict=True)]
            for row, s in zip(covariance, spread, strict=True)
        ]

    def _modelled(self, shapes: Sequence[tuple[int, int, int]], num_live: int) -> list[float]:
        each_round, each_row, each_verified, each_step, each_drafted = self._coefficients
        base, token = each_round + num_live * each_row, num_live * each_verified
        # no round is much cheaper than a plain one, whatever the coefficients say while they are hardly known
        least = max(0.5 * (base + token), 0.1 * self._scale if self._covariance else 0.0)
        return [
            max(least, base + token * verified + each_step * steps + num_live * each_drafted * drafted)
            for verified, steps, drafted in shapes
        ]


def _shape(strategy: Strategy) -> tuple[int, int, int]:
    """Of one sequence: tokens that are verified, draft steps, tokens that are drafted."""
    if not strategy.has_drafter:
        return strategy.widest_pass, 0, 0
    return strategy.widest_pass, strategy.depth, 1 + (strategy.depth - 1) * strategy.branching


def batch_bucket(num_live: int) -> int:
    """The power of two that a batch size is rounded up to, as its exponent."""
    return (num_live - 1).bit_length()
