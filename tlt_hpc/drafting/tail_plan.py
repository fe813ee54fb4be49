"""Decides what idle ranks do in the next tail: train the drafter, or generate the next step's drafts ahead.

Training comes first as long as it pays: while the accept length of the drafter grows fast enough. All ranks decide
alike, from the metrics of the steps before, which are equal on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression, pvariance, variance
from typing import TypeVar

T = TypeVar("T")

ACCEPT_LENGTH, SEQUENCES = "drafter/own_accept_length", "drafter/own_sequences"
STORED_TOKENS, STORED_ACCEPTED = "ahead/stored_tokens", "ahead/accepted_drafts"

_LEAST_STEPS, _MOST_STEPS = 6, 16
"""Fewest and most steps over which the growth of the accept length is taken."""
_LEAST_GROWTH, _MOST_ERROR = 0.0075, 0.01
"""Growth of the accept length per step from which on training pays: over 20 steps it adds up to 15 %, about what
draft-ahead gains on the shipped job with a long tail. A slope with a larger standard error decides nothing.
"""
_WINDOW = 3
"""Steps over which it is judged whether stored texts are of use; other judgements are over two or four times as many.
"""
_MOST_LOSS = 0.03
"""Share of the accept length that may be lost without training."""
_CERTAIN = 3.0
"""Standard errors from which a loss is taken for one: the steps' texts differ."""
_LEAST_SEQUENCES = 16
_LEAST_SHARE, _PAUSE = 0.25, 8
"""Share of the tokens generated ahead that must be accepted, over a window, and the steps without any if it is less."""
_LEAST_TOKENS = 200


@dataclass(frozen=True)
class IdleWork:
    """The work of idle ranks in one tail, and the reason for it."""

    trains: bool
    ahead: bool
    """They generate responses of the next step."""
    why: str


class TailPlan:
    """Decides from step to step; a run that is resumed begins with training again."""

    def __init__(self, trains: bool, ahead: str) -> None:
        """Begin with training, if there is a drafter to train.

        Args:
            trains: there is a drafter that may be trained.
            ahead: "auto", "on" or "off", as ``speculation.ahead``.
        """
        self._may_train, self._ahead = trains, ahead
        self._may_be_ahead = ahead != "off"
        self._is_training = trains
        self._lengths = list[float]()
        """Accept lengths since idle ranks were last given something else to do."""
        self._use = IdleWork(trains, False, "")
        self._num_unmeasured = self._pause = 0
        self._stored = list[tuple[float, float]]()
        """Tokens that were there for each step, and how many were accepted, since the last pause."""

    def choose_idle_work(self) -> IdleWork:
        """Return the use of the next tail; the same on all ranks."""
        self._use = self._decide_idle_work()
        return self._use

    def _decide_idle_work(self) -> IdleWork:
        if not self._may_be_ahead:
            return IdleWork(self._may_train, False, "always" if self._may_train else "frozen")
        if self._pause:
            self._pause -= 1
            return IdleWork(self._may_train, False, "too few drafts from the tail were accepted")
        if not self._may_train:
            return IdleWork(False, True, "generated ahead: no drafter is trained")
        if self._num_unmeasured > 2 * _WINDOW:
            turn = self._num_unmeasured % 2 == 0
            return IdleWork(turn, not turn, "in turn: the drafter is hardly used")
        return self._choose_by_accept_length()

    def add_step_metrics(self, line: Mapping[str, float]) -> None:
        """Take in a step's metrics, by their names in metrics.jsonl."""
        self._pause_if_drafts_wasted(line.get(STORED_TOKENS, 0.0), line.get(STORED_ACCEPTED, 0.0))
        if line.get(SEQUENCES, 0.0) < _LEAST_SEQUENCES:
            self._num_unmeasured += 1
            return
        self._num_unmeasured = 0
        if self._use.trains == self._is_training:  # not of a pause
            self._lengths.append(line[ACCEPT_LENGTH])

    def _pause_if_drafts_wasted(self, num_tokens: float, num_accepted: float) -> None:
        """Pause where too little of what was generated ahead is of use."""
        self._stored.append((num_tokens, num_accepted))
        tokens, accepted = map(sum, zip(*self._stored[-_WINDOW:], strict=True))
        is_wasted = tokens >= _LEAST_TOKENS and accepted < _LEAST_SHARE * tokens
        if self._ahead == "auto" and is_wasted and len(self._stored) >= _WINDOW:
            self._pause, self._stored = _PAUSE, []

    def _choose_by_accept_length(self) -> IdleWork:
        lengths, num_steps = self._lengths, len(self._lengths)
        if self._is_training and num_steps >= _LEAST_STEPS:
            growth, error = growth_per_step(lengths[-_MOST_STEPS:])
            if growth + error < _LEAST_GROWTH and error < _MOST_ERROR:
                return self._switch_idle_work(
                    f"generated ahead: the accept length changed by {growth:+.1%} a step by training"
                )
        elif not self._is_training and num_steps >= 4 * _WINDOW:
            first, last = lengths[: 2 * _WINDOW], lengths[-2 * _WINDOW :]
            before, now = fmean(first), fmean(last)
            error = math.sqrt((variance(first) + variance(last)) / len(first))
            if before - now > max(_MOST_LOSS * before, _CERTAIN * error):
                return self._switch_idle_work(f"trained: accept length {before:.2f} to {now:.2f} without")
        return self._current_idle_work("trained" if self._is_training else "generated ahead")

    def _switch_idle_work(self, why: str) -> IdleWork:
        self._is_training = not self._is_training
        self._lengths.clear()
        return self._current_idle_work(why)

    def _current_idle_work(self, why: str) -> IdleWork:
        return IdleWork(self._is_training, not self._is_training, why)


def growth_per_step(lengths: Sequence[float]) -> tuple[float, float]:
    """Return the slope of the least-squares line through ``lengths``, and its standard error, over their mean."""
    steps, mean = range(len(lengths)), fmean(lengths)
    slope, start = linear_regression(steps, lengths)
    squares = math.fsum((length - start - slope * step) ** 2 for step, length in zip(steps, lengths, strict=True))
    spread = pvariance(steps) * len(steps)
    return slope / mean, math.sqrt(squares / (len(steps) - 2) / spread) / mean
