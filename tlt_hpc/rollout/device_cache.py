"""The paged cache for CUDA devices, in the layout that the attention kernels read, and the choice of a cache.

Nothing in a pass waits for the device. Heads in halves are normed, rotated and stored by one kernel. Passes of any
width go through one kernel in blocks of at most 64 queries, so that a prefill gathers no pages and needs no mask over
all positions. Knows no sampling and no request. On a CPU it runs by the kernels' references in PyTorch, for tests; it
has not run on a GPU yet.
Shapes: as in ``kv_cache``, and ``N`` queries of a block, ``h`` query heads, ``M`` pages of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.kernels.attention import MAX_NODES, flash_can_run, flash_tree_attention, paged_tree_attention
from tlt_hpc.kernels.rotary import HeadNorms, rotate_and_store
from tlt_hpc.models.layers import Attend, FusedAttend
from tlt_hpc.models.rotary import RotaryRows
from tlt_hpc.models.shape import ModelShape
from tlt_hpc.rollout.kv_cache import HostPagedCache, Layout, PagedCache, PoolSizes, Seen

AttentionKind = Literal["auto", "pages", "paged-kernel"]
"""Page by page in PyTorch, or by a kernel that follows the page table; "auto": the kernel on CUDA alone."""

_EXACT_WIDTH = 8
"""Blocks up to this are as wide as the pass, wider ones a power of two: a kernel is compiled for each width."""
_MOST_PROGRAMS = 65_535
"""CUDA's limit on the second dimension of a grid, where the kernel has a block's key-value head."""


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
        super().__init__(shape, replace(sizes, num_positions=sizes.num_positions + MAX_NODES), dtype, device)
        pages = (self._num_layers, sizes.num_pages + 1, sizes.page_size, shape.num_kv_heads, shape.head_dim)
        self._keys = torch.zeros(pages, dtype=dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        self._pools = [self._keys, self._values]

    def layout(self, tables: Sequence[Sequence[int]], high_water: int) -> None:
        """The kernels read the tables alone."""

    def move_slots(self, source: Tensor, target: Tensor) -> None:
        for pages in self._pools:
            flat = pages[: self._num_target_layers].flatten(1, 2)
            flat[:, target] = flat[:, source]

    def _passes(
        self, layout: Layout | None, tables: Tensor, seen: Seen, width: int, only_layer: int | None
    ) -> list[Attend]:
        write, table = self.slots(seen.positions, tables), tables.int()
        passes: list[Attend] = []
        for start in range(0, seen.positions.shape[1], width):
            part = slice(start, start + width)
            if seen.committed is None or seen.ancestors is None:
                blocks = chain_blocks(seen.positions[:, part], table)
            else:
                blocks = tree_blocks(seen.committed, seen.ancestors[:, part], table)
            passes.append(_PassAttend(self._keys, self._values, write[:, part].flatten(), blocks, only_layer))
        return passes


@dataclass(frozen=True)
class _PassAttend(FusedAttend):
    """Attention of one pass."""

    keys: Tensor
    """Of all layers [layers, num_pages + 1, S, g, d], as are the values."""
    values: Tensor
    write: Tensor
    """Slots [T] that the pass writes: a row's repeated position twice, what belongs nowhere to the page beyond."""
    reading: Blocks
    only_layer: int | None

    def __call__(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        keys, values = self._pages(layer)
        key, value = key_value.chunk(2, 1)
        keys.flatten(0, 1).index_copy_(0, self.write, key)
        values.flatten(0, 1).index_copy_(0, self.write, value)
        return self.reading.read(query, keys, values)

    def fused(self, layer: int, qkv: Tensor, rotary: RotaryRows, norms: HeadNorms | None) -> Tensor:
        keys, values = self._pages(layer)
        table = rotary.table
        query = rotate_and_store(qkv, table.cosine, table.sine, rotary.positions, keys, values, self.write, norms)
        return self.reading.read(query, keys, values)

    def _pages(self, layer: int) -> tuple[Tensor, Tensor]:
        at = layer if self.only_layer is None else self.only_layer
        return self.keys[at], self.values[at]


@dataclass(frozen=True)
class Blocks:
    """The queries of a pass as the kernels take them: blocks of ``N``, each treated as a separate sequence.

    A row has one block or, in a long chain, several: what precedes a block in its row is committed to it.
    """

    num_rows: int
    num_queries: int
    """Of a row; its blocks may hold more, which see what they like and are dropped."""
    table: Tensor
    """Pages [blocks, M] int32."""
    committed: Tensor
    """[blocks] int32"""
    masks: Tensor
    """[blocks, N] int64: bit j of a query is set if it sees slot ``committed + j``."""

    def read(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """query [T, h, d] over one layer's keys and values [num_pages + 1, S, g, d] -> [T, h * d]."""
        num_blocks, width = self.masks.shape
        by_row = query.view(self.num_rows, self.num_queries, *query.shape[1:])
        missing = num_blocks * width // self.num_rows - self.num_queries
        if missing:
            by_row = F.pad(by_row, (0, 0, 0, 0, 0, missing))
        out = self._attention(by_row.view(num_blocks, width, *query.shape[1:]), keys, values)
        return out.view(self.num_rows, -1, out.shape[2])[:, : self.num_queries].reshape(len(query), -1)

    def _attention(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        run = flash_tree_attention if flash_can_run(query, keys) else paged_tree_attention
        most = _MOST_PROGRAMS // keys.shape[2]
        if len(query) <= most:
            return run(query, keys, values, self.table, self.committed, self.masks)
        parts = zip(*(torch.split(x, most) for x in (query, self.table, self.committed, self.masks)), strict=True)
        return torch.cat([run(part, keys, values, *reading) for part, *reading in parts])


def chain_blocks(positions: Tensor, table: Tensor) -> Blocks:
    """Queries that see the positions up to their own: positions [B, n], table [B, M] int32.

    In a row each position is the one before it plus one, or that one again (a row with less to do repeats its last).
    """
    num_rows, n = positions.shape
    width = block_width(n)
    if n % width:
        positions = F.pad(positions, (0, -n % width))
        positions[:, n:] = positions[:, n - 1 : n]
    blocks = positions.reshape(-1, width)
    first = blocks[:, :1]
    # bits 0 to k, without a shift by 64
    masks = torch.full_like(blocks, -2).bitwise_left_shift_(blocks - first).bitwise_not_()
    each = len(blocks) // num_rows
    return Blocks(num_rows, n, table.repeat_interleave(each, 0) if each > 1 else table, first.flatten().int(), masks)


def tree_blocks(committed: Tensor, ancestors: Tensor, table: Tensor) -> Blocks:
    """Queries that see their ancestors: committed [B], ancestors [B, n, N] with n and N at most 64, table [B, M].

    A row without any position before its tree may give the root the position -1: no key stands there.
    """
    num_rows, n, num_nodes = ancestors.shape
    width = block_width(max(n, num_nodes))
    bit = torch.arange(num_nodes, device=committed.device) + committed.clamp(max=0).unsqueeze(1)
    flag = torch.ones_like(bit).bitwise_left_shift_(bit.clamp(min=0)).masked_fill_(bit < 0, 0)
    masks = (ancestors * flag.unsqueeze(1)).sum(2)
    return Blocks(num_rows, n, table, committed.clamp(min=0).int(), F.pad(masks, (0, width - n)))


def block_width(num_queries: int) -> int:
    """Queries of a block that a row with so many is cut or filled up to."""
    if num_queries <= _EXACT_WIDTH:
        return num_queries
    return min(MAX_NODES, 1 << (num_queries - 1).bit_length())
