"""What choosers know of strategies: seconds of a round, expected accept length, and what trials have cost.

Knows neither how a strategy is chosen nor how one is carried out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from tlt_hpc.rollout.strategy import OFF, Strategy


class CostPrior(Protocol):
    """What rounds are expected to take before any has been measured."""

    def seconds(self, strategy: Strategy, num_live: int) -> float:
        """Seconds of a round of ``num_live`` sequences."""

    def catch_up_seconds(self, strategy: Strategy, backlog: int) -> float:
        """Seconds until a drafter that rested has read ``backlog`` positions, over all sequences."""


class _GuessedCosts:
    """Stands in for a cost profile: a plain round is 1, a draft step 0.15, a further verified token 0.05."""

    def seconds(self, strategy: Strategy, num_live: int) -> float:
        steps = strategy.depth if strategy.has_drafter else 0
        return 1.0 + 0.15 * steps + 0.05 * strategy.num_drafts

    def catch_up_seconds(self, strategy: Strategy, backlog: int) -> float:
        return 0.0


class _Ratio:
    """Measured over predicted seconds: the median of recent rounds and of what was believed before them.

    The lower of two middle values counts, so one slow round beside the belief changes nothing.
    """

    _ROUNDS = 15
    _STALE_ROUNDS = 256

    def __init__(self, belief: float | None) -> None:
        self._belief, self._round = belief, 0
        self._values: deque[float] = deque(maxlen=self._ROUNDS)
        self.estimate = 1.0 if belief is None else belief

    def add(self, value: float, at_round: int) -> None:
        if self._values and at_round - self._round > self._STALE_ROUNDS:
            self._belief = self.estimate
            self._values.clear()
        self._round = at_round
        self._values.append(value)
        believed = () if self._belief is None else (self._belief,)
        values = sorted((*believed, *self._values))
        self.estimate = values[(len(values) - 1) // 2]


class Costs:
    """Seconds of a round by strategy and live sequences: a prior, times a ratio learned by power of two of the batch.

    A strategy that has no ratio at a batch size is taken to stand there to another one as it did at the nearest batch
    size where it has one. Strategies are given by index, and looked up in lists: every round asks for all of them.
    """

    _OFF_ROUNDS = 3
    _TABLE_ROUNDS = 32
    """Rounds for which ratios that were inferred, not measured, are taken as they are."""

    def __init__(self, strategies: Sequence[Strategy], prior: CostPrior | None) -> None:
        self._strategies = tuple(strategies)
        self._off = self._strategies.index(OFF) if OFF in self._strategies else 0
        self._measured_ahead = prior is not None
        self.known = [self._measured_ahead] * len(self._strategies)
        """Whether its cost was measured, ahead of time or in any round, by strategy."""
        self._prior: CostPrior = prior or _GuessedCosts()
        self._ratios: list[dict[int, _Ratio]] = [{} for _ in self._strategies]
        self._tables: dict[int, list[float]] = {}
        self._predicted: dict[int, list[float]] = {}
        self._num_rounds = self._num_off_rounds = 0

    @property
    def ready(self) -> bool:
        """Whether there is a plain round's cost to measure others against."""
        return self._measured_ahead or self._num_off_rounds >= self._OFF_ROUNDS

    def measured(self, index: int, num_live: int) -> bool:
        """Whether it ran in a round of about this many sequences."""
        return _bucket(num_live) in self._ratios[index]

    def seconds(self, num_live: int) -> list[float]:
        """Expected seconds of a round, by strategy."""
        table = self._table(_bucket(num_live))
        return [predicted * ratio for predicted, ratio in zip(self._predictions(num_live), table, strict=True)]

    def catch_up_seconds(self, index: int, backlog: int) -> float:
        """Seconds that the drafter, if the strategy has one, takes to read a backlog of positions."""
        strategy = self._strategies[index]
        return self._prior.catch_up_seconds(strategy, backlog) if backlog and strategy.has_drafter else 0.0

    def add(self, index: int, num_live: int, seconds: float) -> None:
        """A measured round."""
        self._num_rounds += 1
        self._num_off_rounds += index == self._off
        bucket = _bucket(num_live)
        if bucket not in (ratios := self._ratios[index]):
            believable = self._measured_ahead or ratios or (index != self._off and self._ratios[self._off])
            ratios[bucket] = _Ratio(self._ratio(index, bucket) if believable else None)
            self._tables.clear()
            self.known[index] = True
        ratios[bucket].add(seconds / self._predictions(num_live)[index], self._num_rounds)
        if self._num_rounds % self._TABLE_ROUNDS == 0:
            self._tables.clear()
        elif bucket in self._tables:
            self._tables[bucket][index] = ratios[bucket].estimate

    def _predictions(self, num_live: int) -> list[float]:
        if num_live not in self._predicted:
            self._predicted[num_live] = [self._prior.seconds(strategy, num_live) for strategy in self._strategies]
        return self._predicted[num_live]

    def _table(self, bucket: int) -> list[float]:
        if bucket not in self._tables:
            self._tables[bucket] = [self._ratio(index, bucket) for index in range(len(self._strategies))]
        return self._tables[bucket]

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


