"""How much time a fresh chooser loses against the best fixed strategy, over tables of costs and acceptances.

    OMP_NUM_THREADS=1 PYTHONPATH=. python tests/chooser_study.py [TABLES]

Prints mean, median, 90th percentile and worst loss over 500 rounds, at 1, 8, 32 and 64 sequences. The first four tables
resemble a 7B model on an H200 and the embedded model on a CPU, with a good drafter and a random one; the others are
drawn. A sequence has stretches that are hard to draft for, its first tokens among them.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from tlt_hpc.rollout.chooser import Chooser
from tlt_hpc.rollout.strategy import Strategy, parse_strategies

STRATEGIES = parse_strategies("full", ["ngram-4", "drafter-2", "drafter-4", "drafter-8"])
HARD, HARD_SHARE = 0.55, 0.25
"""Factor on the chance of a draft in a hard stretch, and the share of stretches that are hard."""
SLOW_ROUND, SLOW_CHANCE = 3.0, 0.005


@dataclass(frozen=True)
class Table:
    """Seconds of a round, a sequence, a verified token, a draft step and a drafted token; chances by source."""

    seconds: Sequence[float]
    chances: dict[str, tuple[float, float]]
    """Of the first draft, and the factor from each draft to the next."""
    noise: float

    def cost(self, strategy: Strategy, num_live: int) -> float:
        """Seconds of a round."""
        each_round, sequence, verified, step, drafted = self.seconds
        cost = each_round + num_live * (sequence + strategy.widest_pass * verified)
        return cost + (strategy.depth * (step + num_live * drafted) if strategy.has_drafter else 0.0)

    def length(self, strategy: Strategy) -> float:
        """Mean accept length over easy and hard stretches."""
        share = HARD_SHARE * 0.9  # of tokens: hard stretches are as long as others, the first ones shorter
        return (1 - share) * self._length(strategy, 1.0) + share * self._length(strategy, HARD)

    def _length(self, strategy: Strategy, factor: float) -> float:
        length = survival = 1.0
        for position in range(strategy.reach):
            survival *= factor * self.chance(strategy, position)
            length += survival
        return length

    def chance(self, strategy: Strategy, position: int) -> float:
        """Chance of the draft at a position, if those before it are accepted."""
        first, factor = self.chances[strategy.source]
        return first * factor**position


@dataclass
class Stretches:
    """A sequence's alternation of easy and hard stretches of text."""

    source: random.Random
    left: int = 20
    is_hard: bool = field(default=True)

    def draw(self, table: Table, strategy: Strategy) -> int:
        """Number of accepted drafts of a round."""
        count, factor = 0, HARD if self.is_hard else 1.0
        while count < strategy.reach and self.source.random() < factor * table.chance(strategy, count):
            count += 1
        self.left -= count + 1
        if self.left <= 0:
            self.left, self.is_hard = self.source.randint(20, 200), self.source.random() < HARD_SHARE
        return count


def make_tables(count: int) -> list[Table]:
    """The four fixed tables, and seeded ones."""
    source = random.Random(0)
    gpu, cpu = (5.6e-3, 6e-5, 1e-5, 2.4e-4, 3e-5), (9e-4, 1.5e-4, 1.2e-4, 4.5e-4, 9e-5)
    tables = [
        Table(seconds, {"ngram": (ngram, 0.96), "drafter": (drafter, 0.97)}, noise)
        for seconds, noise in ((gpu, 0.02), (cpu, 0.12))
        for ngram, drafter in ((0.6, 0.92), (0.45, 0.3))
    ]

    def draw(low: float, high: float) -> float:
        return math.exp(source.uniform(math.log(low), math.log(high)))

    while len(tables) < count:
        base = draw(5e-4, 3e-2)
        rest = [base * draw(*bounds) for bounds in ((3e-3, 0.1), (1e-3, 0.15), (0.03, 0.4), (2e-3, 0.1))]
        ngram, drafter = source.uniform(0.02, 0.85), source.uniform(0.1, 0.95)
        chances = {"ngram": (ngram, source.uniform(0.9, 1)), "drafter": (drafter, source.uniform(0.85, 1))}
        tables.append(Table((base, *rest), chances, source.choice((0.02, 0.08, 0.2))))
    return tables


def loss(table: Table, num_live: int, seed: int, rounds: int = 500, make: Callable[..., Chooser] = Chooser) -> float:
    """Share of the best fixed strategy's time that a fresh chooser takes longer for the same tokens, in expectation."""
    chooser, source = make(STRATEGIES, seed), random.Random(seed)
    sequences = [Stretches(source, source.randint(5, 40)) for _ in range(num_live)]
    rates = {strategy: table.length(strategy) / table.cost(strategy, num_live) for strategy in STRATEGIES}
    spent = tokens = 0.0
    for _ in range(rounds):
        strategy, _ = chooser.choose(num_live, STRATEGIES)
        accepted = [sequence.draw(table, strategy) for sequence in sequences]
        cost = table.cost(strategy, num_live)
        measured = cost * source.lognormvariate(0, table.noise) * (SLOW_ROUND if source.random() < SLOW_CHANCE else 1)
        chooser.observe(strategy, num_live, sum(accepted) + num_live, measured, accepted)
        spent, tokens = spent + cost, tokens + table.length(strategy)
    return spent * max(rates.values()) / tokens - 1


def main() -> None:
    """Print the losses at each number of sequences."""
    tables = make_tables(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
    for num_live in (1, 8, 32, 64):
        losses = sorted(loss(table, num_live, seed) for seed, table in enumerate(tables))
        print(
            f"{num_live:3} sequences: mean {mean(losses):.1%}, median {median(losses):.1%}, 90th percentile "
            f"{losses[len(losses) * 9 // 10]:.1%}, worst {losses[-1]:.1%}, over 5 %: {sum(x > 0.05 for x in losses)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
