"""Counts of accepted drafts by position, and the accept lengths that are expected from them. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from tlt_hpc.rollout.costs import batch_bucket
from tlt_hpc.rollout.stored_text import StoredText
from tlt_hpc.rollout.strategy import MAX_DEPTH, OFF, Strategy

JUDGED_DEPTH = 4
"""Depth of the chain whose accept length judges a drafter.

Tokens per target pass would depend on what the chooser happened to pick: deep chains in the tail, n-grams where those
do better.
"""
WINDOW = 128
"""Rounds over which counts of accepted drafts fade."""
_REFRESH = 8
"""Rounds after which expected lengths are computed again."""
_PRIOR_DRAFTS = 2.0
_PARTS = {"verified": "reached", "accepted": "accepted"}
"""Names of the counts in metrics."""


@dataclass
class DraftCounts:
    """Counts of drafts that were reached and accepted, by position.

    ``reached[j]`` counts drafts at position j whose predecessors were all accepted, ``accepted[j]`` those that were
    accepted too. A chain that was accepted whole says nothing about the positions beyond it.
    """

    reached: list[float] = field(default_factory=lambda: [0.0] * MAX_DEPTH)
    accepted: list[float] = field(default_factory=lambda: [0.0] * MAX_DEPTH)

    def add(self, reach: int, accepted: Sequence[int], weight: float = 1) -> None:
        """Add a round of drafts up to position ``reach``, of which each sequence accepted so many."""
        stopped = Counter(min(num, reach) for num in accepted)
        left = len(accepted)
        for j in range(reach):
            self.reached[j] += weight * left
            left -= stopped[j]
            self.accepted[j] += weight * left

    def scale(self, factor: float) -> None:
        """Multiply all counts."""
        self.reached = [factor * count for count in self.reached]
        self.accepted = [factor * count for count in self.accepted]

    @classmethod
    def total(cls, parts: Iterable[DraftCounts]) -> DraftCounts:
        """Sum of the counts of several."""
        found = cls()
        for part in parts:
            for j, (reached, accepted) in enumerate(zip(part.reached, part.accepted, strict=True)):
                found.reached[j] += reached
                found.accepted[j] += accepted
        return found

    @property
    def accept_length(self) -> float:
        """Accept length of a chain of JUDGED_DEPTH, bonus token included (product-limit estimate).

        The chance at a position is drawn towards that of the one before it, as by two further drafts: few chains may
        have been deep enough.
        """
        length = survive = 1.0
        chance = drafts = 0.0
        for _, reached, accepted in zip(range(JUDGED_DEPTH), self.reached, self.accepted, strict=False):
            chance = (accepted + drafts * chance) / (reached + drafts) if reached + drafts else 0.0
            drafts = _PRIOR_DRAFTS
            survive *= chance
            length += survive
        return length

    def to_summable_metrics(self) -> dict[str, float]:
        """Counts of the first JUDGED_DEPTH positions, as named numbers that can be summed over ranks."""
        return {
            f"drafter/own_{part}/{j + 1}": float(count)
            for part, name in _PARTS.items()
            for j, count in enumerate(getattr(self, name)[:JUDGED_DEPTH])
        }

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> DraftCounts:
        """The inverse of ``to_summable_metrics``; zeros where there is nothing."""
        found = cls()
        for part, name in _PARTS.items():
            columns = (metrics.get(f"drafter/own_{part}/{j + 1}", 0.0) for j in range(JUDGED_DEPTH))
            getattr(found, name)[:JUDGED_DEPTH] = columns
        return found


class FamilyAcceptance:
    """Accept lengths of one family of strategies. Each round counts one, whatever its batch, and fades over WINDOW."""

    _FIRST_CHANCE = 0.6
    _PRIOR_SEQUENCES, _MAX_PRIOR_SEQUENCES = 2.0, 32.0
    """Sequences that a chance rests on without any; and at most those of other batch sizes."""

    def __init__(self, reach: int, prior: FamilyAcceptance | None = None) -> None:
        """``reach``: the longest chain of the family; ``prior``: counts that stand for 16 rounds at the start."""
        self.reach = reach
        self._counts = DraftCounts([0.0] * reach, [0.0] * reach)
        self._num_sequences = 0.0
        self._prior, self._prior_rounds = prior, 1.0 if prior is None else 16.0

    def acceptance_chances(self) -> list[float]:
        """Chance of each position that its draft is accepted if those before it are: a product-limit estimate."""
        before = None if self._prior is None else self._prior.acceptance_chances()
        chance, found = self._FIRST_CHANCE, list[float]()
        for j, (reached, accepted) in enumerate(zip(self._counts.reached, self._counts.accepted, strict=True)):
            # without a prior a position starts from the chance of the one before it
            chance = chance if before is None else before[j]
            chance = (accepted + self._prior_rounds * chance) / (reached + self._prior_rounds)
            found.append(chance)
        return found

    def accept_lengths(self) -> list[float]:
        """Expected accept length (bonus token included) of a chain of 0, 1, 2, ... drafts."""
        return list(accumulate(accumulate([1.0, *self.acceptance_chances()], mul)))

    def length_deviations(self) -> list[float]:
        """Standard deviations of ``accept_lengths``, to first order, by how many sequences each chance rests on."""
        chances = self.acceptance_chances()
        before = [0.0] * self.reach if self._prior is None else self._prior.num_sequences_by_position()
        numbers = [
            self._PRIOR_SEQUENCES + own + min(other, self._MAX_PRIOR_SEQUENCES)
            for own, other in zip(self.num_sequences_by_position(), before, strict=True)
        ]
        variances = [(1 - chance) / max(chance, 1e-3) / (num + 1) for chance, num in zip(chances, numbers, strict=True)]
        survival, found = list(accumulate(chances, mul)), [0.0]
        for depth in range(1, self.reach + 1):
            rest = list(accumulate(reversed(survival[:depth])))[::-1]  # what a chance contributes to the length
            found.append(math.sqrt(sum(part**2 * variance for part, variance in zip(rest, variances, strict=False))))
        return found

    def num_sequences_by_position(self) -> list[float]:
        """Number of sequences whose draft at each position was reached; faded."""
        rounds = self._counts.reached[0] if self.reach else 0.0
        each = self._num_sequences / rounds if rounds else 0.0
        return [each * reached for reached in self._counts.reached]

    def add(self, reach: int, accepted: Sequence[int]) -> None:
        """Add a round's accepted drafts by sequence."""
        self.discount(1 - 1 / WINDOW)
        self._counts.add(reach, accepted, 1 / len(accepted))
        self._num_sequences += len(accepted)

    def discount(self, factor: float) -> None:
        """Keep only this share of the counts."""
        self._counts.scale(factor)
        self._num_sequences *= factor

    def state(self) -> list[float]:
        """Number of sequences, then how often each position was reached and accepted."""
        pairs = zip(self._counts.reached, self._counts.accepted, strict=True)
        return [self._num_sequences, *(count for pair in pairs for count in pair)]

    def load_state(self, state: Sequence[float]) -> None:
        """Continue from ``state``, of a family that may have been deeper or less deep."""
        num_known = min(self.reach, len(state) // 2)
        self._num_sequences = state[0]
        self._counts.reached[:num_known] = state[1 : 2 * num_known : 2]
        self._counts.accepted[:num_known] = state[2 : 2 * num_known + 1 : 2]


class Acceptance:
    """Expected accept lengths of strategies: from the rounds of their families with about as many sequences.

    All rounds of a family are the prior there. The last sequences of a rollout are not like the others: long texts
    repeat themselves.
    """

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        self._strategies = strategies
        reach = dict[str, int]()
        for strategy in strategies:
            reach[strategy.family] = max(reach.get(strategy.family, 0), strategy.reach)
        self._families = {family: FamilyAcceptance(longest) for family, longest in reach.items()}
        self._by_batch: dict[tuple[str, int], FamilyAcceptance] = {}
        self._lengths: dict[int, tuple[list[float], list[float]]] = {}
        self._num_added = 0

    def accept_lengths(self, num_live: int) -> tuple[list[float], list[float]]:
        """Expected accept length of each strategy in a round of so many sequences, and its standard deviation."""
        bucket = batch_bucket(num_live)
        if bucket not in self._lengths:
            families = {family: self._acceptance_at_batch(family, bucket) for family in self._families}
            both = {name: (family.accept_lengths(), family.length_deviations()) for name, family in families.items()}
            found = [[part[one.reach] for part in both[one.family]] for one in self._strategies]
            self._lengths[bucket] = [mean for mean, _ in found], [deviation for _, deviation in found]
        return self._lengths[bucket]

    def add(self, strategy: Strategy, num_live: int, accepted: Sequence[int]) -> None:
        """Add a round of so many sequences, with the accepted drafts of each that was still running."""
        if not (strategy.reach and num_live):
            return
        for family in (
            self._families[strategy.family],
            self._acceptance_at_batch(strategy.family, batch_bucket(num_live)),
        ):
            family.add(strategy.reach, accepted)
        self._num_added += 1
        if self._num_added < WINDOW or self._num_added % _REFRESH == 0:  # they change little in a round
            self._lengths.clear()

    def discount(self, factor: float) -> None:
        """Keep only this share of the learned drafter's counts."""
        replaced = {strategy.family for strategy in self._strategies if strategy.has_drafter}
        by_batch = [found for (family, _), found in self._by_batch.items() if family in replaced]
        for found in [*by_batch, *(self._families[family] for family in replaced)]:
            found.discount(factor)
        self._lengths.clear()

    def state(self) -> dict[str, list[float]]:
        """Counts of each family."""
        return {name: family.state() for name, family in self._families.items() if name != OFF.family}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue from ``state``; families that do not exist any more are ignored."""
        for family in (self._families.keys() & state.keys()) - {OFF.family}:
            self._families[family].load_state(state[family])
        self._lengths.clear()

    def _acceptance_at_batch(self, family: str, bucket: int) -> FamilyAcceptance:
        if (family, bucket) not in self._by_batch:
            overall = self._families[family]
            self._by_batch[family, bucket] = FamilyAcceptance(overall.reach, overall)
        return self._by_batch[family, bucket]


class StoredAcceptance:
    """Chance that a token of a stored text is accepted, for cursors that are surely in the right place or not."""

    _KEPT = 0.999
    """Share of what is known that a further token keeps."""

    def __init__(self) -> None:
        self._chances = {True: 0.97, False: 0.7}
        self._lengths: dict[bool, list[float]] = {}

    def accept_length(self, text: StoredText, most: int) -> float:
        """Expected accept length (bonus token included) with at most so many drafts."""
        if text.is_sure not in self._lengths:
            chance = self._chances[text.is_sure]
            self._lengths[text.is_sure] = list(accumulate(chance**i for i in range(MAX_DEPTH + 1)))
        return self._lengths[text.is_sure][min(text.num_drafts, most)]

    def add(self, text: StoredText, most: int, accepted: int) -> None:
        """Add a round in which so many of the text's drafts, at most ``most``, were accepted."""
        num_drafts = min(text.num_drafts, most)
        num_seen = accepted + (accepted < num_drafts)
        kept = self._KEPT**num_seen
        chance = kept * self._chances[text.is_sure] + (1 - kept) * accepted / max(1, num_seen)
        self._chances[text.is_sure] = min(0.999, max(0.1, chance))
        self._lengths.clear()
