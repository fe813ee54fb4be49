"""What a chooser is to the engine, and the log of what choosers decided, so that a run can be replayed.

Knows nothing of costs and acceptance: how to choose well is in chooser.py.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.rollout.strategy import Strategy


@dataclass(frozen=True)
class Decision:
    """What one round was decoded with; ``strategy_index`` counts in the chooser's strategies."""

    round: int
    num_live: int
    strategy_index: int


@dataclass(frozen=True)
class Decisions:
    """Consecutive decisions from round ``first_round`` on: ``num_live`` [N] int32, ``strategy_index`` [N] int16.

    ``names`` are the strategies that the indices count in.
    """

    names: tuple[str, ...]
    first_round: int
    num_live: NDArray[np.int32]
    strategy_index: NDArray[np.int16]

    def __len__(self) -> int:
        return len(self.num_live)

    def __iter__(self) -> Iterator[Decision]:
        for i, (live, index) in enumerate(zip(self.num_live.tolist(), self.strategy_index.tolist(), strict=True)):
            yield Decision(self.first_round + i, live, index)


Agree = Callable[[int], int]
"""From this rank's choice, an index among the strategies or another number that time decides, to that of the replica's
first rank: a broadcast."""


class Chooser(Protocol):
    """Decides how each round is decoded, and is told what came of it (a round or more later, if need be)."""

    agree: Agree
    """Ranks that decode one response together time their rounds apart, so they must be told what the first chose."""

    @property
    def strategies(self) -> tuple[Strategy, ...]: ...

    def index_of(self, strategy: Strategy) -> int:
        """Its place among the strategies."""

    def choose(self, num_live: int, usable: Sequence[Strategy], backlog: int = 0) -> Strategy:
        """The strategy for a round of ``num_live`` sequences, among those usable now.

        ``backlog`` counts the committed positions, over all live sequences, that the drafter has not read yet.
        """

    def observe(
        self,
        strategy: Strategy,
        num_live: int,
        num_tokens: int,
        seconds: float,
        accepted: Sequence[int] | None = None,
    ) -> None:
        """Tell what a round gave: tokens emitted over all its sequences, how long it took, and, where known, how
        many drafts of each sequence were accepted before its end cut any off."""

    def discount(self, factor: float) -> None:
        """Keep only this share of what is known of the drafter's acceptance: it has been replaced."""

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint keeps; costs belong to the machine and are measured anew."""

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Take up what ``state`` saved; what no longer fits is ignored."""

    def totals(self) -> dict[str, tuple[int, int]]:
        """Rounds and tokens of each strategy so far."""

    def take_decisions(self) -> Decisions:
        """The decisions since the last call."""


def own(index: int) -> int:
    """The choice of a rank that decodes alone."""
    return index


class Recorder:
    """What all choosers keep alike: the log of decisions, and rounds and tokens by strategy."""

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        self.strategies = tuple(strategies)
        names = tuple(strategy.name for strategy in self.strategies)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"strategies {names}: give at least one, and each only once")
        self._names = names
        self._index = {strategy: i for i, strategy in enumerate(self.strategies)}
        self._rounds, self._tokens = [0] * len(names), [0] * len(names)
        self._first_round = 0
        self._live, self._chosen = array("i"), array("h")
        self.agree: Agree = own

    @property
    def num_rounds(self) -> int:
        """Decisions so far."""
        return self._first_round + len(self._live)

    def index_of(self, strategy: Strategy) -> int:
        return self._index[strategy]

    def choose(self, num_live: int, usable: Sequence[Strategy], backlog: int = 0) -> Strategy:
        assert num_live > 0
        index = self.agree(self._index[self._pick(num_live, usable, backlog)])
        self._live.append(num_live)
        self._chosen.append(index)
        return self.strategies[index]

    def observe(
        self,
        strategy: Strategy,
        num_live: int,
        num_tokens: int,
        seconds: float,
        accepted: Sequence[int] | None = None,
    ) -> None:
        index = self._index[strategy]
        self._rounds[index] += 1
        self._tokens[index] += num_tokens
        self._learn(index, num_live, num_tokens, max(seconds, 1e-9), accepted)

    def totals(self) -> dict[str, tuple[int, int]]:
        return dict(zip(self._names, zip(self._rounds, self._tokens, strict=True), strict=True))

    def take_decisions(self) -> Decisions:
        taken = Decisions(
            self._names, self._first_round, np.array(self._live, np.int32), np.array(self._chosen, np.int16)
        )
        self._first_round = self.num_rounds
        self._live, self._chosen = array("i"), array("h")
        return taken

    def discount(self, factor: float) -> None:
        assert 0 <= factor <= 1

    def state(self) -> dict[str, list[float]]:
        return {}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        pass

    def _pick(self, num_live: int, usable: Sequence[Strategy], backlog: int) -> Strategy:
        raise NotImplementedError

    def _learn(
        self, index: int, num_live: int, num_tokens: int, seconds: float, accepted: Sequence[int] | None
    ) -> None:
        pass


class ReplayChooser(Recorder):
    """Plays recorded decisions back.

    Raises:
        ValueError: these are not the strategies of the record; or, from ``choose``, this is not the recorded run.
    """

    def __init__(self, decisions: Decisions, strategies: Sequence[Strategy]) -> None:
        super().__init__(strategies)
        if decisions.names != self._names:
            raise ValueError(
                f"recorded with strategies {decisions.names}, now {self._names}; replay with the same ones"
            )
        self._decisions = decisions

    def _pick(self, num_live: int, usable: Sequence[Strategy], backlog: int) -> Strategy:
        at, recorded = self.num_rounds, self._decisions
        if at >= len(recorded):
            raise ValueError(f"replay asks for round {at + 1} but {len(recorded)} were recorded; give the whole record")
        if num_live != recorded.num_live[at]:
            raise ValueError(
                f"round {recorded.first_round + at}: recorded with {recorded.num_live[at]} live sequences, now "
                f"{num_live}; replay the same requests on the same weights, rollout.max_live and kind of device"
            )
        strategy = self.strategies[int(recorded.strategy_index[at])]
        if strategy not in usable:
            raise ValueError(
                f"round {recorded.first_round + at}: recorded with {strategy.name}, which cannot be used now; "
                "load the drafter of the recorded run"
            )
        return strategy


class RandomChooser(Recorder):
    """Tries everything alike, whatever it costs."""

    def __init__(self, strategies: Sequence[Strategy], seed: int) -> None:
        super().__init__(strategies)
        self._random = random.Random(seed)

    def _pick(self, num_live: int, usable: Sequence[Strategy], backlog: int) -> Strategy:
        return usable[int(self._random.random() * len(usable))]
