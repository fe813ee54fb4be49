"""Triton programs for RMSNorm, with and without the residual sum, and for the gate of an MLP.

Shapes: ``T`` rows, ``H`` hidden, ``I`` intermediate. Arithmetic is float32 whatever the tensors hold.
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
