"""Triton programs for attention over paged keys and values, in which a query's result does not depend on the pass.

All query heads that share a key-value head, of several queries, form the rows of one tile, so that no key is read twice
for them. Slots are read in tiles of KEYS that begin at multiples of it, tiles are folded in order into one partial
result for every SPAN slots, these are joined in order into one for every GROUP of spans, and those in order into the
whole. So a row adds the same numbers in the same order in any pass, whether a program takes a span or a group at once.
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
SPAN, GROUP = 256, 8
"""Slots of a span, and spans of a group."""
_SEQUENCES, _MOST_SEQUENCES = 256, 1024
"""For how many sequences a program is compiled at least, and at most: each program counts the parts of all of them."""
_CHEAP_ROWS = 16
"""Rows of a sequence and key-value head up to which the partial results of single spans are at most an eighth of what
is read and written.
"""
_PARTIAL_BYTES = 2**29
"""Most memory for partial results."""


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


_VARYING = ["B", "N", "path_width", "num_parts", "table_stride"]
"""Sizes of a pass: each value would otherwise be compiled for itself, while others wait for their tokens."""


@triton.jit
def _log_sum(top, total):
    """The logarithm, in base 2, of a sum of weights with its maximum taken out."""
    return tl.where(total > 0, top + tl.log2(total), float("-inf"))


@triton.jit
def _first_part(prefix, SLOTS: tl.constexpr, WINDOW: tl.constexpr):
    """The first part of so many slots of which a query after ``prefix`` committed ones may see any."""
    return tl.maximum(prefix - WINDOW, 0) // SLOTS if WINDOW else prefix * 0


@triton.jit
def _fold_span(
    q, span, tile, prefix, limit, reach, floor, real, at, scale, keys, values, table, seen, paths, path_width,
    key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, N,
    page_size: tl.constexpr, G: tl.constexpr, SPAN: tl.constexpr, IS_TREE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, d: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr,
    PATH_STAGES: tl.constexpr,
):  # fmt: skip
    """A tile's partial result of a span: weighted values [ROWS, WIDE] and the logarithm of the weights' sum [ROWS]."""
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
            q, top, total, mixed, tile, shared, last, prefix, real, at, scale, keys, values, table, seen, paths,
            path_width, key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, N, page_size, G, ROWS,
            KEYS, d, WIDE, PRECISION, WINDOW, PATH_STAGES,
        )  # fmt: skip
    part = mixed / tl.where(total > 0, total, 1.0)[:, None]
    return part, _log_sum(top, total)


@triton.jit(do_not_specialize=_VARYING)
def _attend(
    query, key_pages, value_pages, page_table, committed, seen, paths, partial, partial_lse, scale,
    query_row_stride, query_stride, table_stride,
    key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, path_width, num_parts, B, N,
    page_size: tl.constexpr, h: tl.constexpr, g: tl.constexpr, d: tl.constexpr, SPAN: tl.constexpr, EACH: tl.constexpr,
    SEQUENCES: tl.constexpr, IS_TREE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, WINDOW: tl.constexpr, PATH_STAGES: tl.constexpr,
):  # fmt: skip
    """partial [B, N, h, parts, d] and partial_lse [B, N, h, parts] in base 2, a part being EACH spans.

    Programs share the parts of all sequences evenly. Where a sequence has a single part, that is its result.
    """
    G: tl.constexpr = h // g
    tiles = tl.cdiv(N * G, ROWS)
    # a query sees no more of its own slots than a path has, in a chain than there are queries
    every = tl.arange(0, SEQUENCES)
    each = tl.load(committed + every, mask=every < B, other=0)
    end = tl.minimum(tl.cdiv(each + (path_width if IS_TREE else N), SPAN * EACH), num_parts)
    ends = tl.cumsum(tl.where(every < B, end - _first_part(each, SPAN * EACH, WINDOW), 0), 0)
    for item in range(tl.program_id(0), tl.max(ends, 0) * g * tiles, tl.num_programs(0)):
        tile, group, number = item % tiles, item // tiles % g, item // tiles // g
        sequence = tl.sum((ends <= number).to(tl.int32), 0).to(tl.int64)
        row = tile * ROWS + tl.arange(0, ROWS)
        real = row < N * G
        at = row // G
        head = group * G + row % G
        column = tl.arange(0, WIDE)
        inside = real[:, None] & (column[None, :] < d)
        address = sequence * query_row_stride + at.to(tl.int64) * query_stride + head * d
        q = tl.load(query + address[:, None] + column[None, :], mask=inside, other=0.0)
        prefix = tl.load(committed + sequence)
        limit = tl.where(real, prefix + tl.load(seen + sequence * N + at, mask=real, other=0), 0)
        reach = tl.max(limit, 0)
        floor = 0  # slots below it no row of the tile sees; a tile that nobody sees would change no bit
        if WINDOW:
            floor = tl.maximum(tl.min(tl.where(real, limit, reach), 0) - WINDOW, 0)
        number = _first_part(prefix, SPAN * EACH, WINDOW) + number - tl.max(tl.where(ends <= number, ends, 0), 0)

        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.full((ROWS,), 0.0, tl.float32)
        mixed = tl.full((ROWS, WIDE), 0.0, tl.float32)
        first_span = tl.maximum(number * EACH, floor // SPAN)
        for span in range(first_span, tl.minimum(number * EACH + EACH, tl.cdiv(reach, SPAN))):
            part, lse = _fold_span(
                q, span, tile, prefix, limit, reach, floor, real, at, scale,
                key_pages + group * d, value_pages + group * d, page_table + sequence * table_stride,
                seen + sequence * N, paths + sequence * N * path_width, path_width,
                key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, N, page_size, G, SPAN, IS_TREE,
                ROWS, KEYS, d, WIDE, PRECISION, WINDOW, PATH_STAGES,
            )  # fmt: skip
            if EACH == 1:  # what joining it alone gives
                top, total, mixed = lse, tl.where(lse > float("-inf"), 1.0, 0.0), part
            else:
                top, total, shrink, weight = _join(top, total, lse)
                mixed = mixed * shrink[:, None] + part * weight[:, None]
        part = mixed / tl.where(total > 0, total, 1.0)[:, None]
        place = ((sequence * N + at) * h + head) * num_parts + number
        tl.store(partial + place[:, None] * d + column[None, :], part.to(partial.dtype.element_ty), mask=inside)
        if partial_lse is not None:
            tl.store(partial_lse + place, _log_sum(top, total), mask=real)


@triton.jit(do_not_specialize=_VARYING)
def _join_parts(
    partial, partial_lse, committed, seen, out, num_parts, N,
    h: tl.constexpr, d: tl.constexpr, SPAN: tl.constexpr, EACH: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Joins GROUP spans at a time, which ``_attend`` has done where EACH is GROUP, and these results in order."""
    place = tl.program_id(0).to(tl.int64)
    query = place // h
    column = tl.arange(0, WIDE)
    prefix = tl.load(committed + query // N)
    last = tl.cdiv(prefix + tl.load(seen + query), SPAN * EACH)
    first = _first_part(prefix, SPAN * EACH, WINDOW)
    whole_top = float("-inf")
    whole_total = 0.0
    whole = tl.full((WIDE,), 0.0, tl.float32)
    for number in range(first * EACH // GROUP, tl.cdiv(last * EACH, GROUP)):
        top = float("-inf")
        total = 0.0
        mixed = tl.full((WIDE,), 0.0, tl.float32)
        for i in tl.static_range(GROUP // EACH):  # all are loaded before the first is used
            at = number * (GROUP // EACH) + i
            inside = (at >= first) & (at < last)
            lse = tl.load(partial_lse + place * num_parts + at, mask=inside, other=float("-inf"))
            part = tl.load(partial + (place * num_parts + at) * d + column, mask=inside & (column < d), other=0.0)
            top, total, shrink, weight = _join(top, total, lse)
            mixed = mixed * shrink + part * weight
        if EACH < GROUP:
            mixed = mixed / tl.where(total > 0, total, 1.0)
            top = _log_sum(top, total)
        whole_top, whole_total, shrink, weight = _join(whole_top, whole_total, top)
        whole = whole * shrink + mixed * weight
    whole = whole / tl.where(whole_total > 0, whole_total, 1.0)
    tl.store(out + place * d + column, whole.to(out.dtype.element_ty), mask=column < d)


@cache
def _num_multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def num_multiprocessors(x: Tensor) -> int:
    """Those of the tensor's GPU; 2 on a CPU."""
    return _num_multiprocessors(x.device.index or 0) if x.is_cuda else 2


def spans_of_a_part(B: int, N: int, h: int, g: int, d: int, num_spans: int, tile: Tile, num_programs: int) -> int:
    """How many spans a program takes at once: GROUP, or one if the partial results are small enough.

    Single spans share the work more evenly, which matters if there are fewer sequences than ``num_programs``.
    """
    rows = N * (h // g)
    is_even = triton.cdiv(rows, tile.rows) * B * g >= num_programs
    is_large = 4 * B * N * h * num_spans * d > _PARTIAL_BYTES
    return GROUP if is_large or (is_even and rows > _CHEAP_ROWS) else 1


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
    """Arguments as the public function's -> [B, N, h * d]."""
    B, N, h, d = query.shape
    page_size, g = key_pages.shape[1], key_pages.shape[2]
    out = torch.empty((B, N, h * d), dtype=query.dtype, device=query.device)
    if not out.numel():
        return out
    tile, num_spans = tile_of(query), triton.cdiv(page_table.shape[1] * page_size, SPAN)
    num_programs = _WAVES * num_multiprocessors(query)
    each = 1 if by_span else GROUP
    if by_span is None:
        each = spans_of_a_part(B, N, h, g, d, num_spans, tile, num_programs)
    num_parts = triton.cdiv(num_spans, each)
    most = min(_MOST_SEQUENCES, max(1, _PARTIAL_BYTES // (4 * N * h * num_parts * d)))
    if most < B:  # as in a long prompt, whose blocks of queries are sequences here
        given = query, page_table, committed, seen, *(() if paths is None else (paths,))
        for q, table, c, s, *p, into in zip(*(torch.split(x, most) for x in (*given, out)), strict=True):
            into.copy_(paged_attention(q, key_pages, value_pages, table, c, s, p[0] if p else None, each == 1, window))
        return out
    wide, partial, lse = max(16, triton.next_power_of_2(d)), out, None
    if num_parts > 1:
        partial = torch.empty((B, N, h, num_parts, d), dtype=torch.float32, device=query.device)
        lse = torch.empty((B, N, h, num_parts), dtype=torch.float32, device=query.device)
    num_items = triton.cdiv(N * (h // g), tile.rows) * g * B * num_parts
    _attend[(min(num_items, num_programs),)](
        query, key_pages, value_pages, page_table, committed, seen, seen if paths is None else paths, partial, lse,
        _LOG2_E * d**-0.5, query.stride(0), query.stride(1), page_table.stride(0),
        key_pages.stride(0), key_pages.stride(1), value_pages.stride(0), value_pages.stride(1),
        0 if paths is None else paths.shape[2], num_parts, B, N,
        page_size, h, g, d, SPAN, each, max(_SEQUENCES, triton.next_power_of_2(B)), paths is not None, tile.rows,
        tile.keys, wide, "ieee" if tile is EXACT else "tf32", window, tile.path_stages, num_warps=tile.num_warps,
        num_stages=tile.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    if num_parts > 1:
        _join_parts[(B * N * h,)](
            partial, lse, committed, seen, out, num_parts, N, h, d, SPAN, each, GROUP, wide, window, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
