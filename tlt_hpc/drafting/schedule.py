"""Which steps train the drafter, decided from the run's log alone. Pure: knows no files, no ranks and no weights.

What is judged is the accept length that a chain of four of the learned drafter would have, estimated from one family of
its strategies position by position. Tokens per target pass would follow what the chooser happened to
pick: deep chains in the tail, n-grams where those do better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add

from tlt_hpc.config import DrafterSection

JUDGED_DEPTH = 4
LEAST_SEQUENCES = 200
"""Rounds of single sequences that an accept length must rest on to be judged; its error is then about 3 %."""
PATIENCE = 5
"""Judged steps over which a drafter that began at random must have stopped growing before its training pauses."""
FALL = 0.1
"""Share of its best accept length that the drafter must lose before it trains again: several times the error above."""
BLIND_STEPS = 5
"""Steps in a row without a judgement after which the drafter trains: a bad one is asked too seldom to be judged."""


@dataclass(frozen=True)
class Decision:
    """Whether a step trains the drafter, and why."""

    trains: bool
    reason: str


@dataclass(frozen=True)
class DraftCounts:
    """How often drafts were verified and accepted, [JUDGED_DEPTH] each by position.

    ``reached[j]`` counts the rounds of single sequences whose drafts before position j all stood.
    """

    reached: tuple[float, ...]
    accepted: tuple[float, ...]

    @property
    def num_sequences(self) -> float:
        return self.reached[0]

    @property
    def first_draft_share(self) -> float:
        """Share of the first drafts that stood; 0 where there were none."""
        return self.accepted[0] / self.reached[0] if self.reached[0] else 0.0

    @property
    def accept_length(self) -> float:
        """Of a chain of JUDGED_DEPTH, bonus token included (product-limit estimate).

        A position that no chain was deep enough for takes the chance of the one before it.
        """
        length = survive = 1.0
        chance = 0.0
        for reached, accepted in zip(self.reached, self.accepted, strict=True):
            chance = accepted / reached if reached else chance
            survive *= chance
            length += survive
        return length

    def __add__(self, other: DraftCounts) -> DraftCounts:
        """Of the rounds of both."""
        pairs = (self.reached, other.reached), (self.accepted, other.accepted)
        return DraftCounts(*(tuple(map(add, mine, theirs)) for mine, theirs in pairs))

    def to_metrics(self) -> dict[str, float]:
        """Named numbers that can be summed over ranks."""
        parts = {"verified": self.reached, "accepted": self.accepted}
        return {f"drafter/own_{part}/{j + 1}": n for part, counts in parts.items() for j, n in enumerate(counts)}

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> DraftCounts:
        """The inverse of ``to_metrics``; zeros where there are none."""
        names = ("verified", "accepted")
        columns = [
            tuple(metrics.get(f"drafter/own_{part}/{j + 1}", 0.0) for j in range(JUDGED_DEPTH)) for part in names
        ]
        return cls(*columns)


_NOTHING = DraftCounts((0.0,) * JUDGED_DEPTH, (0.0,) * JUDGED_DEPTH)


def decide(settings: DrafterSection, step: int, past: Sequence[DraftCounts]) -> Decision:
    """Whether ``step`` trains the drafter, from the counts of the steps before it, oldest first."""
    if settings.schedule == "always":
        return Decision(True, "always")
    return _decide_falling(FALL, settings.init == "random", judge(past))


def judge(past: Sequence[DraftCounts]) -> list[float | None]:
    """The accept length that each step told; None where there were too few rounds, which then count for the next."""
    lengths, pooled = list[float | None](), _NOTHING
    for counts in past:
        pooled = pooled + counts
        is_enough = pooled.num_sequences >= LEAST_SEQUENCES
        lengths.append(pooled.accept_length if is_enough else None)
        pooled = _NOTHING if is_enough else pooled
    return lengths


def _decide_falling(fall: float, from_random: bool, lengths: Sequence[float | None]) -> Decision:
    """Training begins under (1 - fall) of the best accept length and ends at (1 - fall / 2): between them it stays as
    it is. It also begins after BLIND_STEPS without a judgement, until there is one. One that began at random trains
    from the start, and never rests while it grows in training.
    """
    trains, bests, num_blind = from_random, list[float](), 0
    state = "nothing judged yet"
    for length in lengths:
        num_blind = num_blind + 1 if length is None else 0
        if length is None:
            if num_blind >= BLIND_STEPS:
                trains, state = True, f"nothing judged in {num_blind} steps, training until there is"
            continue
        bests.append(max([*bests[-1:], length]))
        low, back = (1 - fall) * bests[-1], (1 - fall / 2) * bests[-1]
        trains = length < back or (from_random and _grows(bests, fall)) if trains else length < low
        does = f"training until {back:.2f}" if trains else f"resting under {low:.2f}"
        state = f"accept length {length:.2f}, best {bests[-1]:.2f}, {does}"
    return Decision(trains, f"falling: {state}")


def _grows(bests: Sequence[float], fall: float) -> bool:
    """Whether the best rose by more than half a fall within the last PATIENCE judged steps; yes before there are."""
    return len(bests) <= PATIENCE or bests[-1] > bests[-1 - PATIENCE] * (1 + fall / 2)
