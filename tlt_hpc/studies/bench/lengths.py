"""From chances of acceptance to accept lengths: of a walk from a position, and of a whole rollout. Pure arithmetic.

Shapes: ``A`` sharpnesses, ``L`` depths, ``R`` positions of one response.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, order=True)
class Tree:
    """A full draft tree: every node has ``children`` children down to ``depth``; one child is a chain."""

    children: int
    depth: int

    @property
    def name(self) -> str:
        return f"chain-{self.depth}" if self.children == 1 else f"tree-{self.depth}x{self.children}"

    @property
    def num_nodes(self) -> int:
        return sum(self.children**d for d in range(1, self.depth + 1))


def reached(chances: Floats) -> Floats:
    """Chances [A, L, R] that a walk from r accepts at least l + 1 drafts, given those of each depth in turn.

    A walk that accepts all to the end of its response has no bonus token to add, so the last draft adds nothing to its
    length; it counts as not drafted.
    """
    _, depth, length = chances.shape
    level, start = np.arange(depth)[:, None], np.arange(length)[None, :]
    reach: Floats = np.cumprod(chances, 1) * (start + level + 1 < length)
    return reach


def accept_lengths(reach: Floats) -> Floats:
    """Expected tokens emitted [A, R] by one round from each position."""
    lengths: Floats = 1 + reach.sum(1)
    return lengths


def visits(reach: Floats) -> Floats:
    """Chances [A, R] that a rollout of rounds starting at 0 has a round that starts at r.

    The length of the response over their sum is the accept length of the rollout.
    """
    num_sharpness, depth, length = reach.shape
    beyond = np.concatenate([reach, np.zeros((num_sharpness, 1, length))], 1)
    at_least = np.concatenate([np.ones((num_sharpness, 1, length)), reach], 1)
    exactly = at_least - beyond  # [A, L + 1, R] chances of accepting exactly 0..L drafts
    chance = np.zeros((num_sharpness, length + depth + 1))
    chance[:, 0] = 1.0
    for r in range(length):
        chance[:, r + 1 : r + depth + 2] += chance[:, r : r + 1] * exactly[:, :, r]
    return chance[:, :length]
