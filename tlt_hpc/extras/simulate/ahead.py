"""Rollouts of a chain of steps with draft-ahead: idle time of a step gives drafts of the next, which shorten that.

Responses of a step are taken to be as long as their stored texts. Shapes as in ``step.py``; ``S`` strategies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.drafting.tail_plan import in_order
from tlt_hpc.extras.simulate.costs import Floats, TokenCosts
from tlt_hpc.extras.simulate.lengths import Ints
from tlt_hpc.extras.simulate.step import Setting
from tlt_hpc.rollout.strategy import STORED

_WIDTHS = np.array([strategy.depth for strategy in STORED])
_LEAD = 4
"""Steps before the first that counts: the first step of all has no stored texts."""


@dataclass(frozen=True)
class PassCosts:
    """The cost of wide passes, and the tokens of rounds without stored texts, by strategy [S], in the costs' order."""

    accept: Floats
    """Tokens of a sequence in a round."""
    verified: Floats
    """Tokens of a sequence in the verifying pass."""
    fixed_seconds: float
    token_seconds: float
    row_seconds: float = 0.0
    overlaps: bool = False
    """Whether the longer of reading weights (``fixed_seconds``) and calculating counts, not their sum."""

    def seconds(self, rows: int, tokens: Floats) -> Floats:
        """Seconds of passes over ``rows`` sequences and so many tokens, of any shape, without reading keys."""
        tokens = self.token_seconds * tokens
        both = np.maximum(self.fixed_seconds, tokens) if self.overlaps else self.fixed_seconds + tokens
        return both + self.row_seconds * rows


@dataclass(frozen=True)
class Ahead:
    """The settings of draft-ahead in a simulation."""

    passes: PassCosts
    chance: float
    """With which a stored token is accepted, if those before it were."""


def ahead_seconds(lengths: Ints, costs: TokenCosts, ahead: Ahead, setting: Setting) -> Floats:
    """Seconds [T] of rollouts of which each drafts from what was generated during the one before.

    Idle ranks do not train the drafter. They generate responses of the next step in the order of a run.
    """
    steps, costs = len(lengths), costs.up_to(setting.max_live)
    seconds, stored = np.zeros(steps), np.zeros(lengths.shape[1:])
    for step in range(-min(_LEAD, steps), steps):
        own, following = lengths[step % steps], lengths[(step + 1) % steps]
        seconds[step % steps], stored = _rollout(own, stored, following, costs, ahead, setting)
    return seconds


def _rollout(
    lengths: Ints, stored: Floats, following: Ints, costs: TokenCosts, ahead: Ahead, setting: Setting
) -> tuple[float, Floats]:
    """Seconds of a rollout, and the stored texts of the next one, in tokens [R, N]."""
    count, number = lengths.shape
    replicas = [_Replica(costs, ahead, setting, *own) for own in zip(lengths, stored, strict=True)]
    for replica in replicas:
        replica.decode()
    ends = np.array([replica.clock for replica in replicas])
    release, texts = float(ends.max()) + setting.stop_seconds, np.zeros((count, number))
    shards = np.arange(count * number).reshape(count, number).tolist()
    for rank, replica in enumerate(replicas):
        busy = set(np.flatnonzero(ends > ends[rank]).tolist())
        order = np.array(in_order(rank, shards, busy))
        replica.decode(release, following.reshape(-1)[order])
        np.maximum.at(texts.reshape(-1), order, replica.grown[number:])
    return release, texts


