"""Figures of the TLT paper (arXiv 2511.16665), second-hand, and what is made of them.

Knows models' sizes, not how a step is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tlt_hpc.models.shape import ModelShape
from tlt_hpc.plan.simulate.card import draft_share
from tlt_hpc.plan.simulate.costs import Costs, Floats, with_speed_ups

SPEED_UPS: dict[str, tuple[float, ...]] = {"verify-16": (3.22, 3.01, 2.67, 2.48), "verify-64": (3.62, 2.98, 1.91, 1.70)}
SPEED_UP_BATCHES = (1, 4, 16, 32)
"""Of Qwen2.5-32B on 4 cards, at depth 10."""
DEPTH = 10
THRESHOLD = 32
"""Speculation below so many live sequences: the paper's 2.44x, and ``bs_threshold`` of the public 7B script."""
ROLLOUT_SHARE = 0.85
CAP = 32768
GAINS_7B = {1: 1.21, 2: 1.45, 4: 1.62, 8: 1.76}
GAINS_32B = {4: 1.83, 8: 2.12}
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Drafting:
    """What speculation gains on a model, from what it gained on another."""

    reference: ModelShape
    """The model that the speed-ups were measured on."""
    steps_cost: bool = True
    """Whether a draft step counts by what it reads of a model; False: speed-ups are taken as they are."""
    scale: float = 1.0
    """A factor on what is gained, 1 taken away: for sensitivity."""

    def costs(self, plain: Costs, shape: ModelShape, threshold: int = THRESHOLD) -> Costs:
        """``plain`` and the published strategies, linear in log2 of the batch and beyond the last on its slope."""
        factor = derating(self.reference, shape) if self.steps_cost else 1.0
        batch = np.arange(1, plain.most_live + 1)
        gains = {name: factor * _over(batch, points) for name, points in SPEED_UPS.items()}
        gains = {name: np.maximum(0.1, 1 + self.scale * (gain - 1)) for name, gain in gains.items()}
        return with_speed_ups(plain, gains).below(threshold)


def _over(batch: np.ndarray, points: tuple[float, ...]) -> Floats:
    at, log = np.log2(SPEED_UP_BATCHES), np.log2(batch)
    slope = (points[-1] - points[-2]) / (at[-1] - at[-2])
    inside = np.interp(log, at, points)
    curve: Floats = np.where(log > at[-1], points[-1] + slope * (log - at[-1]), inside)
    return np.maximum(curve, 0.1)


def derating(reference: ModelShape, shape: ModelShape) -> float:
    """Speed-up on ``shape`` over that on ``reference`` at one sequence, where draft steps count by what they read.

    The chance that a draft stands is the one that explains the reference's speed-up of a narrow draft at depth 10; the
    other model takes the depth that is best for it.
    """
    known = SPEED_UPS["verify-16"][0]
    accept = known * (1 + DEPTH * draft_share(reference))
    chance = chance_of(accept, DEPTH)
    rates = [expected(chance, depth) / (1 + depth * draft_share(shape)) for depth in range(1, 2 * DEPTH + 1)]
    return max(rates) / known


def expected(chance: float, depth: int) -> float:
    """Tokens of a round in which each draft stands with this chance, given those before it."""
    return float(sum(chance**i for i in range(depth + 1)))


def chance_of(accept: float, depth: int) -> float:
    """The chance with which a round of this depth gives so many tokens: the inverse of ``expected``."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle, depth) < accept else (low, middle)
    return (low + high) / 2
