"""Triton programs of linear layers in which an output row depends on its own input row alone, to the last bit.

The inner dimension is cut into chunks by the weight's shape. A chunk is summed by the matrix unit in steps of INNER,
and chunks are added up in order: by one program or, where there are few rows, by one for each and one that joins them.
Each expert's pairs are taken in tiles of TOKENS; an upper bound of the number of tiles is known without the choice, and
programs beyond the last tile end at once.
Weights are the left factor: the number of rows of a pass changes the width of the instruction, not what it sums.
Shapes: as in ``kernels.linear``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_hpc.kernels.programs.attention import num_multiprocessors

INNER = 64
_MAX_CHUNKS, _LEAST_CHUNK = 8, 512
_PROGRAMS = 256
"""Programs wanted for a few rows, about two for each multiprocessor; of no GPU in particular, for it decides bits."""
_ROWS = 64


@triton.jit(do_not_specialize=["T"])  # else prompts of different lengths would each compile it again
def _multiply(
    x, weight, bias, out, T, N, K, x_stride, weight_stride, chunk_size, num_chunks,
    HAS_BIAS: tl.constexpr, IS_WHOLE: tl.constexpr, IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """IS_WHOLE: out [T, N], by one program for all chunks; else sums in fp32 [chunks, T, N], by one for each."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inner = tl.arange(0, INNER)
    at_weight = weight + row.to(tl.int64)[:, None] * weight_stride + inner[None, :]
    at_x = x + token.to(tl.int64)[None, :] * x_stride + inner[:, None]
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    first = 0 if IS_WHOLE else tl.program_id(2)
    last = num_chunks if IS_WHOLE else tl.program_id(2) + 1
    for chunk in range(first, last):
        part = tl.zeros((ROWS, TOKENS), tl.float32)
        for start in range(chunk * chunk_size, tl.minimum((chunk + 1) * chunk_size, K), INNER):
            if IS_EVEN:
                w = tl.load(at_weight + start, mask=(row < N)[:, None], other=0.0)
                b = tl.load(at_x + start, mask=(token < T)[None, :], other=0.0)
            else:
                within = start + inner < K
                w = tl.load(at_weight + start, mask=(row < N)[:, None] & within[None, :], other=0.0)
                b = tl.load(at_x + start, mask=(token < T)[None, :] & within[:, None], other=0.0)
            part = tl.dot(w, b, part, input_precision=PRECISION)
        total += part
    place = token.to(tl.int64)[None, :] * N + row[:, None]
    inside = (row < N)[:, None] & (token < T)[None, :]
    if IS_WHOLE:
        if HAS_BIAS:
            total += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + tl.program_id(2).to(tl.int64) * T * N + place, total, mask=inside)


@triton.jit
def _join_chunks(
    sums, bias, out, size, N, num_chunks, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for chunk in range(num_chunks):
        total += tl.load(sums + chunk * size + at, mask=at < size, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % N, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


def choose_inner_chunks(N: int, K: int) -> tuple[int, int]:
    """Number of chunks of the inner dimension and their size: enough for many programs, by the weight's shape alone."""
    number = 1
    while number < _MAX_CHUNKS and triton.cdiv(N, _ROWS) * number < _PROGRAMS and K // (2 * number) >= _LEAST_CHUNK:
        number *= 2
    size = triton.cdiv(triton.cdiv(K, INNER), number) * INNER
    return int(triton.cdiv(K, size)), int(size)


def invariant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, by_chunk: bool | None
) -> Tensor:
    """Arguments as the public function's -> [T, N]; ``by_chunk``: a program for each chunk; None: by shape."""
    (T, K), N = x.shape, len(weight)
    out = torch.empty((T, N), dtype=dtype, device=x.device)
    if not T:
        return out
    tokens = min(128, max(16, triton.next_power_of_2(T)))
    rows, num_warps = (128, 8) if tokens == 128 else (_ROWS, 4)
    grid = triton.cdiv(T, tokens), triton.cdiv(N, rows)
    num_chunks, size = choose_inner_chunks(N, K)
    if by_chunk is None:
        by_chunk = num_chunks > 1 and grid[0] * grid[1] < 2 * num_multiprocessors(x)
    target = torch.empty((num_chunks, T, N), dtype=torch.float32, device=x.device) if by_chunk else out
    precision, given = "ieee" if x.dtype == torch.float32 else "tf32", weight if bias is None else bias
    _multiply[(*grid, num_chunks if by_chunk else 1)](
        x, weight, given, target, T, N, K, x.stride(0), weight.stride(0), size, num_chunks,
        bias is not None, not by_chunk, K % INNER == 0, rows, tokens, INNER, precision,
        num_warps=num_warps, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    if by_chunk:
        block = 512
        _join_chunks[(triton.cdiv(T * N, block),)](
            target, given, out, T * N, N, num_chunks, bias is not None, block, num_warps=4, enable_fp_fusion=False
        )
    return out


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
        _ROWS, tokens, INNER, triton.next_power_of_2(num_experts), "ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    return out
