"""A linear layer in which an output row depends on its own input row alone. Knows no model.

Libraries choose how they sum by the number of rows, so a token's numbers differ in their last bits between a pass of
one token and one of several. In half precision that is enough to choose another token.
Shapes: ``T`` tokens, ``N`` outputs, ``K`` inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.kernels.dispatch import runs_triton


def invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    by_chunk: bool | None = None,
) -> Tensor:
    """x W^T + b, summed in float32, rounded once: x [T, K], weight [N, K], bias [N] -> [T, N].

    ``dtype`` is the result's; None: that of ``x``. ``by_chunk`` divides the inner dimension among programs, which
    changes the speed and not the result; None chooses by shape. Batch-invariant kernels: "Defeating Nondeterminism in
    LLM Inference" (He, Thinking Machines Lab, 2025).
    """
    assert x.dtype == weight.dtype and x.shape[1:] == weight.shape[1:] and x.stride(1) == weight.stride(1) == 1
    assert bias is None or bias.shape == weight.shape[:1]
    dtype = dtype or x.dtype
    if not runs_triton(x):
        return invariant_linear_reference(x, weight, bias, dtype)
    from tlt_hpc.kernels.programs import linear

    return linear.invariant_linear(x, weight, bias, dtype, by_chunk)


def invariant_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``invariant_linear`` in plain PyTorch: x [T, K], weight [N, K], bias [N] -> [T, N].

    It computes in float64: what other rows change there is lost in the rounding.
    """
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(dtype)
