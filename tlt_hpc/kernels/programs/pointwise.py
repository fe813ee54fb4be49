"""Triton programs of RMSNorm, with and without the residual sum, of the gate of an MLP, and of the rotary embedding.

The last norms and rotates queries and keys and writes keys and values into their pages, one program per token and block
of heads. Arithmetic is float32 whatever the tensors hold. Shapes: as in ``kernels.pointwise``, with ``T`` rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(x, residual, weight, normed, total, row_stride, epsilon, H: tl.constexpr, BLOCK: tl.constexpr,
              ADD: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    value = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * H + column, mask=inside, other=0.0).to(tl.float32)
        # the norm reads what the residual stream keeps, as it does when the sum is a pass of its own
        value = value.to(total.dtype.element_ty)
        tl.store(total + row * H + column, value, mask=inside)
        value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / H + epsilon)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * H + column, (value * scale * gain).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _gate_mul(gate_up, out, I: tl.constexpr, BLOCK: tl.constexpr, IS_SILU: tl.constexpr):  # noqa: E741
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < I
    gate = tl.load(gate_up + row * 2 * I + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * I + I + column, mask=inside, other=0.0).to(tl.float32)
    if IS_SILU:
        product = gate / (1.0 + tl.exp(-gate)) * up
    else:  # GELU by tanh(z): half of 1 + tanh(z) is 1 / (1 + exp(-2 z)), which loses no digits where z is negative
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        product = gate / (1.0 + tl.exp(-2.0 * z)) * up
    tl.store(out + row * I + column, product.to(out.dtype.element_ty), mask=inside)


def _num_warps(block: int) -> int:
    return min(16, max(1, block // 512))


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x [T, H] with any row stride, weight [H] -> [T, H]."""
    T, H = x.shape
    normed = torch.empty((T, H), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(H)
    if T:
        _rms_norm[(T,)](x, x, weight, normed, x, x.stride(0), epsilon, H, block, False, num_warps=_num_warps(block))
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x, residual [T, H], weight [H] -> normed sum and sum, both [T, H]."""
    T, H = x.shape
    normed, total = torch.empty_like(residual), torch.empty_like(residual)
    block = triton.next_power_of_2(H)
    if T:
        _rms_norm[(T,)](
            x, residual, weight, normed, total, x.stride(0), epsilon, H, block, True, num_warps=_num_warps(block)
        )
    return normed, total


def gate_mul(gate_up: Tensor, is_silu: bool) -> Tensor:
    """gate_up [T, 2I] -> [T, I]."""
    T, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((T, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    if T:
        grid = T, triton.cdiv(width, block)
        _gate_mul[grid](gate_up, out, width, block, is_silu, num_warps=max(1, block // 256))
    return out


_HEADS = 4


@triton.jit
def _rotate_and_store(
    qkv, cosine, sine, positions, query, key_pages, value_pages, slots, query_norm, key_norm, epsilon,
    token_stride, position_stride, slot_stride, table_stride,
    key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, page_size,
    h: tl.constexpr, g: tl.constexpr, d: tl.constexpr, NORMED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    half: tl.constexpr = d // 2
    inside = (head < h + 2 * g) & (column < half)
    row = qkv + token * token_stride + head * d + column
    first = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(row + half, mask=inside, other=0.0).to(tl.float32)
    is_query = head < h
    is_value = head >= h + g
    if NORMED:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / d + epsilon)[:, None]
        low = tl.where(is_query, tl.load(query_norm + column, mask=column < half, other=0.0),
                       tl.load(key_norm + column, mask=column < half, other=0.0)).to(tl.float32)  # fmt: skip
        high = tl.where(is_query, tl.load(query_norm + half + column, mask=column < half, other=0.0),
                        tl.load(key_norm + half + column, mask=column < half, other=0.0)).to(tl.float32)  # fmt: skip
        # rounded as the norm of its own would leave it
        first = tl.where(is_value, first, (first * scale * low).to(qkv.dtype.element_ty).to(tl.float32))
        second = tl.where(is_value, second, (second * scale * high).to(qkv.dtype.element_ty).to(tl.float32))
    angle = tl.load(positions + token * position_stride).to(tl.int64) * table_stride + column
    cosine_low = tl.load(cosine + angle, mask=column < half, other=0.0).to(tl.float32)
    cosine_high = tl.load(cosine + angle + half, mask=column < half, other=0.0).to(tl.float32)
    sine_low = tl.load(sine + angle, mask=column < half, other=0.0).to(tl.float32)
    sine_high = tl.load(sine + angle + half, mask=column < half, other=0.0).to(tl.float32)
    low = tl.where(is_value, first, first * cosine_low + second * sine_low)
    high = tl.where(is_value, second, second * cosine_high + first * sine_high)

    out = query + token * h * d + head * d + column
    tl.store(out, low.to(query.dtype.element_ty), mask=inside & is_query)
    tl.store(out + half, high.to(query.dtype.element_ty), mask=inside & is_query)
    slot = tl.load(slots + token * slot_stride).to(tl.int64)
    page = slot // page_size
    offset = slot % page_size
    is_key = (head >= h) & (head < h + g) & inside
    out = key_pages + page * key_page_stride + offset * key_slot_stride + (head - h) * d + column
    tl.store(out, low.to(key_pages.dtype.element_ty), mask=is_key)
    tl.store(out + half, high.to(key_pages.dtype.element_ty), mask=is_key)
    out = value_pages + page * value_page_stride + offset * value_slot_stride + (head - h - g) * d + column
    tl.store(out, low.to(value_pages.dtype.element_ty), mask=is_value & inside)
    tl.store(out + half, high.to(value_pages.dtype.element_ty), mask=is_value & inside)


def rotate_and_store(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    positions: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slots: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    """Arguments as the public function's, heads of qkv contiguous; returns the query [T, h, d]."""
    T, heads, d = qkv.shape
    g = key_pages.shape[2]
    h = heads - 2 * g
    query = torch.empty((T, h, d), dtype=qkv.dtype, device=qkv.device)
    query_norm, key_norm, epsilon = norms or (qkv, qkv, 0.0)
    if T:
        _rotate_and_store[(T, triton.cdiv(heads, _HEADS))](
            qkv, cosine, sine, positions, query, key_pages, value_pages, slots, query_norm, key_norm, epsilon,
            qkv.stride(0), positions.stride(0), slots.stride(0), cosine.stride(0), key_pages.stride(0),
            key_pages.stride(1), value_pages.stride(0), value_pages.stride(1), key_pages.shape[1],
            h, g, d, norms is not None, _HEADS, triton.next_power_of_2(d // 2), num_warps=2,
        )  # fmt: skip
    return query
