"""Triton programs for attention over paged keys and values, in which a query's result does not depend on the pass.

All query heads that share a key-value head, of several queries, form the rows of one tile, so that no key is read twice
for them. Slots are read in tiles of KEYS that begin at multiples of it, tiles are folded in order into one partial
result for every SPAN slots, and the partial results are joined in order. So a row adds the same numbers in the same
order in any pass, whether one program takes all its spans or many take one at a time.
All tiles have the same shape, so that sums within a tile are alike too, and the compiler fuses no multiplication with
an addition, which it would do differently from program to program.
Shapes: ``B`` sequences, ``N`` queries of each, ``T`` tokens, ``h`` query heads, ``g`` key-value heads, ``G`` = h / g,
``d`` head size. Rows of a sequence and key-value head: r = query * G + head within the group. Scores are in base 2.
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
_MOST_SEQUENCES, _MOST_PROGRAMS = 256, 65_532
"""Sequences whose spans programs share, as each counts those of all; CUDA's limit on the third dimension of a grid."""
_CHEAP_ROWS = 64
"""Rows of a sequence and key-value head up to which partial results are at most a third of what is read and written."""
_JOINED_AT_ONCE = 8
"""Partial results that are loaded before the first of them is used."""


class Tile(NamedTuple):
    """The compile-time constants of a program, the same for all passes of a model, as rows and keys decide bits."""

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
    """True if x, of any shape, is on a GPU whose matrix unit takes 64 rows at once, as Triton uses it."""
    return x.is_cuda and _is_hopper(x.device.index or 0)


def tile_of(query: Tensor) -> Tile:
    """The tile for queries [..., d] of this precision and head size on their GPU."""
    if query.dtype == torch.float32:
        return EXACT
    return HOPPER if query.shape[-1] <= _MOST_TALL_HEAD and is_hopper(query) else HALF