class Matches:
    """How often a family's draft at each position met the target's choice, given that all before it did.

    Product-limit estimate: a chain that was accepted whole says nothing of the positions beyond. Each round counts
    one, whatever its batch, and fades over ``window`` rounds. A position starts from the chance of the one before it.
    """

    _FIRST_CHANCE = 0.6
    _PRIOR_ROUNDS = 1.0

    def __init__(self, window: int, reach: int) -> None:
        self._keep = 1 - 1 / window
        self._reached, self._matched = [0.0] * reach, [0.0] * reach
        self.num_sequences = 0.0
        """Sequences behind the estimate, faded like the rest."""
        self._lengths: list[float] = []

    def expected(self, reach: int) -> float:
        """Expected accept length (bonus token included) of a chain that reaches so far."""
        if not self._lengths:
            self._lengths = self._survival()
        return self._lengths[reach]

    def add(self, reach: int, accepted: Sequence[int]) -> None:
        """A round's accepted drafts by sequence, of a strategy of this reach."""
        counts = [0] * (reach + 1)
        for num in accepted:
            counts[min(num, reach)] += 1
        left, survivors = len(accepted), [1.0]
        for num in counts[:-1]:
            left -= num
            survivors.append(left / len(accepted))
        self._add(survivors, len(accepted))

    def add_mean(self, reach: int, mean: float, num_sequences: int) -> None:
        """A round of which only the mean of accepted drafts is known: matches taken as equally likely everywhere."""
        low, high = 0.0, 1.0
        for _ in range(20):
            chance = (low + high) / 2
            low, high = (chance, high) if sum(chance**j for j in range(1, reach + 1)) < mean else (low, chance)
        self._add([high**j for j in range(reach + 1)], num_sequences)

    def discount(self, factor: float) -> None:
        self._reached = [value * factor for value in self._reached]
        self._matched = [value * factor for value in self._matched]
        self.num_sequences *= factor
        self._lengths = []

    def state(self) -> list[float]:
        """Sequences, then how often each position was reached and matched."""
        pairs = zip(self._reached, self._matched, strict=True)
        return [self.num_sequences, *(value for pair in pairs for value in pair)]

    def load_state(self, state: Sequence[float]) -> None:
        self.num_sequences = state[0]
        pairs = zip(state[1::2], state[2::2], strict=True)
        for j, (reached, matched) in zip(range(len(self._reached)), pairs, strict=False):
            self._reached[j], self._matched[j] = reached, matched
        self._lengths = []

    def _add(self, survivors: Sequence[float], num_sequences: int) -> None:
        self.discount(self._keep)
        for j in range(len(survivors) - 1):
            self._reached[j] += survivors[j]
            self._matched[j] += survivors[j + 1]
        self.num_sequences += num_sequences

    def _survival(self) -> list[float]:
        lengths, chance, survive = [1.0], self._FIRST_CHANCE, 1.0
        for reached, matched in zip(self._reached, self._matched, strict=True):
            chance = (matched + self._PRIOR_ROUNDS * chance) / (reached + self._PRIOR_ROUNDS)
            survive *= chance
            lengths.append(lengths[-1] + survive)
        return lengths


class Acceptance:
    """Expected accept length of every strategy, by index, learned by family."""

    _ENOUGH_SEQUENCES = 16.0

    def __init__(self, strategies: Sequence[Strategy], window: int) -> None:
        self._reach = [strategy.reach for strategy in strategies]
        self._members: dict[str, list[int]] = {}
        for index, strategy in enumerate(strategies):
            self._members.setdefault(strategy.family, []).append(index)
        self._families = {
            family: Matches(window, max(self._reach[index] for index in members))
            for family, members in self._members.items()
        }
        self._family = [strategy.family for strategy in strategies]
        self._of_drafter = {strategy.family for strategy in strategies if strategy.has_drafter}
        self.lengths = [1.0] * len(self._reach)
        """Expected accept length, bonus token included, by strategy."""
        self.known = [False] * len(self._reach)
        """Whether that rests on enough sequences, by strategy."""
        self._update(self._families)

    def add(self, index: int, num_live: int, num_tokens: int, accepted: Sequence[int] | None) -> None:
        """What a round emitted and, where known, how many drafts of each sequence were accepted."""
        family, reach = self._family[index], self._reach[index]
        if reach == 0:
            return
        if accepted is not None:
            self._families[family].add(reach, accepted)
        else:
            self._families[family].add_mean(reach, num_tokens / num_live - 1, num_live)
        self._update([family])

    def discount(self, factor: float) -> None:
        """Keep only this share of what is known of the drafter's acceptance."""
        for family in self._of_drafter:
            self._families[family].discount(factor)
        self._update(self._of_drafter)

    def state(self) -> dict[str, list[float]]:
        return {family: matches.state() for family, matches in self._families.items() if family != OFF.family}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        known = (self._families.keys() & state.keys()) - {OFF.family}
        for family in known:
            self._families[family].load_state(state[family])
        self._update(known)

    def _update(self, families: Iterable[str]) -> None:
        for family in families:
            matches = self._families[family]
            for index in self._members[family]:
                self.lengths[index] = matches.expected(self._reach[index])
                self.known[index] = self._reach[index] == 0 or matches.num_sequences >= self._ENOUGH_SEQUENCES


class TrialBudget:
    """Seconds lost in rounds that were not the best known way, held under a share of all seconds; both fade."""

    _KEEP = 1 - 1 / 1024

    def __init__(self, share: float) -> None:
        self._share, self._spent, self._lost = share, 0.0, 0.0

    def add(self, seconds: float, lost: float) -> None:
        """A round's seconds, and how many of them the best known way would have saved (under 0: it lost)."""
        self._spent = self._spent * self._KEEP + seconds
        self._lost = max(0.0, self._lost * self._KEEP + lost)

    def allows(self, loss: float) -> bool:
        """Whether a trial that is expected to lose so many seconds fits."""
        return loss <= 0 or self._lost + loss <= self._share * self._spent
