"""How long responses are, and which replica generates which.

Shapes: ``T`` steps, ``P`` prompts, ``G`` responses of each, ``R`` replicas, ``N`` responses of the largest shard.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Shard = Literal["group", "sample"]

MEDIAN_SHARE, SPREAD = 1 / 6, 0.9
"""An assumed long tail: log-normal around a sixth of the cap, which one response in forty reaches. ``SPREAD`` is the
standard deviation of a log length."""
PROMPT_SHARE = 0.5
"""The share of its square that lies between prompts."""


def log_normal(shape: tuple[int, int, int], median: float, cap: int) -> Ints:
    """[T, P, G] lengths of 1 or more by a log-normal law."""
    rng = np.random.default_rng(0)
    between = rng.standard_normal((*shape[:2], 1)) * math.sqrt(PROMPT_SHARE)
    within = rng.standard_normal(shape) * math.sqrt(1 - PROMPT_SHARE)
    return np.clip(np.rint(median * np.exp(SPREAD * (between + within))), 1, cap).astype(np.int64)


def resample_lengths(groups: Ints, shape: tuple[int, int, int]) -> Ints:
    """[T, P, G] lengths from recorded groups [K, G'], drawn with replacement.

    Responses of a group stay together. Single responses (G' = 1) do not show what those of a prompt have in common:
    each is drawn by itself.
    """
    rng, size = np.random.default_rng(0), groups.shape[1]
    if size == 1:
        single: Ints = groups[rng.integers(len(groups), size=shape), 0]
        return single
    of = rng.integers(len(groups), size=shape[:2])
    members = np.broadcast_to(np.arange(size), shape) if shape[2] == size else rng.integers(size, size=shape)
    lengths: Ints = groups[of[:, :, None], members]
    return lengths


def shard_lengths(lengths: Ints, num_replicas: int, shard: Shard) -> Ints:
    """The lengths [T, P, G] of all prompts' responses by replica, [T, R, N], in the order of admission.

    They are distributed round-robin as in a run; zeros fill short shards.
    """
    steps, prompts, group = lengths.shape
    units = lengths if shard == "group" else lengths.reshape(steps, prompts * group, 1)
    count = -(-units.shape[1] // num_replicas)
    room = np.zeros((steps, count * num_replicas, units.shape[2]), np.int64)
    room[:, : units.shape[1]] = units
    turns = room.reshape(steps, count, num_replicas, units.shape[2])
    return turns.transpose(0, 2, 1, 3).reshape(steps, num_replicas, -1)
