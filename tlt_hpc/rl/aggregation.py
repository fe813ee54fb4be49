"""How the losses of a step's tokens become one number: a weight for each response's tokens; knows no tensors.

The weights are of one optimiser step's responses, of all ranks and micro-batches, so that neither how they are sharded
nor how they are cut changes the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.config.recipes import AggregationName


def token_weights(lengths: Sequence[int], kind: AggregationName, norm_length: int) -> NDArray[np.float64]:
    """What each token of a response counts in the sum of losses; [N], for N responses.

    ``token-mean``: 1 / sum of lengths (DAPO, eq. 8). ``seq-mean-token-mean``: 1 / (N * own length) (DeepSeekMath, eq.
    3). ``seq-mean-token-sum``: 1 / N (RLOO). ``seq-mean-token-sum-norm``: 1 / (N * norm_length) (Dr.GRPO, section 3.2).

    Args:
        lengths: response tokens of each, at least 1.
        norm_length: the constant length, used by the last kind alone.
    """
    own = np.asarray(lengths, dtype=np.float64)
    assert own.size and own.min() >= 1 and norm_length >= 1, "responses of at least one token"
    if kind == "token-mean":
        return np.full(own.size, 1.0 / own.sum())
    if kind == "seq-mean-token-mean":
        return 1.0 / (own.size * own)
    if kind == "seq-mean-token-sum":
        return np.full(own.size, 1.0 / own.size)
    if kind == "seq-mean-token-sum-norm":
        return np.full(own.size, 1.0 / (own.size * norm_length))
    assert_never(kind)
