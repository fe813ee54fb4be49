"""The choice of each round's strategy: the strategy with the most expected tokens per expected second.

Expected tokens come from ``acceptance``, expected seconds from ``costs``.
Other strategies are tried now and then, and what such trials may cost is bounded: apart from one first round per
strategy, the seconds lost to them stay below a share of the seconds spent. It is larger as long as too little is known
to say that a strategy is worse. A choice is a pure function of the seed and
of what was observed, so ranks that observe the same make the same choice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from tlt_hpc.rollout.acceptance import Acceptance, StoredAcceptance
from tlt_hpc.rollout.costs import RoundCosts
from tlt_hpc.rollout.stored_text import StoredText
from tlt_hpc.rollout.strategy import OFF, STORED_DEPTHS, Strategy

TRIAL_CHANCE = 0.05
"""Chance of a round to be a trial of a strategy that was tried before."""
TRIAL_SHARE = 0.02
"""Largest share of the seconds spent that may be lost to trials."""
_OPEN_CHANCE, _OPEN_SHARE = 0.3, 0.08
"""The same of strategies that may be better than the best one, as far as is known."""
_OPTIMISM, _MAX_SAVING = 1.5, 0.7
"""Standard deviations by which a strategy may be better than expected; the most that they may be for its seconds."""

Agree = Callable[[int], int]
"""Takes the index of the strategy that this rank chose and returns that of its replica's first rank (a broadcast):
ranks that decode together measure different times, and must run the same strategy."""


class TrialBudget:
    """Seconds lost in rounds of other than the best known strategy, held under a share of all seconds; both fade."""

    _KEEP = 1 - 1 / 1024

    def __init__(self, share: float) -> None:
        self._share, self._spent, self._lost = share, 0.0, 0.0

    def add(self, seconds: float, lost: float) -> None:
        """A round's seconds, and how many of them the best known strategy would have saved (negative: it lost)."""
        self._spent = self._spent * self._KEEP + seconds
        self._lost = max(0.0, self._lost * self._KEEP + lost)

    def allows(self, loss: float) -> bool:
        """True if a trial that is expected to lose so many seconds fits."""
        return loss <= 0 or self._lost + loss <= self._share * self._spent


# -- choosing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Outlook:
    """Expected seconds and tokens of a round of ``num_live`` sequences, by strategy."""

    num_live: int
    usable: Sequence[int]
    seconds: Sequence[float]
    rates: Sequence[float]
    """Tokens per second."""
    best_index: int
    """The best of the strategies that have run."""
    open_indices: Sequence[int]
    """Strategies that may be better than the best one."""

    def expected_loss(self, index: int) -> float:
        """Seconds that a round of a strategy is expected to lose against the best one."""
        return self.seconds[index] * (1 - self.rates[index] / self.rates[self.best_index])


