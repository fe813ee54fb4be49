"""Owns the step from rewards to advantages; knows no tensors, no model and no ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, as verl does."""


def group_advantages(rewards: NDArray[np.float32], group_size: int) -> NDArray[np.float32]:
    """GRPO: each reward less its group's mean, over its group's standard deviation (DeepSeekMath, section 4.1.2).

    The standard deviation is the unbiased one (n - 1) plus 1e-6, the convention of verl and TRL. A group whose rewards
    are all equal teaches nothing: its advantages are exactly zero.

    Args:
        rewards: [G * S], ordered by group.
        group_size: S, at least 2.

    Returns:
        [G * S] float32, in the order of ``rewards``.
    """
    assert group_size >= 2, f"group_size = {group_size}: a group of one has no spread"
    assert rewards.ndim == 1 and rewards.size % group_size == 0, f"{rewards.shape} is not groups of {group_size}"
    groups = rewards.astype(np.float64).reshape(-1, group_size)
    centred: NDArray[np.float64] = groups - groups.mean(axis=1, keepdims=True)
    advantages: NDArray[np.float64] = centred / (groups.std(axis=1, ddof=1, keepdims=True) + STD_EPSILON)
    # The mean of equal numbers may be off by a rounding error, which the tiny denominator would blow up.
    advantages[np.ptp(groups, axis=1) == 0] = 0.0
    return advantages.reshape(-1).astype(np.float32)
