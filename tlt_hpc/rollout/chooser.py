"""Chooses how each round is decoded: the strategy with the most expected tokens per expected second.

Expected tokens come from counts of accepted drafts, of all rounds and of those with as many sequences; expected seconds
from ``costs``.
Other strategies are tried now and then, and what such trials may cost is bounded: apart from one first round per
strategy, the seconds lost to them stay below a share of the seconds spent. A choice is a pure function of the seed and
of what was observed, so ranks that observe the same make the same choice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tlt_hpc.rollout.acceptance import WINDOW, FamilyAcceptance, StoredAcceptance
from tlt_hpc.rollout.costs import RoundCosts, batch_bucket
from tlt_hpc.rollout.stored_text import StoredRow
from tlt_hpc.rollout.strategy import OFF, Strategy

EPSILON = 0.05
"""Share of the rounds that may be trials."""
TRIAL_SHARE = 0.02
"""Largest share of the seconds spent that may be lost to trials."""
_REFRESH = 8
"""Rounds after which expected lengths are computed again."""

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
        """Whether a trial that is expected to lose so many seconds fits."""
        return loss <= 0 or self._lost + loss <= self._share * self._spent


# -- choosing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Outlook:
    """What is expected of a round of ``num_live`` sequences, by strategy."""

    num_live: int
    usable: Sequence[int]
    seconds: Sequence[float]
    rates: Sequence[float]
    """Tokens per second."""
    known: Sequence[bool]
    """Whether a rate rests on more than a guess."""

    @property
    def best(self) -> int:
        """The best known strategy."""
        indices = [index for index in self.usable if self.known[index]] or self.usable[:1]
        return max(indices, key=self.rates.__getitem__)


class Chooser:
    """Chooses the best known strategy, or a trial if one may pay and its expected loss fits the budget.

    Accept length hardly depends on the batch and cost hardly on the drafter's quality, so each is learned from all
    rounds that say something about it, and a strategy that never ran is mostly predicted well enough without a trial.
    """

    def __init__(self, strategies: Sequence[Strategy], seed: int = 0, agree: Agree | None = None) -> None:
        """``strategies``, each once, include "off", which the others are compared with; those for stored texts last.

        ``agree``: of ranks that decode the same responses together, which time their rounds apart and choose as the
        first of them does.
        """
        self.strategies = tuple(strategies)
        self._index = {strategy: i for i, strategy in enumerate(self.strategies)}
        self._off = self._index[OFF]
        self._usual = [strategy for strategy in self.strategies if strategy.source != "stored"]
        self._usable: Sequence[int] = range(len(self._usual))
        self._rounds = [0] * len(self.strategies)
        self._random, self._epsilon = random.Random(seed), EPSILON
        self._costs, self._budget, self._agree = RoundCosts(self.strategies), TrialBudget(TRIAL_SHARE), agree
        reach: dict[str, int] = {}
        for strategy in self._usual:
            reach[strategy.family] = max(reach.get(strategy.family, 0), strategy.reach)
        self._families = {family: FamilyAcceptance(longest) for family, longest in reach.items()}
        self._reach_and_family = [(strategy.reach, self._families[strategy.family]) for strategy in self._usual]
        # the last sequences of a rollout are not like the others: long texts repeat themselves
        self._by_batch: dict[tuple[str, int], FamilyAcceptance] = {}
        self._stored = StoredAcceptance()
        self._num_added = 0
        self._lengths: dict[int, list[float]] = {}

    def index_of(self, strategy: Strategy) -> int:
        """Its place among the strategies."""
        return self._index[strategy if strategy.rest is None else replace(strategy, rest=None)]

    def choose(self, num_live: int, usable: Sequence[Strategy], stored: Sequence[StoredRow] = ()) -> Strategy:
        """The strategy for a round of ``num_live`` sequences, among those usable now.

        ``stored``: what the sequences have that have drafts from stored texts, which come last.
        """
        assert num_live > 0
        self._usable = [self._index[strategy] for strategy in usable if strategy.source != "stored"]
        deep = [self._index[strategy] for strategy in usable if strategy.source == "stored"] if stored else []
        index, rest = self._pick_stored(num_live, stored, deep) or (self._pick(num_live), -1)
        if self._agree is not None:
            rest, index = divmod(self._agree((rest + 1) * len(self.strategies) + index), len(self.strategies))
            rest -= 1
        return self.strategies[index] if rest < 0 else replace(self.strategies[index], rest=self.strategies[rest])

    def observe(
        self,
        strategy: Strategy,
        num_live: int,
        num_tokens: int,
        seconds: float,
        accepted: Sequence[int],
        stored: Sequence[StoredRow] = (),
    ) -> None:
        """Learn from a round, one or more rounds after it was chosen if need be.

        ``num_tokens`` were emitted over all its sequences; ``accepted`` are the accepted drafts of each sequence before
        its end cut any off; ``stored`` is as it was chosen with.
        """
        index, seconds = self.index_of(strategy), max(seconds, 1e-9)
        self._rounds[index] += 1
        if strategy.rest is not None:
            num_rest = num_live - len(stored)
            for row, count in zip(stored, accepted[num_rest:], strict=True):
                self._stored.add(row, strategy.depth, count)
            self._budget.add(seconds, 0.0)
            self._costs.add(index, num_live, seconds, (self.index_of(strategy.rest), num_rest))
            self._add_accepted(strategy.rest, num_rest, accepted[:num_rest])
            return
        outlook = self._outlook(num_live)
        saved = 0.0 if index == outlook.best else seconds - num_tokens / outlook.rates[outlook.best]
        self._budget.add(seconds, saved)
        self._costs.add(index, num_live, seconds)
        self._add_accepted(strategy, num_live, accepted)

    def _add_accepted(self, strategy: Strategy, num_live: int, accepted: Sequence[int]) -> None:
        if strategy.reach and num_live:
            for family in (self._families[strategy.family], self._at_batch(strategy.family, batch_bucket(num_live))):
                family.add(strategy.reach, accepted)
            self._num_added += 1
            if self._num_added < WINDOW or self._num_added % _REFRESH == 0:  # they change little in a round
                self._lengths.clear()

    def discount(self, factor: float) -> None:
        """Keep only this share of what is known about the drafter's acceptance: it has been replaced."""
        assert 0 <= factor <= 1
        replaced = {strategy.family for strategy in self.strategies if strategy.has_drafter}
        by_batch = [found for (family, _), found in self._by_batch.items() if family in replaced]
        for found in [*by_batch, *(self._families[family] for family in replaced)]:
            found.discount(factor)
        self._lengths.clear()

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint keeps: counts of accepted drafts. Costs belong to the machine and are learned again."""
        return {name: family.state() for name, family in self._families.items() if name != OFF.family}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue from ``state``; families that do not exist any more are ignored."""
        known = (self._families.keys() & state.keys()) - {OFF.family}
        for family in known:
            self._families[family].load_state(state[family])
        self._lengths.clear()

    def _at_batch(self, family: str, bucket: int) -> FamilyAcceptance:
        if (family, bucket) not in self._by_batch:
            overall = self._families[family]
            self._by_batch[family, bucket] = FamilyAcceptance(overall.reach, overall)
        return self._by_batch[family, bucket]

    def _expected_lengths(self, bucket: int) -> list[float]:
        """Expected accept length of each strategy."""
        if bucket not in self._lengths:
            lengths = {family: self._at_batch(family, bucket).lengths() for family in self._families}
            self._lengths[bucket] = [lengths[strategy.family][strategy.reach] for strategy in self._usual]
        return self._lengths[bucket]

    def _outlook(self, num_live: int) -> _Outlook:
        seconds, lengths = self._costs.seconds(num_live), self._expected_lengths(batch_bucket(num_live))
        rates = [num_live * length / cost for length, cost in zip(lengths, seconds, strict=False)]
        known = [
            not reach or (family.is_known and self._costs.is_known(index))
            for index, (reach, family) in enumerate(self._reach_and_family)
        ]
        return _Outlook(num_live, self._usable, seconds, rates, known)

    def _pick(self, num_live: int) -> int:
        draw = self._random.random()  # needed or not: choosers of one seed stay in step
        outlook = self._outlook(num_live)
        best = outlook.best
        if len(outlook.usable) == 1 or not self._costs.ready:
            return best
        trial = self._trial(outlook, draw)
        if trial is None:
            return best
        # once each, a first trial needs no budget: a short rollout could never save up for it
        if not outlook.known[trial] and not self._rounds[trial]:
            return trial
        loss = outlook.seconds[trial] * (1 - outlook.rates[trial] / outlook.rates[best])
        return trial if self._budget.allows(loss) else best

    def _pick_stored(self, num_live: int, stored: Sequence[StoredRow], deep: Sequence[int]) -> tuple[int, int] | None:
        """The best of these strategies for stored texts, and what goes with it for the other rows; None where all rows
        are better decoded alike.
        """
        if not deep or not self._costs.ready:
            return None
        num_rest, rest, tokens, drafting = num_live - len(stored), self._off, 0.0, 0.0
        if num_rest:
            others = self._outlook(num_rest)
            rest = others.best
            tokens = others.rates[rest] * others.seconds[rest]
            drafting = self._costs.drafting_seconds(rest, num_rest)
        alike = self._outlook(num_live)
        best, found = alike.rates[alike.best], None
        for index in deep:
            most = self.strategies[index].depth
            if most < self.strategies[rest].depth:
                continue
            expected = tokens + sum(self._stored.length(row, most) for row in stored)
            rate = expected / (alike.seconds[index] + drafting)
            if rate > best:
                best, found = rate, (index, rest)
        return found

    def _trial(self, outlook: _Outlook, draw: float) -> int | None:
        """What to try instead of the best: first what was never tried, then, rarely, anything that might be better."""
        best, usable = outlook.best, outlook.usable
        untried = [index for index in usable if not outlook.known[index]]
        if best != self._off and self._off in usable and not self._costs.is_measured(self._off, outlook.num_live):
            untried.append(self._off)  # all others are compared with it, so it is measured at each batch size
        if untried := self._contenders(outlook, untried):
            return max(untried, key=outlook.rates.__getitem__)
        if draw >= self._epsilon:
            return None
        rivals = self._contenders(outlook, [index for index in usable if index != best])
        if not rivals:
            return None
        place, rest = divmod(draw / self._epsilon * len(rivals), 1)
        rival = rivals[int(place)]
        # the worse it was, the rarer; never zero, for the drafter improves and machines change
        least = 0.02 if self.strategies[rival].reach else 0.25
        ratio = outlook.rates[rival] / outlook.rates[best]
        return rival if rest < max(least, min(1.0, ratio) ** 4) else None

    def _contenders(self, outlook: _Outlook, indices: Sequence[int]) -> list[int]:
        """Those that would win if all their drafts were accepted; "off" always may: the machine may have changed."""
        top = outlook.rates[outlook.best]
        return [
            index
            for index in indices
            if (reach := self.strategies[index].reach) == 0
            or (reach + 1) * outlook.num_live > top * outlook.seconds[index]
        ]


class RandomChooser(Chooser):
    """Chooses all usable strategies equally often: for checks that the text does not depend on the strategy."""

    def _pick_stored(self, num_live: int, stored: Sequence[StoredRow], deep: Sequence[int]) -> tuple[int, int] | None:
        rest = self._pick(num_live) if num_live > len(stored) else self._off
        deep = [index for index in deep if self.strategies[index].depth >= self.strategies[rest].depth]
        return (self._random.choice(deep), rest) if deep and self._random.random() < 0.7 else None

    def _pick(self, num_live: int) -> int:
        return self._usable[int(self._random.random() * len(self._usable))]
