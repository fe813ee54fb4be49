"""Ways to decode a round, and their names. ``chooser.py`` chooses one, ``decoding.py`` carries it out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

Source = Literal["off", "ngram", "drafter"]


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

    @cached_property
    def num_drafts(self) -> int:
        """Drafted tokens that a pass verifies for one sequence, at most."""
        return self.num_verify or self.depth

    @cached_property
    def widest_pass(self) -> int:
        """Tokens of one sequence in its verifying pass at most: the last committed one, and all drafts."""
        return 1 + self.num_drafts

    @cached_property
    def reach(self) -> int:
        """Most drafts that one pass can accept for one sequence."""
        return min(self.depth, self.num_drafts)

    @cached_property
    def num_slots(self) -> int:
        """Positions from a sequence's last token on that a round may write."""
        grown = 1 + (self.depth - 1) * self.branching if self.branching > 1 else self.depth
        return max(grown + 1, self.widest_pass)

    @cached_property
    def has_drafter(self) -> bool:
        """True if the learned drafter takes part."""
        return self.source == "drafter"

    @cached_property
    def name(self) -> str:
        """Its name in ``speculation.strategies``, in logs and metrics, such as ngram-4 or drafter-6x4v16a2."""
        if self.source == "off":
            return "off"
        tree = f"x{self.branching}v{self.num_drafts}" if self.branching > 1 or self.num_drafts != self.depth else ""
        sharp = f"a{self.sharpness:g}" if self.sharpness != 1.0 else ""
        return f"{self.source}-{self.depth}{tree}{sharp}"

    @cached_property
    def family(self) -> str:
        """Names the strategies that share statistics of acceptance: all chains of a drafter, or one tree alone.

        A chain's first drafts are those of every deeper chain, so each tells of the others.
        """
        if self.branching > 1 or self.source == "off":
            return self.name
        return f"{self.source}:a{self.sharpness:g}"


OFF = Strategy("off")
MAX_DEPTH, MAX_BRANCHES = 32, 16
STORED = "stored"
"""The name, in logs and metrics, of rounds in which any row drafted from a text that was generated ahead."""
STORED_DEPTHS = (4, 8, 16, MAX_DEPTH)
"""Drafts that a round may take from texts that were generated ahead."""
MAX_SLOTS = 64
"""The attention kernels mark what a drafted token sees by the bits of one int64."""
_SOURCES: dict[str, tuple[Source, ...]] = {
    "plain": (),
    "ngram": ("ngram",),
    "frozen": ("ngram", "drafter"),
    "full": ("ngram", "drafter"),
}
_NAME = re.compile(
    r"(?P<source>[a-z]+)-(?P<depth>\d+)(x(?P<branching>\d+)v(?P<num_verify>\d+))?(a(?P<sharpness>\d+(\.\d+)?))?"
)


def parse_strategies(mode: str, names: Sequence[str]) -> tuple[Strategy, ...]:
    """The strategies of a speculation mode: "off", and those of the named ones that the mode allows.

    Raises:
        ValueError: there is no strategy of this name, or none to be named.
    """
    named = dict.fromkeys(map(parse_strategy, names))
    return (OFF, *(strategy for strategy in named if strategy.source in _SOURCES[mode]))


def parse_strategy(name: str) -> Strategy:
    """The strategy with this ``name``.

    Raises:
        ValueError: there is none.
    """
    if name == OFF.name:
        return OFF
    match = _NAME.fullmatch(name)
    sources: dict[str, Source] = {source: source for source in get_args(Source) if source != "off"}
    if match is None or match["source"] not in sources:
        raise ValueError(f"strategy {name!r}: write off, or ngram|drafter-DEPTH such as ngram-4, drafter-6x4v16a2")
    depth, num_verify = int(match["depth"]), int(match["num_verify"] or 0)
    branching, sharpness = int(match["branching"] or 1), float(match["sharpness"] or 1)
    if not 1 <= depth <= MAX_DEPTH or sharpness <= 0:
        raise ValueError(f"strategy {name!r}: use a depth of 1 to {MAX_DEPTH} and a sharpness above 0")
    if match["branching"] is not None:
        candidates = branching * (1 + (depth - 1) * branching)
        if match["source"] != "drafter" or not (2 <= branching <= MAX_BRANCHES and depth <= num_verify <= candidates):
            raise ValueError(
                f"strategy {name!r}: a tree is of the drafter, with 2 to {MAX_BRANCHES} children per node and "
                f"{depth} to {candidates} drafts to verify at this depth and branching"
            )
    strategy = Strategy(sources[match["source"]], depth, branching, num_verify, sharpness)
    if strategy.num_slots > MAX_SLOTS:
        raise ValueError(
            f"strategy {name!r} writes {strategy.num_slots} positions in a round, {MAX_SLOTS} is the largest number; "
            "use fewer levels, children or drafts"
        )
    return strategy
