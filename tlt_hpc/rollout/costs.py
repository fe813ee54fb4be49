"""Seconds of a decoding round by strategy and batch size, learned from the rounds of the rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
_UNMEASURED, _ROUNDS_ELSEWHERE = 0.5, 3.0
"""Relative deviation of a strategy's seconds before its first round, beside that of the model; and the number of rounds
that those of all batch sizes count as, at most.
"""
_MAX_ROUNDS = 64
_HALF_LIFE = 512
"""Rounds after which a correction that is not measured any more counts half."""


@dataclass
class _Correction:
    """The mean logarithm of measured seconds over those of the model, and how many rounds it rests on."""

    mean: float = 0.0
    num_rounds: float = 0.0
    last_round: int = 0

    def faded_num_rounds(self, now: int) -> float:
        return self.num_rounds * math.exp2((self.last_round - now) / _HALF_LIFE)

    def cost_factor(self, now: int) -> float:
        rounds = self.faded_num_rounds(now)
        return math.exp(self.mean * rounds / (rounds + _PRIOR_ROUNDS))

    def add(self, value: float, now: int) -> None:
        rounds = min(_MAX_ROUNDS, self.faded_num_rounds(now) + 1)
        is_second = 1 < rounds <= 2  # a machine makes rounds slower, not faster: the first may have been such a one
        self.mean = min(self.mean, value) if is_second else self.mean + (value - self.mean) / rounds
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
        self._shapes = np.array([_strategy_cost_terms(strategy) for strategy in strategies], float)
        """Factors [S, 5] of the coefficients in a round of one sequence."""
        self._coefficients, self._scale = np.array(_SHARES), math.inf
        self._covariance = self._first_covariance = np.zeros((len(_SHARES), len(_SHARES)))
        self._corrections: list[dict[int, _Correction]] = [{} for _ in strategies]
        self._tables: dict[int, list[float]] = {}
        self._deviations: dict[int, tuple[int, list[float]]] = {}
        self._have_run, self._doubted = set[int](), set[int]()
        self._num_rounds = self._num_off_rounds = 0

    @property
    def plain_cost_is_known(self) -> bool:
        """True if the cost of plain rounds, with which others are compared, is known."""
        return self._num_off_rounds >= _OFF_ROUNDS

    def is_measured(self, index: int, num_live: int) -> bool:
        """True if the strategy ran in a round of about this many sequences."""
        return batch_bucket(num_live) in self._corrections[index]

    def expected_seconds(self, num_live: int) -> list[float]:
        """Expected seconds of a round, by strategy."""
        if num_live not in self._tables:
            bucket, now = batch_bucket(num_live), self._num_rounds
            self._tables[num_live] = [
                seconds * (known[bucket].cost_factor(now) if bucket in known else 1.0)
                for seconds, known in zip(self._modelled_seconds(num_live), self._corrections, strict=True)
            ]
        return self._tables[num_live]

    def is_known(self, index: int) -> bool:
        """True if the strategy ran in any round, or in two if the first took much longer than expected."""
        return index in self._have_run and index not in self._doubted

    def relative_deviations(self, num_live: int) -> list[float]:
        """Standard deviations of ``expected_seconds``, as shares of them; computed again every few rounds.

        Of the model, and of the first rounds, any of which may have been slow for another reason. Both fall with the
        number of rounds, most of all at this batch size.
        """
        now, bucket = self._num_rounds, batch_bucket(num_live)
        computed_at, found = self._deviations.get(num_live, (-_FIT_EVERY, list[float]()))
        if now - computed_at >= _FIT_EVERY or now < _ALL_FITTED // 4:
            terms = self._cost_terms(num_live)
            spread = np.sqrt(np.maximum(0.0, np.einsum("si,ij,sj->s", terms, self._covariance, terms))).tolist()
            found = []
            for known, width, seconds in zip(self._corrections, spread, self._modelled_seconds(num_live), strict=True):
                rounds = min(_ROUNDS_ELSEWHERE, sum(one.num_rounds for one in known.values()))
                rounds += known[bucket].faded_num_rounds(now) if bucket in known else 0.0
                found.append((width / seconds + _UNMEASURED) / (1.0 + rounds))
            for index in self._doubted:
                found[index] = 1.0
            self._deviations[num_live] = now, found
        return found

    def expected_seconds_with_stored(self, num_rest: int, num_stored: int, num_tokens: int) -> list[float]:
        """Expected seconds, by strategy of ``num_rest`` sequences, of a round in which ``num_stored`` further ones have
        ``num_tokens`` tokens from stored texts.
        """
        bucket, now = batch_bucket(num_rest + num_stored), self._num_rounds
        modelled = self._modelled_seconds(num_rest, num_stored, num_tokens)
        return [
            seconds * (known[bucket].cost_factor(now) if bucket in known else 1.0)
            for seconds, known in zip(modelled, self._corrections, strict=True)
        ]

    def add_measurement_with_stored(
        self, index: int, num_rest: int, num_stored: int, num_tokens: int, seconds: float
    ) -> None:
        """A measured round of ``expected_seconds_with_stored``; it tells of the coefficients alone."""
        expected = self._modelled_seconds(num_rest, num_stored, num_tokens)[index]
        seconds = min(max(seconds, expected / _FACTOR), expected * _FACTOR)
        self._tables.clear()
        self._num_rounds += 1
        self._update_kalman_filter(self._cost_terms(num_rest, num_stored, num_tokens)[index], seconds, expected)
        self._have_run.add(index)

    def add_measurement(self, index: int, num_live: int, seconds: float) -> None:
        """A measured round."""
        terms = self._cost_terms(num_live)[index]
        if not self.plain_cost_is_known:
            self._scale_first_coefficients(terms, seconds)
        expected = self.expected_seconds(num_live)[index]
        is_first = index in self._doubted or not self.is_measured(index, num_live)
        factor = _FIRST_FACTOR if is_first else _FACTOR
        was_run = index in self._have_run
        self._have_run.add(index)
        self._doubted -= {index}
        if not was_run and self.plain_cost_is_known and seconds > _FACTOR * expected:
            self._doubted.add(index)
        seconds = min(max(seconds, expected / factor), expected * factor)
        self._tables.clear()
        self._num_rounds += 1
        self._num_off_rounds += index == self._off
        if self._num_rounds < _ALL_FITTED or self._num_rounds % _FIT_EVERY == 0:
            self._update_kalman_filter(terms, seconds, expected)
        correction = self._corrections[index].setdefault(batch_bucket(num_live), _Correction())
        correction.add(math.log(seconds / self._modelled_seconds(num_live)[index]), self._num_rounds)

    def _cost_terms(self, num_live: int, num_stored: int = 0, num_tokens: int = 0) -> NDArray[np.float64]:
        """Factors [S, 5] of the coefficients in a round of so many sequences, and further ones with stored texts."""
        terms = self._shapes * (1, num_live, num_live, num_live > 0, num_live)
        return terms + np.array((0, num_stored, num_tokens, 0, 0)) if num_stored else terms

    def _scale_first_coefficients(self, terms: NDArray[np.float64], seconds: float) -> None:
        """Scale the coefficients to the fastest of the first rounds; each may be off by as much as it is."""
        num_live = terms[1]
        shares = _SHARES / np.array((1, num_live, num_live, 1, num_live))
        self._scale = min(self._scale, seconds / float(shares @ terms))
        self._tables.clear()
        self._coefficients = self._scale * shares
        self._covariance = self._first_covariance = np.diag(self._coefficients**2)

    def _update_kalman_filter(self, terms: NDArray[np.float64], seconds: float, expected: float) -> None:
        """A step of the Kalman filter: coefficients that drift, and a measurement with relative noise."""
        first = self._first_covariance
        covariance = self._covariance + np.where(self._covariance < first, _DRIFT * first, 0.0)
        spread = covariance @ terms
        variance = (_NOISE * expected) ** 2 + spread @ terms
        self._coefficients = self._coefficients + (seconds - self._coefficients @ terms) / variance * spread
        self._covariance = covariance - np.outer(spread, spread) / variance

    def _modelled_seconds(self, num_live: int, num_stored: int = 0, num_tokens: int = 0) -> list[float]:
        coefficients = self._coefficients
        seconds = self._cost_terms(num_live, num_stored, num_tokens) @ coefficients
        plain = coefficients[0] + (num_live + num_stored) * (coefficients[1] + coefficients[2])
        # no round is much cheaper than a plain one, whatever the coefficients say while they are hardly known
        lowest = max(0.5 * plain, 0.1 * self._scale if self._covariance.any() else 0.0)
        found: list[float] = np.maximum(seconds, lowest).tolist()
        return found


def _strategy_cost_terms(strategy: Strategy) -> tuple[int, int, int, int, int]:
    """One for the round and the sequence, then verified tokens, draft steps and drafted tokens of one sequence."""
    if not strategy.has_drafter:
        return 1, 1, strategy.widest_pass, 0, 0
    return 1, 1, strategy.widest_pass, strategy.depth, 1 + (strategy.depth - 1) * strategy.branching


def batch_bucket(num_live: int) -> int:
    """The power of two that a batch size is rounded up to, as its exponent."""
    return (num_live - 1).bit_length()
