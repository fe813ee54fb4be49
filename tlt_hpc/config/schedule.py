"""The learning rate over a training, the policy's and that of a drafter's warm-up."""

from __future__ import annotations

import math
from typing import Literal, assert_never

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
