"""How long responses are, and which replica generates which.

Shapes: ``T`` steps, ``P`` prompts, ``G`` responses of each, ``R`` replicas, ``N`` responses of the largest shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Shard = Literal["group", "sample"]

MEDIAN_SHARE, SPREAD = 1 / 6, 0.9
"""The long tail that ``tlt bench`` runs: log-normal around a sixth of the cap, which one response in forty reaches."""
PROMPT_SHARE = 0.5


class LengthSource(Protocol):
    """A source of response lengths."""

    def draw(self, steps: int, prompts: int, group: int, rng: np.random.Generator) -> Ints:
        """[T, P, G] lengths, each 1 or more."""


@dataclass(frozen=True)
class LogNormal:
    """A log-normal law: ``spread`` is the standard deviation of a log length, ``prompt_share`` the share of its square
    that lies between prompts."""

    median: float
    cap: int
    spread: float = SPREAD
    prompt_share: float = PROMPT_SHARE

    def draw(self, steps: int, prompts: int, group: int, rng: np.random.Generator) -> Ints:
        between = rng.standard_normal((steps, prompts, 1)) * math.sqrt(self.prompt_share)
        within = rng.standard_normal((steps, prompts, group)) * math.sqrt(1 - self.prompt_share)
        drawn = self.median * np.exp(self.spread * (between + within))
        return np.clip(np.rint(drawn), 1, self.cap).astype(np.int64)


@dataclass(frozen=True)
class Logged:
    """Recorded lengths of groups [K, G']; groups are drawn whole, with replacement.

    Single responses (G' = 1) do not show what those of a prompt have in common: each is drawn by itself.
    """

    groups: Ints

    def draw(self, steps: int, prompts: int, group: int, rng: np.random.Generator) -> Ints:
        of = rng.integers(len(self.groups), size=(steps, prompts))
        size = self.groups.shape[1]
        if size == 1:
            single: Ints = self.groups[:, 0][rng.integers(len(self.groups), size=(steps, prompts, group))]
            return single
        if group <= size:
            return self.groups[of][:, :, :group]
        members = rng.integers(size, size=(steps, prompts, group))
        return self.groups[of[:, :, None], members]


def deal(lengths: Ints, num_replicas: int, shard: Shard) -> Ints:
    """Lengths [T, R, N] in the order of admission, distributed round-robin as in a run; zeros fill short shards."""
    steps, prompts, group = lengths.shape
    units = lengths if shard == "group" else lengths.reshape(steps, prompts * group, 1)
    count = -(-units.shape[1] // num_replicas)
    room = np.zeros((steps, count * num_replicas, units.shape[2]), np.int64)
    room[:, : units.shape[1]] = units
    turns = room.reshape(steps, count, num_replicas, units.shape[2])
    return turns.transpose(0, 2, 1, 3).reshape(steps, num_replicas, -1)
