"""Triton programs for attention over paged keys and values, in which a query's result does not depend on the pass.

All query heads that share a key-value head, of several queries, form the rows of one tile, so that no key is read twice
for them. Slots are read in tiles of KEYS that begin at multiples of it, tiles are folded in order into one partial
result for every SPAN slots, and the partial results are joined in order. So a row adds the same numbers in the same
order in any pass, whether one program takes all its spans or each its own.
All tiles have the same shape, so that sums within a tile are alike too, and the compiler fuses no multiplication with
an addition, which it would do differently from program to program.
Shapes: ``B`` sequences, ``N`` queries of each, ``h`` query heads, ``g`` key-value heads, ``G`` = h / g, ``d`` head
size. Rows of a sequence and key-value head: r = query * G + head within the group. Scores are in base 2.
Split-KV decoding: "Flash-Decoding" (Dao, Haziza, Massa, Sizov, 2023).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634
_WAVES = 2
"""Programs wanted per multiprocessor."""
SPAN = 256
"""Slots of a partial result."""


class Tile(NamedTuple):
    """How a program is compiled; the same for all passes of a model on a GPU, as rows and keys decide bits."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    """Of the loop over slots that all rows share. With 5, a tile's keys and values are loaded while the one before is
    used: page numbers, which come first, take half of the stages.
    """
    path_stages: int
    """Of the loop over a tree's own slots, which are one or two tiles."""


EXACT, HALF, HOPPER = Tile(16, 16, 4, 2, 2), Tile(16, 32, 4, 5, 1), Tile(64, 32, 4, 5, 1)
"""Of float32, which is multiplied without the matrix unit, for checks rather than for speed; of half precision, with
the fewest rows that the unit takes; and where it takes 64 at once.
"""
_MOST_TALL_HEAD = 128
"""With larger heads 64 rows need far more registers than there are."""


@cache
def _is_hopper(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index)[0] == 9


def is_hopper(x: Tensor) -> bool:
    """Whether the tensor is on a GPU whose matrix unit takes 64 rows at once, as Triton uses it."""
    return x.is_cuda and _is_hopper(x.device.index or 0)


def tile_of(query: Tensor) -> Tile:
    """The tile for queries of this precision and head size on their GPU."""
    if query.dtype == torch.float32:
        return EXACT
    return HOPPER if query.shape[-1] <= _MOST_TALL_HEAD and is_hopper(query) else HALF


