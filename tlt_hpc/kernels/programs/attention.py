"""Triton programs for attention of draft trees over paged keys and values: split over slots, joined by log-sum-exp.

All query heads that share a key-value head, of all nodes, form the rows of one tile, so that no key is read twice for
them. Shapes: ``B`` sequences, ``N`` nodes, ``h`` query heads, ``g`` key-value heads, ``G`` = h / g, ``d`` head size.
Rows of a sequence and key-value head: r = node * G + head within the group. Scores are in base 2.
Split-KV decoding: "Flash-Decoding" (Dao, Haziza, Massa, Sizov, 2023).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634
_MAX_SPLITS = 64
_WAVES = 2
"""Programs wanted per multiprocessor."""


@triton.jit
def _fold(
    query, top, total, mixed, start, limit, committed, mask, scale,
    keys, values, table, key_page_stride, key_slot_stride, value_page_stride, value_slot_stride,
    page_size: tl.constexpr, MASKED: tl.constexpr, KEYS: tl.constexpr, d: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of KEYS slots from ``start`` on folded into the running maximum, sum and weighted values."""
    slot = start + tl.arange(0, KEYS)
    inside = slot < limit
    page = tl.load(table + slot // page_size, mask=inside, other=0).to(tl.int64)
    offset = (slot % page_size).to(tl.int64)
    column = tl.arange(0, WIDE)
    address = page * key_page_stride + offset * key_slot_stride
    key = tl.load(keys + address[None, :] + column[:, None], mask=inside[None, :] & (column[:, None] < d), other=0.0)
    score = tl.dot(query, key, input_precision=PRECISION) * scale
    if MASKED:
        node = slot - committed
        bit = tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)
        own = ((mask[:, None] >> bit[None, :]) & 1) != 0
        visible = inside[None, :] & ((node < 0)[None, :] | own)
        score = tl.where(visible, score, float("-inf"))
        # a padding node's slot holds whatever was there before, and zero times NaN would be NaN
        inside = inside & (tl.max(visible.to(tl.int32), 0) > 0)
    new_top = tl.maximum(top, tl.max(score, 1))
    floor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score - floor[:, None])
    shrink = tl.exp2(top - floor)
    address = page * value_page_stride + offset * value_slot_stride
    value = tl.load(
        values + address[:, None] + column[None, :], mask=inside[:, None] & (column[None, :] < d), other=0.0
    )
    mixed = mixed * shrink[:, None]
    mixed = tl.dot(weight.to(value.dtype), value, mixed, input_precision=PRECISION)
    return new_top, total * shrink + tl.sum(weight, 1), mixed


