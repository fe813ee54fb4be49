"""Keys, values and features of the live sequences in pages, and attention over them.

Position ``p`` of a sequence is in its page ``p // page_size``. A page holds the keys and values of every layer (the
drafter's layer last) and, with a drafter, the target's features. What lies beyond a sequence's committed positions is
overwritten before any query can see it, so pages are reused without being cleared.
``PagedCache`` is what all caches share; ``HostPagedCache`` is the one for CPUs (``device_cache`` has the other).
Shapes: ``B`` rows of a pass, ``n`` tokens a row, ``P`` pages a row at most, ``E`` entries (page, row that reads it),
``g`` key-value heads, ``r`` query heads that share one, ``d`` head size, ``S`` page size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.models.layers import Attend
from tlt_hpc.models.shape import ModelShape
from tlt_hpc.rollout.pool_memory import PoolMemory
from tlt_hpc.rollout.spans import SpanLayout, Spans, group_by_width, make_span_layout
from tlt_hpc.rollout.transfer import upload

MASKED_SCORE = -1e30
"""Score of what a query must not see; finite, so that a page without anything to see merges with weight zero."""
OUT_OF_RANGE = 1 << 40
"""Position at which a page begins that a pass does not read: beyond all others, so that no query sees it."""
_WHOLE_POOL = 0.6
"""Share of the pool's used pages that a pass must read for a slice of the pool to be cheaper than a gather."""
_ROUND_LENGTH = 16
"""Key lengths are rounded up to this, so that few shapes occur."""


def page_bytes(shape: ModelShape, page_size: int, dtype: torch.dtype, num_features: int) -> int:
    """Bytes of one page: keys and values of every layer, and with a drafter its own layer's and the features."""
    layers = shape.num_layers + (1 if num_features else 0)
    features = num_features * shape.hidden_size
    return page_size * dtype.itemsize * (2 * layers * shape.num_kv_heads * shape.head_dim + features)


@dataclass(frozen=True)
class PoolSizes:
    """Sizes of a paged cache: ``num_pages`` pages for ``num_rows`` rows of at most ``num_positions`` positions."""

    num_pages: int
    page_size: int
    num_rows: int
    num_positions: int
    num_features: int = 0
    """Vectors of the hidden size kept of each position for a drafter; 0: there is none."""


