"""Which way to decode a round: "off", or a drafter and a depth, chosen online by live batch size. Knows no model.

A goodput chooser: expected tokens per sequence and round (of the strategy, whatever the batch) over the measured
seconds per round (of the strategy in this bucket of batch sizes). Accept length hardly depends on the batch and cost
hardly on the drafter's quality, so each is learned from all the rounds that tell of it. "Off" is an arm of every
bucket, and a share ``epsilon`` of the rounds explores.
"""

from __future__ import annotations

import random
import re
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Source = Literal["off", "ngram", "drafter", "hybrid"]


@dataclass(frozen=True)
class Strategy:
    """A way to decode: where drafts come from, how deep and wide their tree is, and how many of them are verified.

    ``branching`` 1 is a chain. ``num_verify`` (0: as many as ``depth``) is the budget of drafted nodes in a pass.
    ``sharpness`` is the factor on the drafter's logits before the shared noise is added.
    """

    source: Source
    depth: int = 0
    branching: int = 1
    num_verify: int = 0
    sharpness: float = 1.0

    @property
    def num_drafts(self) -> int:
        """Drafted tokens that a pass verifies for one sequence."""
        return self.num_verify or self.depth

    @property
    def name(self) -> str:
        if self.source == "off":
            return "off"
        tree = f"x{self.branching}v{self.num_drafts}" if self.branching > 1 else ""
        sharp = f"a{self.sharpness:g}" if self.sharpness != 1.0 else ""
        return f"{self.source}-{self.depth}{tree}{sharp}"


OFF = Strategy("off")
ChooserKind = Literal["goodput", "bandit"]
_SOURCES: dict[str, tuple[Source, ...]] = {"plain": (), "ngram": ("ngram",), "full": ("ngram", "drafter", "hybrid")}
_NAME = re.compile(r"(ngram|drafter|hybrid)-(\d+)(?:x(\d+)v(\d+))?(?:a(\d+(?:\.\d+)?))?")


def parse_strategy(name: str) -> Strategy:
    """The strategy of a name such as ``drafter-6``, ``drafter-5x2v9`` or ``hybrid-4a1.5``; ``off`` for none.

    Raises:
        ValueError: it is not such a name.
    """
    if name == OFF.name:
        return OFF
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"strategy {name!r} is not of the form source-depth, e.g. drafter-6, drafter-5x2v9, ngram-4a2")
    source, depth, branching, verify, sharpness = match.groups()
    sources: dict[str, Source] = {"ngram": "ngram", "drafter": "drafter", "hybrid": "hybrid"}
    return Strategy(sources[source], int(depth), int(branching or 1), int(verify or 0), float(sharpness or 1.0))


def strategies_of(mode: str, names: Sequence[str]) -> tuple[Strategy, ...]:
    """The arms of a speculation mode: of those named, the ones that it allows; "off" is always the first."""
    named = dict.fromkeys(map(parse_strategy, names))
    return (OFF, *(strategy for strategy in named if strategy.source in _SOURCES[mode]))


class _Window:
    """Mean of the last ``length`` values."""

    def __init__(self, length: int) -> None:
        self._values: deque[float] = deque(maxlen=length)

    def add(self, value: float) -> None:
        self._values.append(value)

    @property
    def values(self) -> list[float]:
        return list(self._values)

    @property
    def empty(self) -> bool:
        return not self._values

    @property
    def mean(self) -> float:
        return sum(self._values) / len(self._values)

    @property
    def median(self) -> float:
        return statistics.median(self._values)


class StrategyChooser:
    """Chooses per round from what earlier rounds gave."""

    _COST_ROUNDS = 16

    def __init__(self, strategies: Sequence[Strategy], epsilon: float, window: int, seed: int) -> None:
        self.strategies = tuple(strategies)
        self._epsilon = epsilon
        self._random = random.Random(seed)
        self._accepted = {strategy: _Window(window) for strategy in self.strategies}
        self._seconds: dict[tuple[int, Strategy], _Window] = {}
        self._totals = dict.fromkeys(self.strategies, (0, 0))

    def choose(self, num_live: int, usable: Sequence[Strategy]) -> Strategy:
        """The strategy for a round of ``num_live`` sequences, among those usable now."""
        if len(usable) == 1:
            return usable[0]
        for strategy in usable:
            if self._cost(num_live, strategy).empty:
                return strategy
        if self._random.random() < self._epsilon:
            return self._random.choice(usable)
        return max(usable, key=lambda strategy: self.goodput(num_live, strategy))

    def goodput(self, num_live: int, strategy: Strategy) -> float:
        """Expected tokens per sequence and second of a strategy tried at this batch size."""
        return self._accepted[strategy].mean / self._cost(num_live, strategy).median

    def observe(self, strategy: Strategy, num_live: int, num_tokens: int, seconds: float, accepted=()) -> None:
        """Tell what a round gave: tokens emitted over all its sequences, and how long it took."""
        self._accepted[strategy].add(num_tokens / num_live)
        self._cost(num_live, strategy).add(seconds)
        rounds, tokens = self._totals[strategy]
        self._totals[strategy] = (rounds + 1, tokens + num_tokens)

    def state(self) -> dict[str, list[float]]:
        """Accepted tokens by strategy, for a checkpoint; costs belong to the machine and are measured anew."""
        return {strategy.name: window.values for strategy, window in self._accepted.items()}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Take up what ``state`` saved; strategies that are no longer there are ignored."""
        for strategy, window in self._accepted.items():
            for value in state.get(strategy.name, ()):
                window.add(value)

    def totals(self) -> dict[str, tuple[int, int]]:
        """Rounds and tokens of each strategy so far."""
        return {strategy.name: total for strategy, total in self._totals.items()}

    def _cost(self, num_live: int, strategy: Strategy) -> _Window:
        key = ((num_live - 1).bit_length(), strategy)
        if key not in self._seconds:
            self._seconds[key] = _Window(self._COST_ROUNDS)
        return self._seconds[key]


def make_chooser(kind, strategies, *, epsilon, window, seed):
    c = StrategyChooser(strategies, epsilon, window, seed)
    c.discount = lambda f: None
    return c
