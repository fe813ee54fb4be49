"""What an algorithm's name stands for: an advantage, a loss of a token, and how tokens are weighed. Knows no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tlt_hpc.config import AlgorithmSection

AdvantageName = Literal["group", "group-mean", "leave-one-out", "batch", "group-mean-batch"]
LossName = Literal["clip", "sequence-clip", "weight-clip"]
AggregationName = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass(frozen=True)
class Recipe:
    """The parts of an algorithm, each a function of ``advantage.py``, ``loss.py`` and ``aggregation.py``."""

    advantage: AdvantageName
    loss: LossName
    aggregation: AggregationName
    clip_low: float
    clip_high: float


RECIPES = {
    # DeepSeekMath (2402.03300), section 4.1; its own mean is "seq-mean-token-mean", DAPO's is what the field runs.
    "grpo": Recipe("group", "clip", "token-mean", 0.2, 0.2),
    # Understanding R1-Zero-Like Training (2503.20783), section 3: no standard deviation, a constant length.
    "dr-grpo": Recipe("group-mean", "clip", "seq-mean-token-sum-norm", 0.2, 0.2),
    # DAPO (2503.14476), eq. 8: clip-higher and the token mean.
    "dapo": Recipe("group", "clip", "token-mean", 0.2, 0.28),
    # Back to Basics (2402.14740), eq. 8: REINFORCE on whole responses, the others' mean as baseline.
    "rloo": Recipe("leave-one-out", "clip", "seq-mean-token-sum", 0.2, 0.2),
    # REINFORCE++ (2501.03262), section 3: advantages normalised over the whole batch.
    "reinforce++": Recipe("batch", "clip", "token-mean", 0.2, 0.2),
    # The same paper: the group's mean as baseline, then normalised over the batch.
    "reinforce++-baseline": Recipe("group-mean-batch", "clip", "token-mean", 0.2, 0.2),
    # Group Sequence Policy Optimization (2507.18071), eq. 5 and section 5.1.
    "gspo": Recipe("group", "sequence-clip", "seq-mean-token-mean", 3e-4, 4e-4),
    # MiniMax-M1 (2506.13585), eq. 4 and 5: no lower bound; it does not tell the upper one, and TRL advises 5 in all.
    "cispo": Recipe("group", "weight-clip", "token-mean", 1.0, 4.0),
}
"""By name, as their papers have them where the field agrees with the paper."""


def recipe_of(section: AlgorithmSection) -> Recipe:
    """The named algorithm's parts, each replaced where the configuration says something else than ``auto``."""
    own = RECIPES[section.name]
    return Recipe(
        advantage=own.advantage if section.advantage == "auto" else section.advantage,
        loss=own.loss if section.loss == "auto" else section.loss,
        aggregation=own.aggregation if section.aggregation == "auto" else section.aggregation,
        clip_low=own.clip_low if section.clip_low == "auto" else section.clip_low,
        clip_high=own.clip_high if section.clip_high == "auto" else section.clip_high,
    )
