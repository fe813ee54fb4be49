"""RMSNorm with the residual sum, the gate of an MLP, and the rotary embedding with the write of keys and values.

One pass over memory each; arithmetic is float32 (float64 for float64), rounded once at the end, on every path. Knows no
layer, no page table and no sequence. A slot numbers one token's place in the pages: page * page_size + offset.
Shapes: ``T`` tokens, ``H`` hidden, ``I`` intermediate, ``h`` query heads, ``g`` key-value heads, ``d`` head size, ``P``
positions of the rotary table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.kernels.dispatch import runs_triton


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm of the last dimension: x [..., H], weight [H] -> [..., H]."""
    assert weight.shape == x.shape[-1:]
    if not runs_triton(x):
        return rms_norm_reference(x, weight, epsilon)
    from tlt_hpc.kernels.programs import pointwise

    return pointwise.rms_norm(_as_contiguous_rows(x), weight, epsilon).view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The residual sum and its norm: x, residual [T, H], weight [H] -> (normed, x + residual), both [T, H]."""
    assert x.shape == residual.shape and x.dtype == residual.dtype and weight.shape == x.shape[-1:]
    if not runs_triton(x):
        return add_rms_norm_reference(x, residual, weight, epsilon)
    from tlt_hpc.kernels.programs import pointwise

    return pointwise.add_rms_norm(_as_contiguous_rows(x), residual.contiguous(), weight, epsilon)


def gate_mul(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """An activation of the first half of each row times the second: gate_up [T, 2I] -> [T, I]."""
    assert gate_up.shape[-1] % 2 == 0 and activation in ("silu", "gelu_pytorch_tanh")
    if not runs_triton(gate_up):
        return gate_mul_reference(gate_up, activation)
    from tlt_hpc.kernels.programs import pointwise

    return pointwise.gate_mul(gate_up.contiguous(), activation == "silu")


def rms_norm_reference(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """``rms_norm`` in plain PyTorch: x [..., H], weight [H] -> [..., H]."""
    return F.rms_norm(_at_least_float32(x), (x.shape[-1],), _at_least_float32(weight), epsilon).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """``add_rms_norm`` in plain PyTorch: x, residual [T, H], weight [H] -> (normed, x + residual), both [T, H].

    The norm reads the sum as the residual stream keeps it, rounded.
    """
    total = x + residual
    return rms_norm_reference(total, weight, epsilon), total


def gate_mul_reference(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """``gate_mul`` in plain PyTorch: gate_up [T, 2I] -> [T, I]."""
    gate, up = _at_least_float32(gate_up).chunk(2, -1)
    return ((F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up).to(gate_up.dtype)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _as_contiguous_rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


# (query weight [d], key weight [d], epsilon) of the norms that some families put before the rotation
HeadNorms = tuple[Tensor, Tensor, float]


def rotate_and_store(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    positions: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slots: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotate queries and keys, store keys and values in their pages, and return the queries.

    qkv [T, h + 2g, d], cosine and sine [P, d] with the sine's first half negated, positions [T],
    key_pages and value_pages [num_pages, page_size, g, d] (written in place), slots [T] int64
    -> query [T, h, d]. Where tokens share a slot, each number that stands there is one of theirs: good for tokens that
    agree, and for a slot that nobody reads. With ``norms`` each head of the queries and keys is RMS-normed first
    (Qwen3). Nothing waits for the device.
    """
    T, heads, d = qkv.shape
    assert cosine.shape == sine.shape and cosine.shape[1] == d and d % 2 == 0
    assert positions.shape == slots.shape == (T,)
    assert key_pages.shape == value_pages.shape and heads > 2 * key_pages.shape[2] and key_pages.shape[3] == d
    assert key_pages.stride()[2:] == value_pages.stride()[2:] == (d, 1) and qkv.stride()[1:] == (d, 1)
    assert cosine.is_contiguous() and sine.is_contiguous()
    if not runs_triton(qkv):
        return rotate_and_store_reference(qkv, cosine, sine, positions, key_pages, value_pages, slots, norms)
    from tlt_hpc.kernels.programs import pointwise

    return pointwise.rotate_and_store(qkv, cosine, sine, positions, key_pages, value_pages, slots, norms)


def rotate_and_store_reference(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    positions: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slots: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """``rotate_and_store`` in plain PyTorch; arguments as there -> query [T, h, d]."""
    g = key_pages.shape[2]
    query, key, value = qkv[:, : -2 * g], qkv[:, -2 * g : -g], qkv[:, -g:]
    if norms is not None:
        query = rms_norm_reference(query, norms[0], norms[2])
        key = rms_norm_reference(key, norms[1], norms[2])
    angles = cosine[positions].unsqueeze(1), sine[positions].unsqueeze(1)
    at = slots // key_pages.shape[1], slots % key_pages.shape[1]
    key_pages[at] = _rotate(key, *angles).to(key_pages.dtype)
    value_pages[at] = value.to(value_pages.dtype)
    return _rotate(query, *angles)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    wide = x.float() if x.dtype.itemsize < 4 else x
    return (wide * cosine + wide.roll(x.shape[-1] // 2, -1) * sine).to(x.dtype)
