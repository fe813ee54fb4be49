"""Triton program of the products with experts' matrices, in which a row depends on its own input alone.

Each expert's pairs are taken in tiles of TOKENS; an upper bound of the number of tiles is known without the choice, and
programs beyond the last tile end at once. The inner dimension is summed by the matrix unit in steps of INNER, in order.
Weights are the left factor: the number of pairs changes the width of the instruction, not what it sums.
Shapes: as in ``kernels.experts``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_INNER, _ROWS = 64, 64


@triton.jit
def _multiply_experts(
    x, weight, pairs, ends, tile_ends, out, num_shared, num_experts, N, K, x_stride,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    number = tl.arange(0, EXPERTS)
    listed = tl.load(tile_ends + number, mask=number < num_experts, other=2147483647)
    expert = tl.sum((listed <= tile).to(tl.int32), 0)
    if expert < num_experts:
        before = tl.maximum(expert - 1, 0)
        first_tile = tl.where(expert > 0, tl.load(tile_ends + before), 0)
        first_pair = tl.where(expert > 0, tl.load(ends + before), 0)
        place = first_pair + (tile - first_tile) * TOKENS + tl.arange(0, TOKENS)
        inside = place < tl.load(ends + expert)
        pair = tl.load(pairs + place, mask=inside, other=0)
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        inner = tl.arange(0, INNER)
        at_weight = weight + expert.to(tl.int64) * N * K + row.to(tl.int64)[:, None] * K + inner[None, :]
        at_x = x + (pair // num_shared)[None, :] * x_stride + inner[:, None]
        total = tl.zeros((ROWS, TOKENS), tl.float32)
        for start in range(0, K, INNER):
            within = start + inner < K
            w = tl.load(at_weight + start, mask=(row < N)[:, None] & within[None, :], other=0.0)
            b = tl.load(at_x + start, mask=inside[None, :] & within[:, None], other=0.0)
            total = tl.dot(w, b, total, input_precision=PRECISION)
        at = out + pair[None, :] * N + row[:, None]
        tl.store(at, total.to(out.dtype.element_ty), mask=(row < N)[:, None] & inside[None, :])


def expert_linear(x: Tensor, weight: Tensor, pairs: Tensor, ends: Tensor, num_shared: int) -> Tensor:
    """Arguments as the public function's -> [P, N]."""
    (num_experts, N, K), num_pairs = weight.shape, len(pairs)
    out = torch.empty((num_pairs, N), dtype=x.dtype, device=x.device)
    if not num_pairs:
        return out
    tokens = 16 if num_pairs <= 16 * num_experts else 64
    counts = ends.diff(prepend=ends.new_zeros(1))
    tile_ends = ((counts + tokens - 1) // tokens).cumsum(0)
    most = min(num_pairs, num_pairs // tokens + num_experts)
    _multiply_experts[(most, triton.cdiv(N, _ROWS))](
        x, weight, pairs, ends, tile_ends, out, num_shared, num_experts, N, K, x.stride(0),
        _ROWS, tokens, _INNER, triton.next_power_of_2(num_experts), "ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    return out
