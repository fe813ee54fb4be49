"""How many of the learned drafter's own drafts were accepted, by position, and the accept length that follows.

Tokens per target pass would depend on what the chooser happened to pick: deep chains in the tail, n-grams where those
do better. So the accept length of a chain of four is estimated position by position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

JUDGED_DEPTH = 4
_PRIOR_DRAFTS = 2.0


@dataclass(frozen=True)
class DraftCounts:
    """How often drafts were verified and accepted, [JUDGED_DEPTH] each by position.

    ``reached[j]`` counts the rounds of single sequences whose drafts before position j were all accepted.
    """

    reached: tuple[float, ...] = (0.0,) * JUDGED_DEPTH
    accepted: tuple[float, ...] = (0.0,) * JUDGED_DEPTH

    @property
    def accept_length(self) -> float:
        """Of a chain of JUDGED_DEPTH, bonus token included (product-limit estimate).

        The chance at a position is drawn towards that of the one before it, as by two further drafts: few chains may
        have been deep enough.
        """
        length = survive = 1.0
        chance = drafts = 0.0
        for reached, accepted in zip(self.reached, self.accepted, strict=True):
            chance = (accepted + drafts * chance) / (reached + drafts) if reached + drafts else 0.0
            drafts = _PRIOR_DRAFTS
            survive *= chance
            length += survive
        return length

    def to_metrics(self) -> dict[str, float]:
        """Named numbers that can be summed over ranks."""
        parts = {"verified": self.reached, "accepted": self.accepted}
        return {f"drafter/own_{part}/{j + 1}": n for part, counts in parts.items() for j, n in enumerate(counts)}

    @classmethod
    def from_metrics(cls, *lines: Mapping[str, float]) -> DraftCounts:
        """The inverse of ``to_metrics``, summed over lines; zeros where there are none."""

        def column(part: str) -> tuple[float, ...]:
            names = (f"drafter/own_{part}/{j + 1}" for j in range(JUDGED_DEPTH))
            return tuple(sum((line.get(name, 0.0) for line in lines), 0.0) for name in names)

        return cls(column("verified"), column("accepted"))