class PagedCache(ABC):
    """Page tables by row and the features; a subclass holds the keys and values, and knows how to attend to them."""

    wants_packing: ClassVar[bool]
    """True if used pages that lie together are read faster, so that moving them is worth it."""
    _pools: list[Tensor]
    """Keys and values [layers, pages, ...], the drafter's layer last."""

    def __init__(self, shape: ModelShape, sizes: PoolSizes, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size, self.num_pages, self.num_features = sizes.page_size, sizes.num_pages, sizes.num_features
        self.num_bytes = (sizes.num_pages + 1) * page_bytes(shape, sizes.page_size, dtype, sizes.num_features)
        self._num_layers = shape.num_layers + (1 if sizes.num_features else 0)
        self._windows = (*shape.windows, 0)
        """Number of positions that a query sees in each layer, the drafter's last; 0: all before it."""
        # one page more than the pool has takes values that must not be kept
        slots = (sizes.num_pages + 1) * sizes.page_size
        width = sizes.num_features * shape.hidden_size
        self._memory = PoolMemory(device)
        self.features = self._memory.allocate_zeros(slots, width, dtype=dtype) if width else None
        table_width = -(-sizes.num_positions // sizes.page_size) + 1
        self.tables = torch.full((sizes.num_rows, table_width), sizes.num_pages, device=device)

    @property
    def drafter_layer(self) -> int:
        """The layer index of the drafter's own keys and values."""
        return self._num_layers - 1

    @property
    def _num_target_layers(self) -> int:
        return self._num_layers - (1 if self.features is not None else 0)

    def set_table(self, row: int, pages: Sequence[int]) -> None:
        """Give a row its pages."""
        filled = [*pages, *([self.num_pages] * (self.tables.shape[1] - len(pages)))]
        self.tables[row] = upload(filled, self.tables.device)

    def slots_of_positions(self, positions: Tensor, tables: Tensor) -> Tensor:
        """Slots [B, n] of positions [B, n] of rows with ``tables`` [B, P] in the pool: page * page_size + offset."""
        page = tables.gather(1, (positions // self.page_size).clamp(max=tables.shape[1] - 1))
        return page * self.page_size + positions % self.page_size

    @property
    def spare_slot(self) -> int:
        """A slot that takes what must not be kept."""
        return self.num_pages * self.page_size

    def slots_of_tokens(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Slots [T] of positions [T] of these rows [T]."""
        page = self.tables[rows, (positions // self.page_size).clamp(max=self.tables.shape[1] - 1)]
        return page * self.page_size + positions % self.page_size

    def copy_pages(self, moves: dict[int, int]) -> None:
        """Copy whole pages, source -> target; no target is a source."""
        if not moves:
            return
        source = torch.tensor(list(moves), device=self.tables.device)
        target = torch.tensor(list(moves.values()), device=self.tables.device)
        for pool in self._pools:
            pool[:, target] = pool[:, source]
        if self.features is not None:
            paged = self.features.view(self.num_pages + 1, self.page_size, -1)
            paged[target] = paged[source]

    def copy_page_start(self, source: int, target: int, count: int) -> None:
        """Copy the target model's keys and values, and the features, of a page's first ``count`` positions."""
        offsets = torch.arange(count, device=self.tables.device)
        of, to = source * self.page_size + offsets, target * self.page_size + offsets
        self.copy_slots(of, to)
        if self.features is not None:
            self.features[to] = self.features[of]

    def clear(self, *, drafter_only: bool = False) -> None:
        """Forget everything, or the drafter's layer: a NaN left behind would spoil sums even with weight zero."""
        if self._memory.is_released:
            return
        for pool in self._pools:
            (pool[-1] if drafter_only else pool).zero_()
        if self.features is not None and not drafter_only:
            self.features.zero_()

    def release(self) -> None:
        """Give the memory of keys, values and features back until ``restore_and_clear``; what stood there is lost."""
        self._memory.release()

    def close(self) -> None:
        """Give the memory back for good."""
        self._memory.close()

    def restore_and_clear(self) -> None:
        """Take the memory again if it was given back, and clear it."""
        if self._memory.is_released:
            self._memory.restore()
        else:
            self.clear()

    @abstractmethod
    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy keys and values of all layers but the drafter's from slots [m] to slots [m]."""

    @abstractmethod
    def make_span_layout(self, widths: Sequence[int]) -> SpanLayout:
        """The layout of a pass over rows whose spans have these widths."""

    @abstractmethod
    def build_layout(self, tables: Sequence[Sequence[int]], high_water: int) -> Layout | None:
        """The layout for passes over rows with these pages, in a pool used up to ``high_water``."""

    def make_attention(
        self,
        layout: Layout | None,
        tables: Tensor,
        positions: Tensor,
        committed: Tensor | None = None,
        ancestors: Tensor | None = None,
        only_layer: int | None = None,
    ) -> Attend:
        """Attention of a pass: stores keys and values at ``positions`` [B, n], then reads by ``layout``.

        A query sees the positions up to its own; with ``ancestors`` [B, n, N] it sees those before ``committed`` [B]
        and, of the N after them, its ancestors and itself. ``only_layer`` redirects layer 0 (the drafter's).
        """
        return self._make_pass_attentions(
            layout, tables, Seen(positions, committed, ancestors), positions.shape[1], only_layer
        )[0]

    def make_span_attention(self, spans: Spans, layouts: Sequence[Layout | None]) -> Attend:
        """Attention of a pass over spans, one group after another; ``layouts``: of the rows of each group."""
        start, parts = 0, list[tuple[slice, Attend]]()
        visible = spans.visible_nodes() if spans.is_tree else None
        for group, rows, layout in zip(spans.layout.groups, spans.layout.group_rows, layouts, strict=True):
            shape, committed, ancestors = (len(group.rows), group.width), None, None
            part = slice(start, start + shape[0] * shape[1])
            places, start = spans.places[part].view(shape), part.stop
            if visible is not None:
                nodes = torch.arange(group.width, device=places.device)
                ancestors = (visible[part].view(*shape, 1) >> nodes & 1).bool()
                committed = places[:, 0]
            parts.append((part, self.make_attention(layout, self.tables[rows], places, committed, ancestors)))
        if len(parts) == 1:
            return parts[0][1]

        def attend(layer: int, query: Tensor, key_value: Tensor) -> Tensor:
            return torch.cat([each(layer, query[part], key_value[part]) for part, each in parts])

        return attend

    def make_step_attentions(
        self, layout: Layout | None, tables: Tensor, positions: Tensor, only_layer: int | None = None
    ) -> list[Attend]:
        """Attentions of passes of one token a row each, at the columns of ``positions`` [B, D] one after another."""
        return self._make_pass_attentions(layout, tables, Seen(positions), 1, only_layer)

    @abstractmethod
    def _make_pass_attentions(
        self, layout: Layout | None, tables: Tensor, seen: Seen, width: int, only_layer: int | None
    ) -> list[Attend]:
        """Attentions of passes over ``width`` columns of positions each, one after another."""


@dataclass(frozen=True)
class Seen:
    """The positions that the queries of a pass may see; the arguments of ``PagedCache.make_attention``."""

    positions: Tensor
    committed: Tensor | None = None
    ancestors: Tensor | None = None

    def attention_mask(self, owner: Tensor, base: Tensor, offsets: Tensor, window: int = 0) -> Tensor:
        """Mask [e, n, S]: queries of rows ``owner`` [e] see the positions from ``base`` [e] on.

        With a ``window`` they see as many positions, their own included.
        """
        keys = (base.unsqueeze(1) + offsets).unsqueeze(1)
        if self.ancestors is None or self.committed is None:
            own = self.positions[owner].unsqueeze(2)
            return (keys <= own) & (keys > own - window) if window else keys <= own
        committed = self.committed[owner].view(-1, 1, 1)
        node, ancestors = keys - committed, self.ancestors[owner]
        n, count = ancestors.shape[1:]
        index = node.clamp(0, count - 1).expand(-1, n, -1)
        before, on_path = node < 0, (node >= 0) & (node < count) & ancestors.gather(2, index)
        if window:  # a node's place is counted along its path, of which it is the last
            assert n == count, "the queries of a pass are the tree's nodes"
            place = ancestors.sum(2, keepdim=True) - 1
            before = before & (keys > committed + place - window)
            on_path &= place - place.transpose(1, 2).expand(-1, n, -1).gather(2, index) < window
        return before | on_path


@dataclass(frozen=True)
class SharedPages:
    """Pages that several rows read (a group's prompt): each is read once, with its readers' queries stacked."""

    pages: Tensor
    """Ids [s]."""
    readers: Tensor
    """Rows [s, m], filled up with a first reader."""
    base: Tensor
    """Position [s * m] at which each begins for each reader."""


@dataclass(frozen=True)
class Layout:
    """The rows of a pass that read each page on a CPU; made again only when the pages change.

    An entry is a page with a row that reads it: first the pages of one reader, then those of several.
    """

    num_rows: int
    pages: Tensor | None
    """Ids [e] of the pages with one reader, or None for all pages from 0 to e."""
    owner: Tensor
    """Row [e] that reads each of them."""
    base: Tensor
    """Position [e] at which each begins for that row."""
    shared: SharedPages | None
    table: Tensor | None
    """Entries [B, P] of each row, None where entry i is row i's only one."""
    padding: Tensor | None
    """[B, P, 1, 1]: 0 at real entries, ``MASKED_SCORE`` where a row has fewer; None where each row has one."""


def make_layout(tables: Sequence[Sequence[int]], high_water: int, page_size: int, device: torch.device) -> Layout:
    """The layout of rows with these page tables, in a pool used up to ``high_water``."""
    readers: dict[int, list[int]] = {}
    base: dict[int, int] = {}
    for row, table in enumerate(tables):
        for index, page in enumerate(table):
            readers.setdefault(page, []).append(row)
            base[page] = index * page_size
    own = sorted(page for page, rows in readers.items() if len(rows) == 1)
    common = sorted(page for page, rows in readers.items() if len(rows) > 1)
    most = max((len(readers[page]) for page in common), default=0)
    # a slice of the pool needs no copy; it pays unless most of what it covers is not read
    whole = len(own) >= _WHOLE_POOL * high_water
    ids = list(range(high_water)) if whole else own
    place = {page: i for i, page in enumerate(ids)}
    entry = {(page, readers[page][0]): place[page] for page in own}
    for s, page in enumerate(common):
        entry.update({(page, row): len(ids) + s * most + k for k, row in enumerate(readers[page])})
    rows = [[entry[page, row] for page in table] for row, table in enumerate(tables)]
    longest = max(map(len, tables))
    read = set(own)

    def of(values: Sequence[object], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    shared = SharedPages(
        of(common),
        of([readers[page] + readers[page][:1] * (most - len(readers[page])) for page in common]),
        of([base[page] for page in common for _ in range(most)]),
    )
    plain = longest == 1 and [row[0] for row in rows] == list(range(len(ids)))
    padding = [[[[0.0]]] * len(row) + [[[MASKED_SCORE]]] * (longest - len(row)) for row in rows]
    return Layout(
        num_rows=len(tables),
        pages=None if whole else of(ids),
        owner=of([readers[page][0] if page in read else 0 for page in ids]),
        base=of([base[page] if page in read else OUT_OF_RANGE for page in ids]),
        shared=shared if common else None,
        table=None if plain else of([row + row[:1] * (longest - len(row)) for row in rows]),
        padding=of(padding, torch.float32) if longest > 1 else None,
    )


class HostPagedCache(PagedCache):
    """The pool of pages as CPUs read it fastest: heads apart, used pages together, a page of many rows read once."""

    wants_packing = True

    def __init__(self, shape: ModelShape, sizes: PoolSizes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, sizes, dtype, device)
        self._heads = (shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim)
        g, _, d = self._heads
        pool = self._num_layers, sizes.num_pages + 1, 2 * g, sizes.page_size, d
        self._pool = self._memory.allocate_zeros(*pool, dtype=dtype)
        self._pools = [self._pool]
        self._slot_heads = torch.arange(2 * g, device=device) * sizes.page_size
        self._offsets = torch.arange(sizes.page_size, device=device)

    def build_layout(self, tables: Sequence[Sequence[int]], high_water: int) -> Layout:
        """The entries (page, row that reads it) of passes over rows with these pages."""
        return make_layout(tables, high_water, self.page_size, self._pool.device)

    def make_span_layout(self, widths: Sequence[int]) -> SpanLayout:
        """Rows of about one width attend together."""
        return make_span_layout(group_by_width(widths), self.tables.device)

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy the target model's keys and values from slots [m] to slots [m]."""
        layers, d = self._num_target_layers, self._heads[2]
        flat = self._pool[:layers].view(layers, -1, d)
        to, of = self._pool_rows_of_slots(target), self._pool_rows_of_slots(source)
        flat[:, to] = flat[:, of]

    def _pool_rows_of_slots(self, slots: Tensor) -> Tensor:
        """Rows of the flattened pool that hold slots [m]: one for each of the 2 g heads -> [m * 2 g]."""
        first = (slots // self.page_size) * (2 * self._heads[0] * self.page_size) + slots % self.page_size
        return (first.unsqueeze(-1) + self._slot_heads).flatten()

    def _make_pass_attentions(
        self, layout: Layout | None, tables: Tensor, seen: Seen, width: int, only_layer: int | None
    ) -> list[Attend]:
        assert layout is not None
        count, num_columns = seen.positions.shape
        offsets = self._offsets[: self._num_read_positions(layout, seen.positions)]
        windows = set(self._windows[: self._num_target_layers] if only_layer is None else [self._windows[only_layer]])
        hidden = {window: self._additive_page_masks(layout, seen, offsets, window) for window in windows}
        write = self._pool_rows_of_slots(self.slots_of_positions(seen.positions, tables).flatten()).view(
            count, num_columns, -1
        )
        return [
            self._make_attention(
                layout,
                write[:, part].flatten(),
                {window: tuple(added[:, part] for added in each) for window, each in hidden.items()},
                only_layer,
            )
            for part in (slice(start, start + width) for start in range(0, num_columns, width))
        ]

    def _additive_page_masks(self, layout: Layout, seen: Seen, offsets: Tensor, window: int) -> tuple[Tensor, ...]:
        """``_additive_mask`` of the pages with one reader and, where there are some, of those with several."""
        own = self._additive_mask(seen, layout.owner, layout.base, offsets, window)
        if (shared := layout.shared) is None:
            return (own,)
        return own, self._additive_mask(seen, shared.readers.flatten(), shared.base, offsets, window)

    def _additive_mask(self, seen: Seen, owner: Tensor, base: Tensor, offsets: Tensor, window: int) -> Tensor:
        """Numbers [e, n, S] to add to scores: 0 where a query sees the position, else one that softmax makes 0."""
        visible, dtype = seen.attention_mask(owner, base, offsets, window), self._pool.dtype
        added = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return added.masked_fill_(~visible, max(MASKED_SCORE, torch.finfo(dtype).min))

    def _num_read_positions(self, layout: Layout, positions: Tensor) -> int:
        """Positions of a page that a pass reads: fewer than all while every row is within its first page."""
        if layout.padding is not None or not positions.is_cpu:  # a device's longest would have to be waited for
            return self.page_size
        return min(self.page_size, -(-(int(positions.max()) + 1) // _ROUND_LENGTH) * _ROUND_LENGTH)

    def _make_attention(
        self, layout: Layout, write: Tensor, hidden: dict[int, tuple[Tensor, ...]], only_layer: int | None
    ) -> Attend:
        """The closure over one pass: where it writes, and by window what own and shared pages it sees."""
        g, r, d = self._heads
        num_rows, n = layout.num_rows, next(iter(hidden.values()))[0].shape[1]
        shared, num_own = layout.shared, len(layout.owner)
        masks = {window: self._expand_masks_to_heads(layout, *added) for window, added in hidden.items()}

        def attend(layer: int, query: Tensor, key_value: Tensor) -> Tensor:
            at = layer if only_layer is None else only_layer
            pool, (mask, shared_mask) = self._pool[at], masks[self._windows[at]]
            width = mask.shape[-1]
            pool.view(-1, d).index_copy_(0, write, key_value.reshape(-1, d))
            q = query.reshape(num_rows, n, g, r, d).permute(0, 2, 3, 1, 4).reshape(num_rows, g, r * n, d)
            part = pool[:num_own] if layout.pages is None else pool.index_select(0, layout.pages)
            mine = q if layout.table is None else q.index_select(0, layout.owner)
            keys, values = part[:, :g, :width], part[:, g:, :width]
            if layout.padding is None or layout.table is None:
                out = F.scaled_dot_product_attention(mine, keys, values, mask)
                out = out if layout.table is None else out.index_select(0, layout.table.squeeze(1))
            else:
                out, lse = _attention(mine, keys, values, mask)
                if shared is not None and shared_mask is not None:
                    more, more_lse = self._attend_shared(pool, q, shared, shared_mask)
                    out, lse = torch.cat([out, more]), torch.cat([lse, more_lse])
                out = _merge_page_attentions(out, lse, layout.table, layout.padding)
            return out.view(num_rows, g, r, n, d).permute(0, 3, 1, 2, 4).reshape(num_rows * n, g * r * d)

        return attend

    def _expand_masks_to_heads(
        self, layout: Layout, own: Tensor, common: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The masks of own and of shared pages, for all query heads of a key-value head."""
        r, (_, n, width) = self._heads[1], own.shape
        mask = _repeat_mask_by_query(own, r)
        if layout.shared is None or common is None:
            return mask, None
        each = _repeat_mask_by_query(common, r).expand(-1, -1, r * n, -1)
        return mask, each.reshape(len(layout.shared.pages), 1, -1, width)

    def _attend_shared(self, pool: Tensor, q: Tensor, shared: SharedPages, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Pages that several rows read, each once with all its readers' queries [B, g, m, d] stacked."""
        g, _, d = self._heads
        count, most = shared.readers.shape
        pages = pool.index_select(0, shared.pages)
        stacked = q[shared.readers].transpose(1, 2).reshape(count, g, -1, d)
        out, lse = _attention(stacked, pages[:, :g], pages[:, g:], mask)
        each = q.shape[2]
        out = out.reshape(count, g, most, each, d).transpose(1, 2).reshape(-1, g, each, d)
        return out, lse.reshape(count, g, most, each).transpose(1, 2).reshape(-1, g, each)


def _repeat_mask_by_query(added: Tensor, r: int) -> Tensor:
    """Mask [e, 1, r * n, S] (r once for a single query: it broadcasts) of ``added`` [e, n, S]."""
    entries, n, width = added.shape
    mask = added.unsqueeze(1)
    return mask if n == 1 else mask.unsqueeze(2).expand(-1, -1, r, -1, -1).reshape(entries, 1, r * n, width)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and the log of its normaliser: q [e, g, m, d], k and v [e, g, S, d] -> [e, g, m, d], [e, g, m]."""
    if q.is_cpu:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)
        return out, lse
    scores = torch.matmul(q, k.transpose(2, 3)).float() * q.shape[-1] ** -0.5 + mask
    lse = scores.logsumexp(-1)
    return torch.matmul((scores - lse.unsqueeze(-1)).exp().to(v.dtype), v), lse


def _merge_page_attentions(out: Tensor, lse: Tensor, table: Tensor, padding: Tensor) -> Tensor:
    """Join each row's pages: out [e, g, m, d], lse [e, g, m], table [B, P] -> [B, g, m, d]."""
    each = lse[table] + padding
    weight = each.softmax(1).unsqueeze(-1).to(out.dtype)
    return (out[table] * weight).sum(1)