@triton.jit
def _attend(
    query, key_pages, value_pages, page_table, committed, tree_mask, partial, partial_lse, scale,
    query_row_stride, query_node_stride, table_stride,
    key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, num_splits,
    page_size: tl.constexpr, N: tl.constexpr, h: tl.constexpr, g: tl.constexpr, d: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """partial [B, N, h, splits, d] in the output's or in fp32, partial_lse [B, N, h, splits] in base 2."""
    G: tl.constexpr = h // g
    tile = tl.program_id(0)
    sequence = (tl.program_id(1) // g).to(tl.int64)
    group = tl.program_id(1) % g
    split = tl.program_id(2)
    row = tile * ROWS + tl.arange(0, ROWS)
    real = row < N * G
    node = row // G
    head = group * G + row % G
    column = tl.arange(0, WIDE)

    address = sequence * query_row_stride + node.to(tl.int64) * query_node_stride + head * d
    q = tl.load(query + address[:, None] + column[None, :], mask=real[:, None] & (column[None, :] < d), other=0.0)
    mask = tl.load(tree_mask + sequence * N + node, mask=real, other=0)
    prefix = tl.load(committed + sequence)
    length = prefix + N
    share = tl.cdiv(tl.cdiv(length, num_splits), KEYS) * KEYS
    first = split * share
    last = tl.minimum(first + share, length)
    clear = tl.minimum(prefix, last) // KEYS * KEYS  # tiles before it lie in the prefix as a whole

    keys = key_pages + group * d
    values = value_pages + group * d
    table = page_table + sequence * table_stride
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    mixed = tl.full((ROWS, WIDE), 0.0, tl.float32)
    for start in range(first, clear, KEYS):
        top, total, mixed = _fold(
            q, top, total, mixed, start, last, prefix, mask, scale, keys, values, table,
            key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, page_size,
            False, KEYS, d, WIDE, PRECISION,
        )  # fmt: skip
    for start in range(tl.maximum(first, clear), last, KEYS):
        top, total, mixed = _fold(
            q, top, total, mixed, start, last, prefix, mask, scale, keys, values, table,
            key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, page_size,
            True, KEYS, d, WIDE, PRECISION,
        )  # fmt: skip

    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    place = ((sequence * N + node) * h + head) * num_splits + split
    out = partial + place[:, None] * d + column[None, :]
    tl.store(out, mixed.to(partial.dtype.element_ty), mask=real[:, None] & (column[None, :] < d))
    tl.store(partial_lse + place, tl.where(total > 0, top + tl.log2(total), float("-inf")), mask=real)


@triton.jit
def _join_splits(partial, partial_lse, out, num_splits, d: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, WIDE)
    lse = tl.load(partial_lse + place * num_splits + split, mask=split < num_splits, other=float("-inf"))
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    part = tl.load(
        partial + (place * num_splits + split)[:, None] * d + column[None, :],
        mask=(split < num_splits)[:, None] & (column[None, :] < d),
        other=0.0,
    )
    mixed = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + place * d + column, mixed.to(out.dtype.element_ty), mask=column < d)


@cache
def _num_multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def choose_splits(num_programs: int, num_slots: int, keys: int, num_multiprocessors: int) -> int:
    """Splits that fill the GPU a few times over, each of one tile of keys at least at the longest length.

    A function of shapes alone: a CUDA graph fixes it, and lengths are read on the device.
    """
    wanted = triton.cdiv(_WAVES * num_multiprocessors, num_programs)
    return int(max(1, min(wanted, _MAX_SPLITS, triton.cdiv(num_slots, keys))))


def tile_shape(num_rows: int, d: int, exact: bool) -> tuple[int, int, int, int]:
    """Rows and keys of a tile, warps, and stages of the load pipeline, chosen so that no register spills.

    float32 is multiplied without tensor cores, for checks rather than for speed: small tiles.
    """
    if exact:
        return 16, 32, 8, 2
    rows = min(64, max(16, triton.next_power_of_2(num_rows)))
    return rows, 64, 8 if rows == 64 else 4, 3 if d <= 128 else 2


def paged_tree_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    committed: Tensor,
    tree_mask: Tensor,
    num_splits: int | None,
) -> Tensor:
    """Arguments as the public function's -> [B, N, h * d]."""
    B, N, h, d = query.shape
    page_size, g = key_pages.shape[1], key_pages.shape[2]
    exact = query.dtype == torch.float32
    rows, keys, num_warps, num_stages = tile_shape(N * (h // g), d, exact)
    tiles = triton.cdiv(N * (h // g), rows)
    if num_splits is None:
        multiprocessors = _num_multiprocessors(query.device.index or 0) if query.is_cuda else 2
        num_splits = choose_splits(tiles * B * g, page_table.shape[1] * page_size, keys, multiprocessors)
    out = torch.empty((B, N, h * d), dtype=query.dtype, device=query.device)
    if not out.numel():
        return out
    alone = num_splits == 1
    partial = out if alone else torch.empty((B, N, h, num_splits, d), dtype=torch.float32, device=query.device)
    partial_lse = torch.empty((B, N, h, num_splits), dtype=torch.float32, device=query.device)
    wide = max(16, triton.next_power_of_2(d))
    _attend[(tiles, B * g, num_splits)](
        query, key_pages, value_pages, page_table, committed, tree_mask, partial, partial_lse, _LOG2_E * d**-0.5,
        query.stride(0), query.stride(1), page_table.stride(0),
        key_pages.stride(0), key_pages.stride(1), value_pages.stride(0), value_pages.stride(1), num_splits,
        page_size, N, h, g, d, rows, keys, wide, "ieee" if exact else "tf32",
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if not alone:
        _join_splits[(B * N * h,)](
            partial, partial_lse, out, num_splits, d, wide, triton.next_power_of_2(num_splits), num_warps=2
        )
    return out
