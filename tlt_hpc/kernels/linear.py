"""Linear layers, and those of a mixture of experts, in which an output row depends on its own input row alone.

Libraries choose how they sum by the number of rows, so a token's numbers differ in their last bits between a pass of
one token and one of several. In half precision that is enough to choose another token. Knows no model and no router.
A pair is a token with one of its experts: pair ``p`` is of token ``p // k``. Nothing is read back to the host on a GPU,
and no shape depends on the choice of experts, so that a pass can be captured in a graph.
Shapes: ``T`` tokens, ``N`` outputs, ``K`` inputs, ``k`` experts of each token, ``P`` = T k pairs, ``E`` experts.
"""

from __future__ import annotations

from typing import NamedTuple

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


class PairOrder(NamedTuple):
    """Pairs of tokens and experts, sorted by their experts."""

    pairs: Tensor
    """[P] int64: those of the first expert, then those of the second, ..., each in ascending order."""
    ends: Tensor
    """[E] int64: where each expert's end in ``pairs``."""


def sort_by_expert(experts: Tensor, num_experts: int) -> PairOrder:
    """Sort the pairs of tokens and their experts, [T, k] int64, by expert."""
    flat = experts.flatten()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    return PairOrder(flat.sort(stable=True).indices, counts.cumsum(0))


def expert_linear(x: Tensor, weight: Tensor, order: PairOrder, num_shared: int) -> Tensor:
    """Multiply each pair's input by its expert's matrix, summed in float32 at least: weight [E, N, K] -> [P, N].

    ``num_shared`` pairs in a row have the same input: x [P / num_shared, K].
    """
    assert x.dtype == weight.dtype and x.shape[1] == weight.shape[2] and len(order.ends) == len(weight)
    assert len(x) * num_shared == len(order.pairs) and weight.is_contiguous() and x.stride(1) == 1
    if not runs_triton(x):
        return expert_linear_reference(x, weight, order, num_shared)
    from tlt_hpc.kernels.programs import linear

    return linear.expert_linear(x, weight, order.pairs, order.ends, num_shared)


def expert_linear_reference(x: Tensor, weight: Tensor, order: PairOrder, num_shared: int) -> Tensor:
    """``expert_linear`` in plain PyTorch; half precision in float64, whose rounding does not show. Shapes: as there."""
    out = x.new_empty(len(order.pairs), weight.shape[1])
    wide = torch.float64 if x.dtype.itemsize < 4 else x.dtype
    ends = order.ends.tolist()
    for matrix, start, end in zip(weight, [0, *ends], ends, strict=False):
        if start < end:
            pairs = order.pairs[start:end]
            out[pairs] = F.linear(x[pairs // num_shared].to(wide), matrix.to(wide)).to(x.dtype)
    return out


def sum_weighted_experts(parts: Tensor, weights: Tensor) -> Tensor:
    """Sum each token's parts times their weights, in the order of the parts: [P, N], [T, k] -> [T, N]."""
    total = parts.new_zeros(len(weights), parts.shape[1], dtype=weights.dtype)
    for part, weight in zip(parts.view(*weights.shape, -1).unbind(1), weights.unbind(1), strict=True):
        total.addcmul_(part, weight.unsqueeze(1))  # one after another: a sum over them may depend on T
    return total.to(parts.dtype)
