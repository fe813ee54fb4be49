"""The paged cache for CUDA devices, in the layout that the attention kernels read, and the choice of a cache.

Nothing in a pass waits for the device. Heads in halves are normed, rotated and stored by one kernel. Passes of any
width go through one kernel in blocks of at most 64 queries, so that a prefill gathers no pages and needs no mask over
all positions. Knows no sampling and no request. On a CPU it runs by the kernels' references in PyTorch, for tests.
Shapes: as in ``kv_cache``, and ``N`` queries of a block, ``h`` query heads, ``M`` pages of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.kernels.attention import MAX_QUERIES, paged_attention, rows_of_tile
from tlt_hpc.kernels.pointwise import HeadNorms, rotate_and_store
from tlt_hpc.models.layers import Attend, FusedAttend
from tlt_hpc.models.rotary import RotaryRows
from tlt_hpc.models.shape import ModelShape
from tlt_hpc.rollout.kv_cache import HostPagedCache, Layout, PagedCache, PoolSizes, Seen
from tlt_hpc.rollout.spans import SpanGroup, SpanLayout, Spans, span_index
from tlt_hpc.rollout.transfer import upload

AttentionKind = Literal["auto", "pages", "paged-kernel"]
"""Page by page in PyTorch, or by a kernel that follows the page table; "auto": the kernel on CUDA alone."""


def make_cache(
    shape: ModelShape,
    sizes: PoolSizes,
    dtype: torch.dtype,
    device: torch.device,
    attention: AttentionKind = "auto",
) -> PagedCache:
    """The cache that suits a device, or the requested one."""
    by_kernel = device.type == "cuda" if attention == "auto" else attention == "paged-kernel"
    return (DevicePagedCache if by_kernel else HostPagedCache)(shape, sizes, dtype, device)


class DevicePagedCache(PagedCache):
    """The pool of pages as the kernels read it: keys and values apart, a position's heads together."""

    wants_packing = False

    def __init__(self, shape: ModelShape, sizes: PoolSizes, dtype: torch.dtype, device: torch.device) -> None:
        # a block of queries spans up to so many slots beyond its first, though it sees none of those past its row
        super().__init__(shape, replace(sizes, num_positions=sizes.num_positions + MAX_QUERIES), dtype, device)
        pages = (self._num_layers, sizes.num_pages + 1, sizes.page_size, shape.num_kv_heads, shape.head_dim)
        self._keys, self._values = (self._memory.allocate_zeros(*pages, dtype=dtype) for _ in range(2))
        self._pools = [self._keys, self._values]
        heads_per_key = shape.num_heads // shape.num_kv_heads
        self._queries_per_block = max(1, rows_of_tile(self._keys) // heads_per_key)
        """Queries of a row that the attention kernel takes at once."""

    def make_span_layout(self, widths: Sequence[int], num_tokens: int = 0) -> SpanLayout:
        """Blocks of as many queries as a program takes at once, or of one if nothing is drafted.

        With ``num_tokens`` it is that of a graph, filled up to so many, and of all rows, of which the last is padding.
        """
        num_rows = len(self.tables) if num_tokens else len(widths)
        num_queries = 1 if max(widths) == 1 else self._queries_per_block
        return make_block_layout(widths, num_tokens or sum(widths), num_rows, num_queries, self.tables.device)

    def build_layout(self, tables: Sequence[Sequence[int]], high_water: int) -> None:
        """The kernels read the tables alone."""

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy the target model's keys and values from slots [m] to slots [m]."""
        for pages in self._pools:
            flat = pages[: self._num_target_layers].flatten(1, 2)
            flat[:, target] = flat[:, source]

    def make_span_attention(self, spans: Spans, layouts: Sequence[Layout | None]) -> Attend:
        """Attention of a pass over spans."""
        blocks, write = span_blocks(spans, self.tables.int()), self.slots_of_tokens(spans.layout.rows, spans.places)
        return _PassAttend(self._keys, self._values, write, blocks, self._windows, None)

    def _make_pass_attentions(
        self, layout: Layout | None, tables: Tensor, seen: Seen, width: int, only_layer: int | None
    ) -> list[Attend]:
        write, table = self.slots_of_positions(seen.positions, tables), tables.int()
        passes: list[Attend] = []
        for start in range(0, seen.positions.shape[1], width):
            part = slice(start, start + width)
            if seen.committed is None or seen.ancestors is None:
                blocks = chain_blocks(seen.positions[:, part], table)
            else:
                blocks = tree_blocks(seen.committed, seen.ancestors[:, part], table)
            written = write[:, part].flatten()
            passes.append(_PassAttend(self._keys, self._values, written, blocks, self._windows, only_layer))
        return passes


@dataclass(frozen=True)
class _PassAttend(FusedAttend):
    """Attention of one pass."""

    keys: Tensor
    """Pages of all layers [layers, num_pages + 1, S, g, d], as ``values``."""
    values: Tensor
    write: Tensor
    """Slots [T] that the pass writes: a row's repeated position twice, what belongs nowhere to the page beyond."""
    reading: QueryBlocks
    windows: tuple[int, ...]
    """Window of each layer, as in ``PagedCache``."""
    only_layer: int | None

    def __call__(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        keys, values, window = self._layer_pages(layer)
        key, value = key_value.chunk(2, 1)
        keys.flatten(0, 1).index_copy_(0, self.write, key)
        values.flatten(0, 1).index_copy_(0, self.write, value)
        return self.reading.compute_attention(query, keys, values, window)

    def attend_fused(self, layer: int, qkv: Tensor, rotary: RotaryRows, norms: HeadNorms | None) -> Tensor:
        keys, values, window = self._layer_pages(layer)
        table = rotary.table
        query = rotate_and_store(qkv, table.cosine, table.sine, rotary.positions, keys, values, self.write, norms)
        return self.reading.compute_attention(query, keys, values, window)

    def _layer_pages(self, layer: int) -> tuple[Tensor, Tensor, int]:
        """Its pages of keys and values, and its window."""
        at = layer if self.only_layer is None else self.only_layer
        return self.keys[at], self.values[at], self.windows[at]


@dataclass(frozen=True, kw_only=True)
class QueryBlocks:
    """The queries of a pass as the kernels take them: blocks of ``N``, each treated as a separate sequence."""

    table: Tensor
    """Pages [blocks, M] int32."""
    committed: Tensor
    """[blocks] int32"""
    seen: Tensor
    """[blocks, N] int32: how many slots from ``committed`` on a query sees, or of its path; -1 where there is none."""
    tokens: Tensor
    """Token [blocks, N] int32 of each query, any token where there is none."""
    paths: Tensor | None = None
    """In trees each query's ancestors and itself [blocks, N, W] int32, in slots after ``committed``."""

    def compute_attention(self, query: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
        """query [T, h, d] over one layer's keys and values [num_pages + 1, S, g, d] -> [T, h * d].

        With a ``window`` above 0 a query sees as many positions, its own included.
        """
        given = self.table, self.committed, self.seen, self.tokens, self.paths
        return paged_attention(query, keys, values, *given, window=window)


def span_blocks(spans: Spans, tables: Tensor) -> QueryBlocks:
    """Blocks of the queries of spans; tables [R, M] int32, the last row's for empty blocks.

    What precedes a block of a chain is committed to it; in a tree a block sees the nodes of its span by their paths.
    """
    layout, places = spans.layout, spans.places
    assert layout.token_of_slot is not None
    used, token = layout.token_of_slot >= 0, layout.token_of_slot.clamp(min=0)
    first = token[:, 0]
    table = tables[torch.where(used[:, 0], layout.rows[first], len(tables) - 1)]
    if not spans.is_tree:
        committed = torch.where(used[:, 0], places[first], 0).int()
        seen = places[token] - committed.unsqueeze(1) + 1
        seen = torch.where(used, seen, -1).int()
        return QueryBlocks(table=table, committed=committed, seen=seen, tokens=token.int())
    committed = torch.where(used[:, 0], places[first] - layout.nodes[first], 0).int()
    nodes = torch.arange(min(MAX_QUERIES, len(places)), device=places.device)
    sees = (spans.visible_nodes()[token].unsqueeze(2) >> nodes & 1).bool() & used.unsqueeze(2)
    # a node's ancestors come before it, so in ascending order they are its path
    order = torch.where(sees, nodes, len(nodes)).sort(2).values
    paths = torch.where(order < len(nodes), order, 0).int()
    seen = torch.where(used, sees.sum(2), -1).int()
    return QueryBlocks(table=table, committed=committed, seen=seen, tokens=token.int(), paths=paths)


def make_block_layout(
    widths: Sequence[int], num_tokens: int, num_rows: int, num_queries: int, device: torch.device
) -> SpanLayout:
    """The layout of rows whose spans have these widths, filled up to ``num_tokens`` with tokens of the last row.

    Blocks have ``num_queries``; how many there are follows from the other numbers alone.
    """
    index = span_index([SpanGroup((row,), width) for row, width in enumerate(widths)], num_tokens, num_rows - 1)
    all_widths = np.array([*widths, *filter(None, [num_tokens - sum(widths)])])
    each = -(-all_widths // num_queries)
    num_blocks = num_tokens if num_queries == 1 else min(num_tokens, num_rows) + 1 + num_tokens // num_queries
    starts = np.repeat(np.cumsum(each) - each, all_widths) * num_queries
    token_of_slot = np.full(num_blocks * num_queries, -1)
    within = np.arange(num_tokens) - np.repeat(np.cumsum(all_widths) - all_widths, all_widths)
    token_of_slot[starts + within] = np.arange(num_tokens)
    numbers = upload(np.concatenate((index.flatten(), token_of_slot)), device)
    return SpanLayout.from_numbers(numbers, num_tokens, num_queries, num_rows, max(widths, default=1))


def chain_blocks(positions: Tensor, table: Tensor) -> QueryBlocks:
    """Queries that see the positions up to their own: positions [B, n], table [B, M] int32.

    In a row each position is the one before it plus one, or that one again (a row with less to do repeats its last).
    """
    num_rows, n = positions.shape
    width = min(MAX_QUERIES, n)
    tokens = torch.arange(num_rows * n, dtype=torch.int32, device=positions.device).view(num_rows, n)
    missing = -n % width
    first = positions[:, ::width].reshape(-1, 1)
    blocks, tokens = (F.pad(x, (0, missing), value=-1).reshape(-1, width) for x in (positions, tokens))
    seen, each = torch.where(tokens >= 0, blocks - first + 1, -1).int(), len(blocks) // num_rows
    table = table.repeat_interleave(each, 0) if each > 1 else table
    return QueryBlocks(table=table, committed=first.flatten().int(), seen=seen, tokens=tokens.clamp(min=0))


def tree_blocks(committed: Tensor, ancestors: Tensor, table: Tensor) -> QueryBlocks:
    """Queries that see their ancestors: committed [B], ancestors [B, n, N] with n at most 64, table [B, M].

    A row without any position before its tree may give the root the position -1: no key stands there.
    """
    num_rows, n, num_nodes = ancestors.shape
    slots = torch.arange(num_nodes, device=committed.device) + committed.clamp(max=0).unsqueeze(1)  # [B, N]
    sees = ancestors & (slots >= 0).unsqueeze(1)
    # a node's ancestors come before it, so in ascending order they are its path
    order = torch.where(sees, slots.unsqueeze(1), num_nodes).sort(2).values
    paths = torch.where(order < num_nodes, order, 0).int()
    committed, seen = committed.clamp(min=0).int(), sees.sum(2).int()
    tokens = torch.arange(num_rows * n, dtype=torch.int32, device=paths.device).view(num_rows, n)
    return QueryBlocks(table=table, committed=committed, seen=seen, tokens=tokens, paths=paths)