class Chooser:
    """Chooses the best known strategy, or a trial if one may pay and its expected loss fits the budget.

    Accept length hardly depends on the batch and cost hardly on the drafter's quality, so each is learned from all
    rounds that say something about it, and a strategy that never ran is mostly predicted well enough without a trial.
    """

    def __init__(self, strategies: Sequence[Strategy], seed: int = 0, agree: Agree | None = None) -> None:
        """``strategies``, each once, include "off", which the others are compared with.

        ``agree``: of ranks that decode the same responses together, which time their rounds apart and choose as the
        first of them does.
        """
        self.strategies = tuple(strategies)
        self._index = {strategy: i for i, strategy in enumerate(self.strategies)}
        self._off = self._index[OFF]
        self._usable: Sequence[int] = range(len(self.strategies))
        self._num_rounds = [0] * len(self.strategies)
        self._has_choice = len(self.strategies) > 1
        """False as long as there is nothing to learn from rounds."""
        self._random, self._trial_chance, self._agree = random.Random(seed), TRIAL_CHANCE, agree
        self._costs = RoundCosts(self.strategies)
        self._budget, self._open_budget = TrialBudget(TRIAL_SHARE), TrialBudget(_OPEN_SHARE)
        self._last_outlook: _Outlook | None = None
        self._stored = StoredAcceptance()
        self.acceptance = Acceptance(self.strategies)
        """Counts of accepted drafts, which a checkpoint keeps; costs belong to the machine and are learned again."""

    def index_of(self, strategy: Strategy) -> int:
        """Index of a strategy."""
        return self._index[strategy]

    def choose(
        self, num_live: int, usable: Sequence[Strategy], stored: Collection[StoredText] = (), max_tokens: int = 0
    ) -> tuple[Strategy, int]:
        """The strategy for a round of ``num_live`` sequences, among those usable now, and most drafts of a stored text.

        ``stored``: the texts that some sequences have; with 0 drafts these are decoded like the others. ``max_tokens``:
        of the pass, if stored texts are used.
        """
        assert num_live > 0 and (max_tokens or not stored)
        self._has_choice |= len(stored) > 0
        self._usable = [self._index[strategy] for strategy in usable]
        found = self._pick_stored(num_live, stored, max_tokens) if stored else None
        index, depth = found or (self._pick(num_live), 0)
        if self._agree is not None:
            depth, index = divmod(self._agree(depth * len(self.strategies) + index), len(self.strategies))
        return self.strategies[index], depth

    def observe(
        self,
        strategy: Strategy,
        num_live: int,
        num_tokens: int,
        seconds: float,
        accepted: Sequence[int],
        is_typical: bool = True,
    ) -> None:
        """Learn from a round, one or more rounds after it was chosen if need be.

        ``num_tokens`` were emitted over all its sequences; ``accepted`` are the accepted drafts of each sequence before
        its end cut any off. ``is_typical``: it took about as long as others of its strategy will.
        """
        if not self._has_choice:
            return
        index, seconds, lost, lost_open = self.index_of(strategy), max(seconds, 1e-9), 0.0, 0.0
        self._num_rounds[index] += is_typical
        outlook = self._last_outlook
        if outlook is None or outlook.num_live != num_live:
            outlook = self._make_outlook(num_live)
        if index != outlook.best_index and self._num_rounds[index] > 1:
            loss = seconds - num_tokens / outlook.rates[outlook.best_index]
            lost, lost_open = (0.0, loss) if index in outlook.open_indices else (loss, 0.0)
        self._budget.add(seconds, lost)
        self._open_budget.add(seconds, lost_open)
        if is_typical:
            self._costs.add_measurement(index, num_live, seconds)
        self.acceptance.add(strategy, num_live, accepted)

    def observe_with_stored(
        self,
        strategy: Strategy,
        seconds: float,
        accepted: Sequence[int],
        stored: Mapping[int, StoredText],
        depth: int,
        is_typical: bool = True,
    ) -> None:
        """``observe`` for a round in which the sequences ``stored`` had at most ``depth`` drafts from stored texts."""
        others = [count for row, count in enumerate(accepted) if row not in stored]
        for row, text in stored.items():
            self._stored.add(text, depth, accepted[row])
        index, lost, is_open = self.index_of(strategy), 0.0, False
        if others and self._costs.is_known(index):
            outlook = self._make_outlook(len(others))
            lost, is_open = outlook.expected_loss(index), index in outlook.open_indices
        self._budget.add(seconds, 0.0 if is_open else lost)
        self._open_budget.add(seconds, lost if is_open else 0.0)
        if is_typical:
            self._num_rounds[index] += 1
            num_tokens = sum(1 + min(text.num_drafts, depth) for text in stored.values())
            self._costs.add_measurement_with_stored(index, len(others), len(stored), num_tokens, max(seconds, 1e-9))
        self.acceptance.add(strategy, len(others), others)

    def _make_outlook(self, num_live: int) -> _Outlook:
        seconds, deviations = self._costs.expected_seconds(num_live), self._costs.relative_deviations(num_live)
        lengths, length_deviations = self.acceptance.accept_lengths(num_live)
        rates = [num_live * length / cost for length, cost in zip(lengths, seconds, strict=True)]
        has_run = [index for index in self._usable if self._costs.is_known(index)]
        best = max(has_run or self._usable[:1], key=rates.__getitem__)
        wanted, open_ones = rates[best] / num_live, list[int]()
        for index in self._usable:
            most = min(1.0 + self.strategies[index].reach, lengths[index] + _OPTIMISM * length_deviations[index])
            least = seconds[index] * math.exp(-min(_MAX_SAVING, _OPTIMISM * deviations[index]))
            if index != best and most > wanted * least:
                open_ones.append(index)
        self._last_outlook = _Outlook(num_live, self._usable, seconds, rates, best, open_ones)
        return self._last_outlook

    def _pick(self, num_live: int) -> int:
        """The best usual strategy, or a trial of another one."""
        draw, place = self._random.random(), self._random.random()  # needed or not: choosers of one seed stay in step
        if len(self._usable) == 1:
            return self._usable[0]
        outlook = self._make_outlook(num_live)
        best, open_ones = outlook.best_index, outlook.open_indices
        if not self._costs.plain_cost_is_known:
            return best
        # once each, a first trial needs no budget: a short rollout could never save up for it
        if first := self._contenders(outlook, [one for one in open_ones if not self._costs.is_known(one)]):
            return max(first, key=outlook.rates.__getitem__)
        if open_ones and draw < _OPEN_CHANCE:
            trial = open_ones[int(place * len(open_ones))]
            if self._open_budget.allows(outlook.expected_loss(trial)):
                return trial
        rare = self._pick_trial_strategy(outlook, draw)
        return rare if rare is not None and self._budget.allows(outlook.expected_loss(rare)) else best

    def _pick_stored(self, num_live: int, stored: Collection[StoredText], max_tokens: int) -> tuple[int, int] | None:
        """The best strategy for the sequences without a stored text, and the number of drafts for the others; None
        where all are better decoded alike.
        """
        if not self._costs.plain_cost_is_known:
            return None
        alike, num_rest, indices = self._make_outlook(num_live), num_live - len(stored), [self._off]
        lengths, best_rate = self.acceptance.accept_lengths(max(1, num_rest))[0], alike.rates[alike.best_index]
        if num_rest:
            trial = self._pick(num_rest)
            indices = [index for index in self._usable if self._costs.is_known(index)]
            if trial != self._make_outlook(num_rest).best_index:
                indices, best_rate = [trial], 0.0
        best = None
        for depth in STORED_DEPTHS:
            num_tokens = sum(1 + min(text.num_drafts, depth) for text in stored)
            gained = sum(self._stored.accept_length(text, depth) for text in stored)
            seconds = self._costs.expected_seconds_with_stored(num_rest, len(stored), num_tokens)
            for index in indices:
                rate = (gained + num_rest * lengths[index]) / seconds[index]
                fits = num_tokens + num_rest * self.strategies[index].widest_pass <= max_tokens
                if fits and rate > best_rate:
                    best, best_rate = (index, depth), rate
        return best

    def _pick_trial_strategy(self, outlook: _Outlook, draw: float) -> int | None:
        """A strategy to try although the best one is better as far as is known: rarely, any that might win."""
        best, usable = outlook.best_index, outlook.usable
        if best != self._off and self._off in usable and not self._costs.is_measured(self._off, outlook.num_live):
            return self._off  # all others are compared with it, so it is measured at each batch size
        rivals = self._contenders(outlook, [index for index in usable if index != best])
        if draw >= self._trial_chance or not rivals:
            return None
        place, left = divmod(draw / self._trial_chance * len(rivals), 1)
        rival = rivals[int(place)]
        # the worse it was, the rarer; never zero, for the drafter improves and machines change
        lowest = 0.02 if self.strategies[rival].reach else 0.25
        ratio = outlook.rates[rival] / outlook.rates[best]
        return rival if left < max(lowest, min(1.0, ratio) ** 4) else None

    def _contenders(self, outlook: _Outlook, indices: Sequence[int]) -> list[int]:
        """Strategies that would win if all their drafts were accepted; "off" always: the machine may have changed."""
        top = outlook.rates[outlook.best_index]

        def may_win(index: int) -> bool:
            reach = self.strategies[index].reach
            return reach == 0 or (reach + 1) * outlook.num_live > top * outlook.seconds[index]

        return [index for index in indices if may_win(index)]


class RandomChooser(Chooser):
    """Chooses all usable strategies equally often: for checks that the text does not depend on the strategy."""

    def _pick_stored(self, num_live: int, stored: Collection[StoredText], max_tokens: int) -> tuple[int, int] | None:
        index, depth = self._pick(num_live) if num_live > len(stored) else self._off, self._random.choice(STORED_DEPTHS)
        num_tokens = len(stored) * (1 + depth) + (num_live - len(stored)) * self.strategies[index].widest_pass
        return (index, depth) if num_tokens <= max_tokens and self._random.random() < 0.7 else None

    def _pick(self, num_live: int) -> int:
        return self._usable[int(self._random.random() * len(self._usable))]
