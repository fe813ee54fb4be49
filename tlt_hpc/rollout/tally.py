"""Counts of drafts verified and accepted, position by position. Knows no strategy and no sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tlt_hpc.rollout.strategy import MOST_DEPTH


@dataclass
class DraftTally:
    """``reached[j]`` counts drafts at position j whose predecessors all stood, ``accepted[j]`` those that stood too."""

    reached: list[int] = field(default_factory=lambda: [0] * MOST_DEPTH)
    accepted: list[int] = field(default_factory=lambda: [0] * MOST_DEPTH)

    def add(self, reach: int, accepted: Sequence[int]) -> None:
        """A round of drafts up to position ``reach``: how many of each sequence were accepted."""
        stood = [0] * (reach + 1)
        for num in accepted:
            stood[min(num, reach)] += 1
        left = len(accepted)
        for j in range(reach):
            self.reached[j] += left
            left -= stood[j]
            self.accepted[j] += left
