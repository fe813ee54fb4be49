"""The algorithms: each an advantage, a token loss with bounds and an aggregation; and the learning rate's schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, assert_never

AlgorithmName = Literal["grpo", "dr-grpo", "dapo", "rloo", "reinforce++", "reinforce++-baseline", "gspo", "cispo"]
AdvantageName = Literal["group", "group-mean", "leave-one-out", "batch", "group-mean-batch"]
LossName = Literal["clip", "sequence-clip", "weight-clip"]
AggregationName = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KLName = Literal["k1", "k2", "k3", "k3+", "low_var_kl"]
GivenCorrection = Literal["tis", "mis", "icepop"]
CorrectionName = Literal["none", "tis", "mis", "icepop"]


@dataclass(frozen=True)
class Recipe:
    """The parts of an algorithm, each a function of ``rl/advantage.py`` or ``rl/loss.py``."""

    advantage: AdvantageName
    loss: LossName
    aggregation: AggregationName
    clip_low: float
    clip_high: float


RECIPES: dict[AlgorithmName, Recipe] = {
    # DeepSeekMath (2402.03300), section 4.1; its own mean is "seq-mean-token-mean", the token mean what the field runs.
    "grpo": Recipe("group", "clip", "token-mean", 0.2, 0.2),
    # Understanding R1-Zero-Like Training (2503.20783), section 3: no standard deviation, a constant length.
    "dr-grpo": Recipe("group-mean", "clip", "seq-mean-token-sum-norm", 0.2, 0.2),
    # DAPO (2503.14476), section 3: clip-higher and a token mean.
    "dapo": Recipe("group", "clip", "token-mean", 0.2, 0.28),
    # Back to Basics (2402.14740): REINFORCE on whole responses, the others' mean as baseline.
    "rloo": Recipe("leave-one-out", "clip", "seq-mean-token-sum", 0.2, 0.2),
    # REINFORCE++ (2501.03262): advantages normalised over the whole batch.
    "reinforce++": Recipe("batch", "clip", "token-mean", 0.2, 0.2),
    # The same paper: the group's mean as baseline, then normalised over the batch.
    "reinforce++-baseline": Recipe("group-mean-batch", "clip", "token-mean", 0.2, 0.2),
    # Group Sequence Policy Optimization (2507.18071), eq. 5 and section 5.1.
    "gspo": Recipe("group", "sequence-clip", "seq-mean-token-mean", 3e-4, 4e-4),
    # MiniMax-M1 (2506.13585), eq. 4 and 5: no lower bound; the upper one is not published, TRL advises a ratio of 5.
    "cispo": Recipe("group", "weight-clip", "token-mean", 1.0, 4.0),
}
"""By name, as in their papers where common implementations agree with the paper."""


@dataclass(frozen=True)
class Correction:
    """A correction for probabilities of the rollout engine that differ from the trainer's: see ``rl/loss.py``."""

    name: CorrectionName
    low: float
    high: float


CORRECTION_BOUNDS: dict[CorrectionName, tuple[float, float]] = {
    "none": (0.0, 0.0),
    # Yao et al. 2025 truncate at 2, of tokens; verl's and TRL's guides advise 2 to 3.
    "tis": (0.0, 2.0),
    "mis": (0.0, 2.0),
    # "Every Step Evolves" (2510.18855), section 3: between 0.5 and 5.
    "icepop": (0.5, 5.0),
}
"""Smallest and largest ratio of each correction."""

GROUP_ADVANTAGES: frozenset[AdvantageName] = frozenset(RECIPES[name].advantage for name in RECIPES) - {"batch"}
"""Advantages that need more than one response to a prompt."""


ScheduleName = Literal["constant", "linear", "cosine"]


def scheduled_rate(peak: float, step: int, warmup_steps: int, past: float, kind: ScheduleName) -> float:
    """The rate of step ``step``, counted from 0: a linear rise to ``peak``, times 1, a straight line or half a cosine.

    Args:
        warmup_steps: of the rise; its last step has the peak's rate.
        past: share of the decay that is behind; from 1 on the rate is 0.
    """
    rise, past = min(1.0, (step + 1) / max(1, warmup_steps)), min(1.0, past)
    if kind == "constant":
        return peak * rise
    if kind == "linear":
        return peak * rise * (1.0 - past)
    if kind == "cosine":
        return peak * rise * (0.5 * (1.0 + math.cos(math.pi * past)))
    assert_never(kind)