@triton.jit
def _accumulate_tile(
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
def _accumulate_tree_paths(
    query, top, total, mixed, tile, first, last, prefix, real, at, scale, keys, values, table, seen, paths, path_width,
    key_page_stride, key_slot_stride, value_page_stride, value_slot_stride,
    N, page_size: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, d: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Places from ``first`` to ``last`` of a tree's queries, each by itself: its ancestors stand as in a chain."""
    for one in range(tile * ROWS // G, tl.minimum(tl.cdiv((tile + 1) * ROWS, G), N)):
        own_seen = tl.load(seen + one)
        end = tl.where(own_seen >= 0, prefix + own_seen, 0)
        for start in tl.range(first, tl.minimum(last, end), KEYS, num_stages=STAGES):
            place = start + tl.arange(0, KEYS)
            inside = place < end
            own = place - prefix
            node = tl.load(paths + one * path_width + own, mask=inside & (own >= 0), other=0)
            slot = tl.where(own < 0, place, prefix + node)
            if WINDOW:
                inside = inside & (place >= end - WINDOW)
            page = tl.load(table + slot // page_size, mask=inside, other=0).to(tl.int64)
            top, total, mixed = _accumulate_tile(
                query, top, total, mixed, page, (slot % page_size).to(tl.int64), inside,
                inside[None, :] & (real & (at == one))[:, None], scale, keys, values,
                key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, d, WIDE, PRECISION,
            )  # fmt: skip
    return top, total, mixed


@triton.jit
def _combine_softmax_sums(top, total, lse):
    """A partial result's maximum joined to the running one: new maximum and sum, and the weights of old and new."""
    new_top = tl.maximum(top, lse)
    floor = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink, weight = tl.exp2(top - floor), tl.exp2(lse - floor)
    return new_top, total * shrink + weight, shrink, weight


_VARYING = ["B", "N", "path_width", "num_spans", "table_stride"]
"""Sizes of a pass: each value would otherwise be compiled for itself, while others wait for their tokens."""


@triton.jit
def _first_span(prefix, SPAN: tl.constexpr, WINDOW: tl.constexpr):
    """The first span that a query after ``prefix`` committed slots may see."""
    return tl.maximum(prefix - WINDOW, 0) // SPAN if WINDOW else prefix * 0


@triton.jit
def _attend_span(
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
        top, total, mixed = _accumulate_tile(
            q, top, total, mixed, page, offset, slot < reach, visible, scale, keys, values,
            key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, d, WIDE, PRECISION,
        )  # fmt: skip
    if IS_TREE:
        top, total, mixed = _accumulate_tree_paths(
            q, top, total, mixed, tile, shared, last, prefix, real, at, scale, keys, values, table, seen, paths,
            path_width, key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, N, page_size, G, ROWS,
            KEYS, d, WIDE, PRECISION, WINDOW, PATH_STAGES,
        )  # fmt: skip
    part = mixed / tl.where(total > 0, total, 1.0)[:, None]
    return part, tl.where(total > 0, top + tl.log2(total), float("-inf"))


@triton.jit
def _tile_rows(
    query, committed, seen, tokens, sequence, tile, group, query_stride, N,
    G: tl.constexpr, d: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The rows of a tile: which there are, query, token and head of each, their queries, and which slots they see."""
    row = tile * ROWS + tl.arange(0, ROWS)
    at = row // G
    own = tl.load(seen + sequence * N + at, mask=row < N * G, other=-1)
    real = own >= 0
    token = tl.load(tokens + sequence * N + at, mask=real, other=0).to(tl.int64)
    head = group * G + row % G
    column = tl.arange(0, WIDE)
    address = token * query_stride + head * d
    q = tl.load(query + address[:, None] + column[None, :], mask=real[:, None] & (column[None, :] < d), other=0.0)
    prefix = tl.load(committed + sequence)
    limit = tl.where(real, prefix + own, 0)
    reach = tl.max(limit, 0)
    floor = 0  # slots below it no row of the tile sees; a tile that nobody sees would change no bit
    if WINDOW:
        floor = tl.maximum(tl.min(tl.where(real, limit, reach), 0) - WINDOW, 0)
    return real, at, token, head, q, prefix, limit, reach, floor


@triton.jit(do_not_specialize=_VARYING)
def _attend(
    query, key_pages, value_pages, page_table, committed, seen, tokens, paths, out, scale, query_stride, table_stride,
    key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, path_width, N,
    page_size: tl.constexpr, h: tl.constexpr, g: tl.constexpr, d: tl.constexpr, SPAN: tl.constexpr,
    IS_TREE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW: tl.constexpr, PATH_STAGES: tl.constexpr,
):  # fmt: skip
    """out [T, h, d], of a sequence, key-value head and tile by one program."""
    G: tl.constexpr = h // g
    tile, group = tl.program_id(0), tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    real, at, token, head, q, prefix, limit, reach, floor = _tile_rows(
        query, committed, seen, tokens, sequence, tile, group, query_stride, N, G, d, ROWS, WIDE, WINDOW
    )
    whole_top = tl.full((ROWS,), float("-inf"), tl.float32)
    whole_total = tl.full((ROWS,), 0.0, tl.float32)
    whole = tl.full((ROWS, WIDE), 0.0, tl.float32)
    for span in range(floor // SPAN, tl.cdiv(reach, SPAN)):
        part, lse = _attend_span(
            q, span, tile, prefix, limit, reach, floor, real, at, scale, key_pages + group * d, value_pages + group * d,
            page_table + sequence * table_stride, seen + sequence * N, paths + sequence * N * path_width, path_width,
            key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, N, page_size, G, SPAN, IS_TREE,
            ROWS, KEYS, d, WIDE, PRECISION, WINDOW, PATH_STAGES,
        )  # fmt: skip
        whole_top, whole_total, shrink, weight = _combine_softmax_sums(whole_top, whole_total, lse)
        whole = whole * shrink[:, None] + part * weight[:, None]
    whole = whole / tl.where(whole_total > 0, whole_total, 1.0)[:, None]
    column = tl.arange(0, WIDE)
    address = (token * h + head)[:, None] * d + column[None, :]
    tl.store(out + address, whole.to(out.dtype.element_ty), mask=real[:, None] & (column[None, :] < d))


@triton.jit(do_not_specialize=_VARYING)
def _attend_spans(
    query, key_pages, value_pages, page_table, committed, seen, tokens, paths, partial, partial_lse, scale,
    query_stride, table_stride,
    key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, path_width, num_spans, B, N,
    page_size: tl.constexpr, h: tl.constexpr, g: tl.constexpr, d: tl.constexpr, SPAN: tl.constexpr,
    SEQUENCES: tl.constexpr, IS_TREE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, WINDOW: tl.constexpr, PATH_STAGES: tl.constexpr,
):  # fmt: skip
    """partial [B, N, h, spans, d] in fp32 and partial_lse [B, N, h, spans] in base 2, by programs that share the spans
    of all sequences evenly.
    """
    G: tl.constexpr = h // g
    tiles = tl.cdiv(N * G, ROWS)
    # a query sees no more of its own slots than a path has, in a chain than there are queries
    every = tl.arange(0, SEQUENCES)
    each = tl.load(committed + every, mask=every < B, other=0)
    end = tl.minimum(tl.cdiv(each + (path_width if IS_TREE else N), SPAN), num_spans)
    ends = tl.cumsum(tl.where(every < B, end - _first_span(each, SPAN, WINDOW), 0), 0)
    for item in range(tl.program_id(0), tl.max(ends, 0) * g * tiles, tl.num_programs(0)):
        tile, group, number = item % tiles, item // tiles % g, item // tiles // g
        sequence = tl.sum((ends <= number).to(tl.int32), 0).to(tl.int64)
        real, at, _, head, q, prefix, limit, reach, floor = _tile_rows(
            query, committed, seen, tokens, sequence, tile, group, query_stride, N, G, d, ROWS, WIDE, WINDOW
        )
        span = _first_span(prefix, SPAN, WINDOW) + number - tl.max(tl.where(ends <= number, ends, 0), 0)
        part, lse = _attend_span(
            q, span, tile, prefix, limit, reach, floor, real, at, scale, key_pages + group * d, value_pages + group * d,
            page_table + sequence * table_stride, seen + sequence * N, paths + sequence * N * path_width, path_width,
            key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, N, page_size, G, SPAN, IS_TREE,
            ROWS, KEYS, d, WIDE, PRECISION, WINDOW, PATH_STAGES,
        )  # fmt: skip
        column = tl.arange(0, WIDE)
        place = ((sequence * N + at) * h + head) * num_spans + span
        tl.store(partial + place[:, None] * d + column[None, :], part, mask=real[:, None] & (column[None, :] < d))
        tl.store(partial_lse + place, lse, mask=real)


@triton.jit(do_not_specialize=_VARYING)
def _join_spans(
    partial, partial_lse, committed, seen, tokens, out, num_spans, N,
    h: tl.constexpr, d: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr, WINDOW: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Joins partial results as ``_attend`` does where it takes all spans."""
    place = tl.program_id(0).to(tl.int64)
    query = place // h
    column = tl.arange(0, WIDE)
    prefix = tl.load(committed + query // N)
    own = tl.load(seen + query)
    limit = tl.where(own >= 0, prefix + own, 0)
    token = tl.load(tokens + query).to(tl.int64)
    whole_top = float("-inf")
    whole_total = 0.0
    whole = tl.full((WIDE,), 0.0, tl.float32)
    for span in tl.range(_first_span(prefix, SPAN, WINDOW), tl.cdiv(limit, SPAN), loop_unroll_factor=AT_ONCE):
        at = place * num_spans + span
        lse = tl.load(partial_lse + at)
        part = tl.load(partial + at * d + column, mask=column < d, other=0.0)
        whole_top, whole_total, shrink, weight = _combine_softmax_sums(whole_top, whole_total, lse)
        whole = whole * shrink + part * weight
    whole = whole / tl.where(whole_total > 0, whole_total, 1.0)
    tl.store(out + (token * h + place % h) * d + column, whole.to(out.dtype.element_ty), mask=(column < d) & (own >= 0))


@cache
def _num_multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def num_multiprocessors(x: Tensor) -> int:
    """The number of multiprocessors of the GPU that x, of any shape, is on; 2 on a CPU."""
    return _num_multiprocessors(x.device.index or 0) if x.is_cuda else 2


def shares_spans(B: int, N: int, h: int, g: int, num_spans: int, tile: Tile, num_programs: int) -> bool:
    """True if programs share the spans of all sequences, rather than each taking a sequence.

    They must where there would be fewer than ``num_programs``. Otherwise it saves waiting for the longest sequence.
    """
    rows = N * (h // g)
    return num_spans > 1 and (rows <= _CHEAP_ROWS or triton.cdiv(rows, tile.rows) * B * g < num_programs)


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    committed: Tensor,
    seen: Tensor,
    tokens: Tensor,
    paths: Tensor | None,
    by_span: bool | None,
    window: int,
    most_bytes: int,
    out: Tensor | None = None,
) -> Tensor:
    """Arguments as the public function's, and the most memory for partial results -> ``out`` [T, h * d]."""
    (B, N), (T, h, d) = seen.shape, query.shape
    page_size, g = key_pages.shape[1], key_pages.shape[2]
    if out is None:
        out = torch.empty((T, h * d), dtype=query.dtype, device=query.device)
    if not (out.numel() and B * N):
        return out
    tile, num_spans = tile_of(query), triton.cdiv(page_table.shape[1] * page_size, SPAN)
    num_programs = _WAVES * num_multiprocessors(query)
    if by_span is None:
        by_span = shares_spans(B, N, h, g, num_spans, tile, num_programs)
    most = min(_MOST_SEQUENCES, most_bytes // (4 * N * h * num_spans * d)) if by_span else _MOST_PROGRAMS
    most = max(4, most // 4 * 4)  # Triton compiles again for an address that is no multiple of 16
    if most < B:
        size = triton.cdiv(triton.cdiv(B, triton.cdiv(B, most)), 4) * 4  # of parts that are nearly equal
        whole = page_table, committed, seen, tokens, *(() if paths is None else (paths,))
        for table, c, s, t, *p in zip(*(torch.split(x, size) for x in whole), strict=True):
            given = query, key_pages, value_pages, table, c, s, t, p[0] if p else None
            paged_attention(*given, by_span, window, most_bytes, out)
        return out
    tiles, wide = triton.cdiv(N * (h // g), tile.rows), max(16, triton.next_power_of_2(d))
    tensors = query, key_pages, value_pages, page_table, committed, seen, tokens, seen if paths is None else paths
    strides = (
        _LOG2_E * d**-0.5, query.stride(0), page_table.stride(0),
        key_pages.stride(0), key_pages.stride(1), value_pages.stride(0), value_pages.stride(1),
        0 if paths is None else paths.shape[2],
    )  # fmt: skip
    form = (
        paths is not None, tile.rows, tile.keys, wide, "ieee" if tile is EXACT else "tf32", window, tile.path_stages
    )  # fmt: skip
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": False}
    if not by_span:
        _attend[(tiles, g, B)](*tensors, out, *strides, N, page_size, h, g, d, SPAN, *form, **options)
        return out
    partial = torch.empty((B, N, h, num_spans, d), dtype=torch.float32, device=query.device)
    lse = torch.empty((B, N, h, num_spans), dtype=torch.float32, device=query.device)
    _attend_spans[(min(tiles * g * B * num_spans, num_programs),)](
        *tensors, partial, lse, *strides, num_spans, B, N, page_size, h, g, d, SPAN, _MOST_SEQUENCES, *form, **options
    )
    _join_spans[(B * N * h,)](
        partial, lse, committed, seen, tokens, out, num_spans, N, h, d, SPAN, wide, window, _JOINED_AT_ONCE,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out
