"""Dynamic sampling: which groups of a step are informative, and how many more to draw (DAPO, 2503.14476, section 3.2).

Pure functions of scores, so that a step taken up from the log draws, keeps and leaves out what the run did.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

LEAST_SHARE = 0.125
"""Smallest share of informative groups that is assumed, so that a step of zero-variance groups draws no more."""


def informative(scores: NDArray[np.float32], group_size: int) -> NDArray[np.bool_]:
    """Which groups' scores are not all equal, so that their advantages are not all 0; [N / group_size].

    Args:
        scores: [N], group by group.
    """
    groups = scores.reshape(-1, group_size)
    return np.asarray((groups != groups[:, :1]).any(axis=1))


def refill_size(is_informative: NDArray[np.bool_], wanted: int) -> int:
    """How many more groups to draw so that ``wanted`` are informative, by the share so far; 0 if there are enough.

    At most ``wanted``: a refill is no larger than a step's own rollout.
    """
    missing = wanted - int(is_informative.sum())
    if missing <= 0:
        return 0
    share = max(float(is_informative.mean()), LEAST_SHARE)
    return min(wanted, math.ceil(missing / share))


def chosen(is_informative: NDArray[np.bool_], wanted: int) -> NDArray[np.int64]:
    """The groups to train on, [wanted], in the order in which they were drawn.

    The first informative ones; if they are too few, the first of the others, as without dynamic sampling.
    """
    order = np.concatenate([np.flatnonzero(is_informative), np.flatnonzero(~is_informative)])
    return np.sort(order[:wanted])