class _Replica:
    """Decodes its own responses of a step, then others of the next, in spans in which nothing begins or ends."""

    def __init__(self, costs: TokenCosts, ahead: Ahead, setting: Setting, own: Ints, stored: Floats) -> None:
        self._costs, self._ahead, self._setting = costs, ahead, setting
        self._left, self._stored = own.astype(np.float64), stored
        self.grown = np.zeros(len(self._left))
        """Tokens generated so far, of the own responses, then of the others."""
        self.clock = 0.0
        self._live = np.zeros(0, np.int64)
        self._waiting = np.flatnonzero(own > 0)
        self._accept = np.cumsum(ahead.chance ** np.arange(_WIDTHS[-1] + 1))
        """Accept lengths, bonus token included, by number of drafts."""

    def decode(self, until: float = np.inf, more: Ints | None = None) -> None:
        """Decode the own responses, or ``more`` ones, until there are none left or the clock is at ``until``."""
        if more is not None:
            self._waiting = len(self._left) + np.flatnonzero(more > 0)
            self._left = np.append(self._left, more)
            self._stored, self.grown = (np.append(array, np.zeros(len(more))) for array in (self._stored, self.grown))
        while self.clock < until:
            self._admit()
            if not self._live.size:
                return
            self._span(until - self.clock)

    def _admit(self) -> None:
        num_free = self._setting.max_live - len(self._live)
        taken, self._waiting = self._waiting[:num_free], self._waiting[num_free:]
        self._live = np.append(self._live, taken)
        prompt = self._setting.prompt_tokens * self._setting.read_share * self._costs.prompt_token_seconds
        self.clock += len(taken) * prompt

    def _positions(self, rows: Ints) -> float:
        return float(self.grown[rows].sum()) + self._setting.prompt_tokens * len(rows)

    def _span(self, most: float) -> None:
        """Decode until a response or its stored text ends, ``most`` seconds at most."""
        live = self._live
        drafted = self._stored[live] >= 1
        choices = [self._best(live, np.zeros_like(drafted)), *([self._best(live, drafted)] if drafted.any() else [])]
        _, seconds, tokens = max(choices, key=lambda one: one[0])
        tokens = np.minimum(tokens * min(1.0, most / seconds), self._left[live])
        self.clock += min(seconds, most)
        self.grown[live] += tokens
        self._left[live] -= tokens
        self._stored[live] = np.maximum(self._stored[live] - tokens, 0.0)
        self._live = live[self._left[live] > 1e-6]

    def _best(self, live: Ints, drafted: NDArray[np.bool_]) -> tuple[float, float, Floats]:
        """The best round if these rows draft from their stored texts, by strategy of the others and width: tokens per
        second, and until something ends the seconds and the tokens of each row.
        """
        costs, passes = self._costs, self._ahead.passes
        deep, rest = live[drafted], live[~drafted]
        drafts = np.minimum(self._stored[deep][:, None], _WIDTHS).astype(np.int64)  # [rows, widths]
        advance, reach = self._accept[drafts], np.minimum(self._left[deep], self._stored[deep] + 1)
        num_rounds = np.ceil(reach[:, None] / advance - 1e-9).min(0, initial=np.inf)
        verified = (1.0 + drafts).sum(0)
        if rest.size:
            num_rounds = np.minimum(num_rounds, self._left[rest].min() / passes.accept[:, None])
            column, own = len(rest) - 1, passes.verified[:, None] * len(rest)
            token = costs.token_seconds[:, column, None]
            held = self._positions(rest) + num_rounds * len(rest) * passes.accept[:, None] / 2
            seconds = passes.accept[:, None] * (token + costs.position_seconds[:, column, None] * held)
            if deep.size:
                seconds = seconds + passes.seconds(len(live), own + verified) - passes.seconds(len(rest), own)
        else:
            seconds = passes.seconds(len(deep), verified)[None, :]
            num_rounds = num_rounds[None, :]
        if deep.size:
            held = self._positions(deep) + num_rounds * advance.sum(0) / 2
            seconds = seconds + costs.position_seconds[0, len(live) - 1] * held
        gained = advance.sum(0) + len(rest) * (passes.accept[:, None] if rest.size else 0.0)
        rates = gained / seconds
        strategy, width = np.unravel_index(rates.argmax(), rates.shape)
        rounds = float(num_rounds[strategy, width])
        tokens = np.empty(len(live))
        tokens[drafted] = np.minimum(rounds * advance[:, width], self._stored[deep] + 1)
        tokens[~drafted] = rounds * passes.accept[strategy]
        return float(rates[strategy, width]), rounds * float(seconds[strategy, width]), tokens
