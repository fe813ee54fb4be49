"""Chooses how each round is decoded, from what earlier rounds gave. Knows neither model nor drafter.

Two choosers behind one protocol. ``GoodputChooser`` divides expected tokens (counts of accepted drafts, learned
whatever the batch) by expected seconds (a cost profile, corrected by what rounds of this batch size took).
``BanditChooser`` is BEG-MAB (arXiv 2511.16665): medians of tokens per second by bucket of batch sizes. Both bound what
trials may cost: but for one cheap first round each, the seconds lost to them stay under a share of the seconds spent.
A choice is a pure function of the seed and of what was observed, so ranks that are fed the same observations agree.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

from tlt_hpc.rollout.decisions import Chooser, RandomChooser, Recorder
from tlt_hpc.rollout.estimates import Acceptance, CostPrior, Costs, TrialBudget
from tlt_hpc.rollout.strategy import OFF, Strategy

_FREE_CATCH_UP = 4.0
"""Rounds of a strategy that its drafter may need to read what it missed, for a first trial without budget."""

ChooserKind = Literal["goodput", "bandit", "random"]


def make_chooser(
    kind: ChooserKind,
    strategies: Sequence[Strategy],
    *,
    epsilon: float,
    window: int,
    seed: int,
    costs: CostPrior | None = None,
    trial_share: float = 0.02,
) -> Chooser:
    """The chooser that a setting names; "random" tries everything alike, for tests of exactness.

    ``epsilon``: share of the rounds that may be trials; ``window``: rounds that acceptance is remembered for;
    ``trial_share``: most of the seconds spent that may be lost to trials; ``costs``: None where nothing was measured.

    Raises:
        ValueError: strategies among which there is nothing to choose.
    """
    if kind == "random":
        return RandomChooser(strategies, seed)
    if kind == "bandit":
        return BanditChooser(strategies, epsilon, window, seed, costs=costs, trial_share=trial_share)
    return GoodputChooser(strategies, epsilon, window, seed, costs=costs, trial_share=trial_share)


class _Learner(Recorder):
    """The best known way, or a trial where one may pay and its expected loss fits the budget."""

    def __init__(
        self,
        strategies: Sequence[Strategy],
        epsilon: float,
        window: int,
        seed: int,
        costs: CostPrior | None = None,
        trial_share: float = 0.02,
    ) -> None:
        super().__init__(strategies)
        if len(self.strategies) > 1 and OFF not in self.strategies:
            raise ValueError(f"strategies {self._names}: add 'off', which every choice is measured against")
        self._epsilon = epsilon
        self._random = random.Random(seed)
        self._costs = Costs(self.strategies, costs)
        self._acceptance = Acceptance(self.strategies, window)
        self._budget = TrialBudget(trial_share)
        self._off = self._index.get(OFF, -1)
        self._usable = self.strategies
        self._usable_index = list(range(len(self.strategies)))

    def rate(self, num_live: int, strategy: Strategy) -> float:
        """Expected tokens per second of a round."""
        return self._rates(num_live)[self._index[strategy]]

    def _rates(self, num_live: int) -> list[float]:
        """Expected tokens per second of a round, by strategy."""
        raise NotImplementedError

    def _known(self, num_live: int) -> list[bool]:
        """Whether those rest on more than a guess; "off" always does."""
        raise NotImplementedError

    def _appeal(self, index: int, ratio: float) -> float:
        """The chance that epsilon's choice of a strategy, of this rate over the best, is carried out."""
        raise NotImplementedError

    def _predicted_rates(self, num_live: int) -> list[float]:
        seconds, lengths = self._costs.seconds(num_live), self._acceptance.lengths
        return [num_live * length / cost for length, cost in zip(lengths, seconds, strict=True)]

    def _pick(self, num_live: int, usable: Sequence[Strategy], backlog: int) -> Strategy:
        draw = self._random.random()  # one a round, needed or not: choosers of one seed stay in step
        if (now := tuple(usable)) != self._usable:
            self._usable, self._usable_index = now, [self._index[strategy] for strategy in now]
        rates, known = self._rates(num_live), self._known(num_live)
        best = self._best(rates, known)
        if len(now) == 1 or not self._costs.ready:
            return self.strategies[best]
        trial = self._trial(num_live, best, rates, known, draw)
        if trial is not None and not known[trial] and self._is_free(num_live, trial, backlog):
            return self.strategies[trial]
        if trial is None or not self._budget.allows(self._expected_loss(num_live, trial, best, rates, backlog)):
            return self.strategies[best]
        return self.strategies[trial]

    def _is_free(self, num_live: int, trial: int, backlog: int) -> bool:
        """Whether a first trial needs no budget: once each, and cheap. A short rollout could never save up for it."""
        if self._rounds[trial]:
            return False
        seconds = self._costs.seconds(num_live)[trial]
        return self._costs.catch_up_seconds(trial, backlog) <= _FREE_CATCH_UP * seconds

    def _best(self, rates: list[float], known: list[bool]) -> int:
        indices = [index for index in self._usable_index if known[index]] or self._usable_index[:1]
        return max(indices, key=rates.__getitem__)

    def _trial(self, num_live: int, best: int, rates: list[float], known: list[bool], draw: float) -> int | None:
        """What to try instead of the best: first what was never tried, then, rarely, anything that might do."""
        untried = [index for index in self._usable_index if not known[index]]
        if best != self._off and self._off in self._usable_index and not self._costs.measured(self._off, num_live):
            untried.append(self._off)  # what all else is held against is measured at each batch size, profile or not
        if not untried and draw >= self._epsilon:
            return None
        if untried := self._contenders(num_live, untried, rates[best]):
            return max(untried, key=rates.__getitem__)
        rivals = self._contenders(num_live, [i for i in self._usable_index if i != best], rates[best])
        if not rivals or draw >= self._epsilon:
            return None
        place, rest = divmod(draw / self._epsilon * len(rivals), 1)
        rival = rivals[int(place)]
        return rival if rest < self._appeal(rival, rates[rival] / rates[best]) else None

    def _contenders(self, num_live: int, indices: list[int], top: float) -> list[int]:
        """Those that would win if all their drafts stood; "off" always may: the machine may have changed."""
        seconds = self._costs.seconds(num_live)
        return [
            index
            for index in indices
            if (reach := self.strategies[index].reach) == 0 or (reach + 1) * num_live > top * seconds[index]
        ]

    def _expected_loss(self, num_live: int, trial: int, best: int, rates: list[float], backlog: int) -> float:
        """Seconds of the trial beyond what the best would take for as many tokens."""
        seconds = self._costs.seconds(num_live)[trial]
        return seconds + self._costs.catch_up_seconds(trial, backlog) - seconds * rates[trial] / rates[best]

    def _learn(
        self, index: int, num_live: int, num_tokens: int, seconds: float, accepted: Sequence[int] | None
    ) -> None:
        rates = self._rates(num_live)
        best = self._best(rates, self._known(num_live))
        self._budget.add(seconds, 0.0 if index == best else seconds - num_tokens / rates[best])
        self._costs.add(index, num_live, seconds)