@triton.jit
def _fold(
    query, top, total, mixed, page, offset, inside, visible, scale,
    keys, values, key_page_stride, key_slot_stride, value_page_stride, value_slot_stride,
    d: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of slots folded into the running maximum [ROWS], sum [ROWS] and weighted values.

    ``inside`` [KEYS]: slots that some row sees; what stands at others may be NaN. ``visible`` [ROWS, KEYS].
    """
    column = tl.arange(0, WIDE)
    address = page * key_page_stride + offset * key_slot_stride
    key = tl.load(keys + address[None, :] + column[:, None], mask=inside[None, :] & (column[:, None] < d), other=0.0)
    score = tl.dot(query, key, input_precision=PRECISION) * scale
    score = tl.where(visible, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    floor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score - floor[:, None])
    shrink = tl.exp2(top - floor)
    address = page * value_page_stride + offset * value_slot_stride
    value = tl.load(
        values + address[:, None] + column[None, :], mask=inside[:, None] & (column[None, :] < d), other=0.0
    )
    weight = weight.to(value.dtype)
    mixed = tl.dot(weight, value, mixed * shrink[:, None], input_precision=PRECISION)
    return new_top, total * shrink + tl.sum(weight.to(tl.float32), 1), mixed


@triton.jit
def _fold_paths(
    query, top, total, mixed, tile, first, last, prefix, real, at, scale, keys, values, table, seen, paths, path_width,
    key_page_stride, key_slot_stride, value_page_stride, value_slot_stride,
    N, page_size: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, d: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Places from ``first`` to ``last`` of a tree's queries, each by itself: its ancestors stand as in a chain."""
    for one in range(tile * ROWS // G, tl.minimum(tl.cdiv((tile + 1) * ROWS, G), N)):
        end = prefix + tl.load(seen + one)
        for start in tl.range(first, tl.minimum(last, end), KEYS, num_stages=STAGES):
            place = start + tl.arange(0, KEYS)
            inside = place < end
            own = place - prefix
            node = tl.load(paths + one * path_width + own, mask=inside & (own >= 0), other=0)
            slot = tl.where(own < 0, place, prefix + node)
            if WINDOW:
                inside = inside & (place >= end - WINDOW)
            page = tl.load(table + slot // page_size, mask=inside, other=0).to(tl.int64)
            top, total, mixed = _fold(
                query, top, total, mixed, page, (slot % page_size).to(tl.int64), inside,
                inside[None, :] & (real & (at == one))[:, None], scale, keys, values,
                key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, d, WIDE, PRECISION,
            )  # fmt: skip
    return top, total, mixed


@triton.jit
def _join(top, total, lse):
    """A partial result's maximum joined to the running one: new maximum and sum, and the weights of old and new."""
    new_top = tl.maximum(top, lse)
    floor = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink, weight = tl.exp2(top - floor), tl.exp2(lse - floor)
    return new_top, total * shrink + weight, shrink, weight


_VARYING = ["N", "path_width", "num_spans", "table_stride"]
"""Sizes of a pass: each value would otherwise be compiled for itself, while others wait for their tokens."""


@triton.jit(do_not_specialize=_VARYING)
def _attend(
    query, key_pages, value_pages, page_table, committed, seen, paths, out, partial_lse, scale,
    query_row_stride, query_stride, table_stride,
    key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, path_width, num_spans, N,
    page_size: tl.constexpr, h: tl.constexpr, g: tl.constexpr, d: tl.constexpr, SPAN: tl.constexpr,
    IS_TREE: tl.constexpr, IS_WHOLE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, WINDOW: tl.constexpr, PATH_STAGES: tl.constexpr,
):  # fmt: skip
    """IS_WHOLE: out [B, N, h, d], by one program for all spans; else partial results [B, N, h, spans, d] in fp32 and
    partial_lse [B, N, h, spans] in base 2, by a program for each span.
    """
    G: tl.constexpr = h // g
    tile = tl.program_id(0)
    sequence = (tl.program_id(1) // g).to(tl.int64)
    group = tl.program_id(1) % g
    row = tile * ROWS + tl.arange(0, ROWS)
    real = row < N * G
    at = row // G
    head = group * G + row % G
    column = tl.arange(0, WIDE)

    address = sequence * query_row_stride + at.to(tl.int64) * query_stride + head * d
    q = tl.load(query + address[:, None] + column[None, :], mask=real[:, None] & (column[None, :] < d), other=0.0)
    prefix = tl.load(committed + sequence)
    limit = tl.where(real, prefix + tl.load(seen + sequence * N + at, mask=real, other=0), 0)
    reach = tl.max(limit, 0)
    floor = 0  # slots below it no row of the tile sees; a tile that nobody sees would change no bit
    if WINDOW:
        floor = tl.maximum(tl.min(tl.where(real, limit, reach), 0) - WINDOW, 0)

    keys = key_pages + group * d
    values = value_pages + group * d
    table = page_table + sequence * table_stride
    whole_top = tl.full((ROWS,), float("-inf"), tl.float32)
    whole_total = tl.full((ROWS,), 0.0, tl.float32)
    whole = tl.full((ROWS, WIDE), 0.0, tl.float32)
    first_span = floor // SPAN if IS_WHOLE else tl.program_id(2)
    last_span = tl.cdiv(reach, SPAN) if IS_WHOLE else tl.minimum(tl.program_id(2) + 1, tl.cdiv(reach, SPAN))
    for span in range(first_span, last_span):
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.full((ROWS,), 0.0, tl.float32)
        mixed = tl.full((ROWS, WIDE), 0.0, tl.float32)
        last = tl.minimum(span * SPAN + SPAN, reach)
        first = tl.maximum(span * SPAN, floor // KEYS * KEYS)
        shared = last
        if IS_TREE:  # whole tiles of the prefix are the same for all queries of a tree
            shared = tl.minimum(last, tl.maximum(first, prefix // KEYS * KEYS))
        for start in range(first, shared, KEYS):
            slot = start + tl.arange(0, KEYS)
            visible = slot[None, :] < limit[:, None]
            if WINDOW:
                visible = visible & (slot[None, :] >= limit[:, None] - WINDOW)
            if page_size % KEYS == 0:  # one page number for the tile
                page = tl.load(table + start // page_size).to(tl.int64)
                offset = (start % page_size + tl.arange(0, KEYS)).to(tl.int64)
            else:
                page = tl.load(table + slot // page_size, mask=slot < reach, other=0).to(tl.int64)
                offset = (slot % page_size).to(tl.int64)
            top, total, mixed = _fold(
                q, top, total, mixed, page, offset, slot < reach, visible, scale, keys, values,
                key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, d, WIDE, PRECISION,
            )  # fmt: skip
        if IS_TREE:
            top, total, mixed = _fold_paths(
                q, top, total, mixed, tile, shared, last, prefix, real, at, scale, keys, values, table,
                seen + sequence * N, paths + sequence * N * path_width, path_width,
                key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, N, page_size, G, ROWS, KEYS, d,
                WIDE, PRECISION, WINDOW, PATH_STAGES,
            )  # fmt: skip
        part = mixed / tl.where(total > 0, total, 1.0)[:, None]
        lse = tl.where(total > 0, top + tl.log2(total), float("-inf"))
        if IS_WHOLE:
            whole_top, whole_total, shrink, weight = _join(whole_top, whole_total, lse)
            whole = whole * shrink[:, None] + part * weight[:, None]
        else:
            place = ((sequence * N + at) * h + head) * num_spans + span
            tl.store(out + place[:, None] * d + column[None, :], part, mask=real[:, None] & (column[None, :] < d))
            tl.store(partial_lse + place, lse, mask=real)
    if IS_WHOLE:
        whole = whole / tl.where(whole_total > 0, whole_total, 1.0)[:, None]
        place = (sequence * N + at) * h + head
        tl.store(
            out + place[:, None] * d + column[None, :],
            whole.to(out.dtype.element_ty),
            mask=real[:, None] & (column[None, :] < d),
        )


@triton.jit(do_not_specialize=_VARYING)
def _join_spans(
    partial, partial_lse, committed, seen, out, num_spans, N,
    h: tl.constexpr, d: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Joins partial results as ``_attend`` does where it takes all spans."""
    place = tl.program_id(0).to(tl.int64)
    query = place // h
    column = tl.arange(0, WIDE)
    limit = tl.load(committed + query // N) + tl.load(seen + query)
    whole_top = float("-inf")
    whole_total = 0.0
    whole = tl.full((WIDE,), 0.0, tl.float32)
    for span in range(0, tl.cdiv(limit, SPAN)):
        at = place * num_spans + span
        lse = tl.load(partial_lse + at)
        part = tl.load(partial + at * d + column, mask=column < d, other=0.0)
        whole_top, whole_total, shrink, weight = _join(whole_top, whole_total, lse)
        whole = whole * shrink + part * weight
    whole = whole / tl.where(whole_total > 0, whole_total, 1.0)
    tl.store(out + place * d + column, whole.to(out.dtype.element_ty), mask=column < d)


@cache
def _num_multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def num_multiprocessors(x: Tensor) -> int:
    """Those of the tensor's GPU; 2 on a CPU."""
    return _num_multiprocessors(x.device.index or 0) if x.is_cuda else 2


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    committed: Tensor,
    seen: Tensor,
    paths: Tensor | None,
    by_span: bool | None,
    window: int,
) -> Tensor:
    """Arguments as the public function's -> [B, N, h * d]; ``by_span``: a program for each span; None: by shape."""
    B, N, h, d = query.shape
    page_size, g = key_pages.shape[1], key_pages.shape[2]
    out = torch.empty((B, N, h * d), dtype=query.dtype, device=query.device)
    if not out.numel():
        return out
    tile = tile_of(query)
    tiles, num_spans = triton.cdiv(N * (h // g), tile.rows), triton.cdiv(page_table.shape[1] * page_size, SPAN)
    if by_span is None:
        by_span = num_spans > 1 and tiles * B * g < _WAVES * num_multiprocessors(query)
    target, lse = out, out  # without spans of their own, nobody writes the latter
    if by_span:
        target = torch.empty((B, N, h, num_spans, d), dtype=torch.float32, device=query.device)
        lse = torch.empty((B, N, h, num_spans), dtype=torch.float32, device=query.device)
    wide = max(16, triton.next_power_of_2(d))
    _attend[(tiles, B * g, num_spans if by_span else 1)](
        query, key_pages, value_pages, page_table, committed, seen, seen if paths is None else paths, target, lse,
        _LOG2_E * d**-0.5, query.stride(0), query.stride(1), page_table.stride(0),
        key_pages.stride(0), key_pages.stride(1), value_pages.stride(0), value_pages.stride(1),
        0 if paths is None else paths.shape[2], num_spans, N,
        page_size, h, g, d, SPAN, paths is not None, not by_span, tile.rows, tile.keys, wide,
        "ieee" if tile is EXACT else "tf32", window, tile.path_stages, num_warps=tile.num_warps,
        num_stages=tile.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    if by_span:
        _join_spans[(B * N * h,)](
            target, lse, committed, seen, out, num_spans, N, h, d, SPAN, wide, num_warps=1, enable_fp_fusion=False
        )
    return out
