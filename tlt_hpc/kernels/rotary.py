"""Rotary embedding fused with the write of keys and values into their pages. Knows no page table and no sequence.

Shapes: ``T`` tokens, ``h`` query heads, ``g`` key-value heads, ``d`` head size, ``P`` positions of the rotary table.
A slot numbers one token's place in the pages: slot = page * page_size + offset.
"""

from __future__ import annotations

from torch import Tensor

from tlt_hpc.kernels.dispatch import runs_triton
from tlt_hpc.kernels.pointwise import rms_norm_reference

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
    from tlt_hpc.kernels.programs import rotary

    return rotary.rotate_and_store(qkv, cosine, sine, positions, key_pages, value_pages, slots, norms)


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