class GoodputChooser(_Learner):
    """Expected tokens, learned over all batch sizes, over expected seconds at this one.

    Accept length hardly depends on the batch and cost hardly on the drafter's quality, so each is learned from all
    the rounds that tell of it, and a strategy that never ran is mostly predicted well enough not to need a trial.

    Raises:
        ValueError: several strategies without "off", or the same one twice.
    """

    def discount(self, factor: float) -> None:
        super().discount(factor)
        self._acceptance.discount(factor)

    def state(self) -> dict[str, list[float]]:
        return self._acceptance.state()

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        self._acceptance.load_state(state)

    def _rates(self, num_live: int) -> list[float]:
        return self._predicted_rates(num_live)

    def _known(self, num_live: int) -> list[bool]:
        if all(self._costs.known):
            return self._acceptance.known
        both = zip(self.strategies, self._acceptance.known, self._costs.known, strict=True)
        return [strategy.source == "off" or (accept and cost) for strategy, accept, cost in both]

    def _appeal(self, index: int, ratio: float) -> float:
        # the worse it was, the rarer; never never, for the drafter improves and machines change
        return max(0.02 if self.strategies[index].reach else 0.25, min(1.0, ratio) ** 4)

    def _learn(
        self, index: int, num_live: int, num_tokens: int, seconds: float, accepted: Sequence[int] | None
    ) -> None:
        super()._learn(index, num_live, num_tokens, seconds, accepted)
        self._acceptance.add(index, num_live, num_tokens, accepted)


class _Rewards:
    """The last rewards of one strategy in one bucket, in order of time and of size."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._latest)

    @property
    def median(self) -> float:
        half = len(self._sorted) // 2
        return (self._sorted[half] + self._sorted[~half]) / 2

    def add(self, reward: float) -> None:
        self._latest.append(reward)
        insort(self._sorted, reward)
        self.keep(self._window)

    def keep(self, count: int) -> None:
        """Forget all but the latest ``count``."""
        while len(self._latest) > count:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]


class BanditChooser(_Learner):
    """BEG-MAB: in each bucket of batch sizes the best median of the last ``window`` rewards, explored by epsilon.

    A reward is a round's tokens over its seconds. Source: arXiv 2511.16665, the adaptive rollout engine; the bound on
    trials is ours. Keeps nothing in checkpoints: its rewards belong to the machine.

    Raises:
        ValueError: speculation without "off" beside it, or the same strategy twice.
    """

    def __init__(
        self,
        strategies: Sequence[Strategy],
        epsilon: float,
        window: int,
        seed: int,
        costs: CostPrior | None = None,
        trial_share: float = 0.02,
        thresholds: Sequence[int] = (1, 2, 5, 21),
    ) -> None:
        super().__init__(strategies, epsilon, window, seed, costs, trial_share)
        if self.strategies != (OFF,) and len(self.strategies) < 2:
            raise ValueError(f"strategies {self._names}: a bandit needs at least two, 'off' among them")
        self._thresholds = tuple(sorted(thresholds))
        buckets = range(len(self._thresholds) + 1)
        self._rewards = [[_Rewards(window) for _ in self.strategies] for _ in buckets]

    def discount(self, factor: float) -> None:
        super().discount(factor)
        for bucket in self._rewards:
            for strategy, rewards in zip(self.strategies, bucket, strict=True):
                if strategy.has_drafter:
                    rewards.keep(int(len(rewards) * factor))

    def _rates(self, num_live: int) -> list[float]:
        rewards = self._bucket(num_live)
        if all(rewards):
            return [reward.median for reward in rewards]
        predicted = self._predicted_rates(num_live)
        return [reward.median if reward else guess for reward, guess in zip(rewards, predicted, strict=True)]

    def _known(self, num_live: int) -> list[bool]:
        bucket = zip(self.strategies, self._bucket(num_live), strict=True)
        return [bool(rewards) or strategy.source == "off" for strategy, rewards in bucket]

    def _bucket(self, num_live: int) -> list[_Rewards]:
        return self._rewards[bisect_right(self._thresholds, num_live)]

    def _appeal(self, index: int, ratio: float) -> float:
        return 1.0

    def _learn(
        self, index: int, num_live: int, num_tokens: int, seconds: float, accepted: Sequence[int] | None
    ) -> None:
        super()._learn(index, num_live, num_tokens, seconds, accepted)
        self._bucket(num_live)[index].add(num_tokens / seconds)
