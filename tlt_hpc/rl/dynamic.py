"""Dynamic sampling: which groups of a step teach anything, and how many more to draw (DAPO, 2503.14476, section 3.2).

Pure functions of scores, so that a step taken up from the log draws, keeps and leaves out what the run did.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

LEAST_SHARE = 0.125
"""Share of groups that is taken to teach where fewer did: a step of dead groups does not draw without bound."""


def teaching(scores: NDArray[np.float32], group_size: int) -> NDArray[np.bool_]:
    """Which groups' scores are not all equal, so that their advantages are not all 0; [N / group_size].

    Args:
        scores: [N], group by group.
    """
    groups = scores.reshape(-1, group_size)
    return np.asarray((groups != groups[:, :1]).any(axis=1))


def refill_size(teaches: NDArray[np.bool_], wanted: int) -> int:
    """How many more groups to draw so that ``wanted`` teach, by the share that did; 0 where they do already.

    At most ``wanted``: a refill is no larger than a step's own rollout.
    """
    missing = wanted - int(teaches.sum())
    if missing <= 0:
        return 0
    share = max(float(teaches.mean()), LEAST_SHARE)
    return min(wanted, math.ceil(missing / share))


def chosen(teaches: NDArray[np.bool_], wanted: int) -> NDArray[np.int64]:
    """The groups to train on, [wanted], in the order in which they were drawn.

    The first that teach; where they are too few, the first of the others fill up, as they would be there without
    dynamic sampling.
    """
    order = np.concatenate([np.flatnonzero(teaches), np.flatnonzero(~teaches)])
    return np.sort(order[:wanted])
