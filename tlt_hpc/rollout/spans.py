"""The tokens of a round as one flat list, in which each row has a span of its own length, and the walk along a path.

A span begins with its row's last committed token, node 0; drafts follow, parents before their children, and siblings
differ in their token. Where the spans lie is known on the host before anything is drafted. Pure tensor functions.
Shapes: ``T`` tokens of a pass, ``B`` rows that draft, ``R`` all rows, ``N`` nodes of the widest span, ``m`` columns of
the longest path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tlt_hpc.rollout.transfer import upload

EMPTY = -1
"""The token of a missing node: it equals no choice, so no path contains it."""
NUM_KEPT = 64
"""Layouts, and indexes of rows, of the last rounds that are kept: the same ones are often asked for again."""
_GROUP_TOKENS = 8
"""Tokens that a further group of spans costs as much as: its attention is computed by itself."""


# -- what is drafted --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftTable:
    """Drafts by row: tokens [B, N] from node 0 on, ``EMPTY`` beyond a row's width, and parents [B, N] of trees."""

    tokens: Tensor | None
    """None where nothing is drafted."""
    widths: Sequence[int]
    """Nodes of each row."""
    parents: Tensor | None = None
    """None where every row is a chain."""
    tree_depth: int = 0
    """Depth of the trees."""

    @property
    def deepest(self) -> int:
        """No node is deeper."""
        return max(self.widths) - 1 if self.parents is None else self.tree_depth


def make_draft_chains(rows: Sequence[Sequence[int]], device: torch.device) -> DraftTable:
    """Chains from each row's tokens, node 0 first."""
    widths = [len(row) for row in rows]
    most = max(widths)
    return DraftTable(upload([[*row, *[EMPTY] * (most - len(row))] for row in rows], device), widths)


def replace_rows(chains: DraftTable, which: Sequence[int], drafts: DraftTable) -> DraftTable:
    """``chains`` with the rows ``which`` taken from ``drafts``, one after another."""
    tokens, widths = chains.tokens, list(chains.widths)
    assert tokens is not None and drafts.tokens is not None
    device = tokens.device
    most = max(tokens.shape[1], drafts.tokens.shape[1])
    index = upload(which, device)
    tokens = F.pad(tokens, (0, most - tokens.shape[1]), value=EMPTY)
    tokens[index] = F.pad(drafts.tokens, (0, most - drafts.tokens.shape[1]), value=EMPTY)
    for row, width in zip(which, drafts.widths, strict=True):
        widths[row] = width
    if drafts.parents is None:
        return DraftTable(tokens, widths)
    parents = (torch.arange(most, device=device) - 1).clamp(min=0).repeat(len(widths), 1)
    parents[index] = F.pad(drafts.parents, (0, most - drafts.parents.shape[1]))
    parents.masked_fill_(tokens == EMPTY, 0)  # a missing node is no deeper than the others
    return DraftTable(tokens, widths, parents, max(drafts.tree_depth, max(chains.widths) - 1))


# -- where spans lie --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpanGroup:
    """Rows whose spans have one width and lie one after another."""

    rows: tuple[int, ...]
    width: int


def group_by_width(widths: Sequence[int]) -> list[SpanGroup]:
    """Few groups in which spans are little wider than they must be: rows by width, joined where that costs least."""
    counts = sorted(Counter(widths).items())
    # best[i]: padded tokens, and where the last group begins, of the i smallest widths
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(counts) + 1):
        width = counts[end - 1][0]
        best.append(
            min(
                (best[start][0] + _GROUP_TOKENS + width * sum(count for _, count in counts[start:end]), start)
                for start in range(end)
            )
        )
    groups, end = list[SpanGroup](), len(counts)
    while end:
        start = best[end][1]
        low, high = counts[start][0], counts[end - 1][0]
        groups.append(SpanGroup(tuple(row for row, width in enumerate(widths) if low <= width <= high), high))
        end = start
    return groups[::-1]


@dataclass(frozen=True)
class SpanLayout:
    """Places of the spans of a pass over ``R`` rows, of which those that have no span get nothing."""

    index: Tensor
    """Of each token its row, the same but 0 for padding, its place in its span, and the index of its node 0 [4, T]."""
    num_rows: int
    longest: int
    """Columns of a path: no span is longer, if it is a chain."""
    groups: Sequence[SpanGroup] = ()
    token_of_slot: Tensor | None = None
    """Token of each slot of blocks of queries [blocks, W], for attention that is computed by block; -1: none."""
    numbers: Tensor | None = None
    """These tensors as one, for a graph, which copies its inputs."""

    @classmethod
    def from_numbers(
        cls, numbers: Tensor, num_tokens: int, num_queries: int, num_rows: int, longest: int
    ) -> SpanLayout:
        """The layout with blocks of ``num_queries`` whose ``numbers`` are these."""
        index, slots = numbers[: 4 * num_tokens].view(4, -1), numbers[4 * num_tokens :].view(-1, num_queries)
        return cls(index, num_rows, longest, token_of_slot=slots, numbers=numbers)

    # what follows from these is computed once for all passes of a layout
    @cached_property
    def rows(self) -> Tensor:
        """Row [T] of each token."""
        return self.index[0]

    @cached_property
    def nodes(self) -> Tensor:
        """Place [T] of each token in its span."""
        return self.index[2]

    @cached_property
    def places_after_length(self) -> Tensor:
        """Place [T] of each token in its row's text, less the text's length."""
        return self.nodes - 1

    @cached_property
    def table_index(self) -> tuple[Tensor, Tensor]:
        """Row and column [T] of each token in a table of drafts."""
        return self.index[1], self.index[2]

    @cached_property
    def chain_parents(self) -> Tensor:
        """Index [T] of the token before each in its span; node 0 has its own."""
        return self.index[3] + (self.nodes - 1).clamp(min=0)

    @cached_property
    def roots(self) -> Tensor:
        """Index [T] of node 0 of each token's span."""
        return self.index[3]

    @cached_property
    def first_tokens(self) -> Tensor:
        """Index [R] of node 0 of each row's span."""
        return self.rows.new_zeros(self.num_rows).scatter_(0, self.rows, self.roots)

    @cached_property
    def widths(self) -> Tensor:
        """Tokens [R] of each row's span."""
        return self.rows.new_zeros(self.num_rows).index_add_(0, self.rows, torch.ones_like(self.rows))

    @cached_property
    def wrong_nodes(self) -> Tensor:
        """Place [T] in its span at which a chain ends if a token is wrong; node 0 never is."""
        return torch.where(self.nodes == 0, len(self.nodes), self.nodes)

    @cached_property
    def span_nodes(self) -> Tensor:
        """Index [R, m] of the nodes of each row's span; entries beyond its width are meaningless."""
        columns = torch.arange(self.longest, device=self.rows.device)
        # those beyond a row's width are another row's, and the last ones would lie outside
        return (self.first_tokens.unsqueeze(1) + columns).clamp(max=len(self.rows) - 1)

    @cached_property
    def group_rows(self) -> list[Tensor | slice]:
        """Rows of each group, as an index."""
        found, start = list[Tensor | slice](), 0
        for group in self.groups:
            count, end = len(group.rows), start + len(group.rows) * group.width
            in_order = group.rows == tuple(range(count))
            found.append(slice(count) if in_order else self.rows[start : end : group.width])
            start = end
        return found


def make_span_layout(groups: Sequence[SpanGroup], device: torch.device) -> SpanLayout:
    """The layout of spans that lie in the order of ``groups``."""
    num_rows, longest = sum(len(group.rows) for group in groups), max(group.width for group in groups)
    return SpanLayout(upload(span_index(groups), device), num_rows, longest, groups)


def span_index(groups: Sequence[SpanGroup], num_tokens: int = 0, spare_row: int = 0) -> NDArray[np.int64]:
    """The ``index`` [4, T] of a layout that is filled up to ``num_tokens`` with tokens of ``spare_row``."""
    order = [row for group in groups for row in group.rows]
    widths = np.array([group.width for group in groups for _ in group.rows], np.int64)
    starts, total = np.cumsum(widths) - widths, int(widths.sum())
    missing = max(0, num_tokens - total)
    rows, roots = np.repeat(np.array(order, np.int64), widths), np.repeat(starts, widths)
    return np.stack((
        np.pad(rows, (0, missing), constant_values=spare_row),
        np.pad(rows, (0, missing)),
        np.pad(np.arange(total) - roots, (0, missing)),
        np.concatenate((roots, total + np.arange(missing))),
    ))  # fmt: skip


# -- a pass -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spans:
    """The tokens [T] of a pass, with what says how they belong together, [T] each."""

    tokens: Tensor
    parents: Tensor
    """Index of each node's parent; node 0 is its own."""
    places: Tensor
    """Position at which each node's keys and values are kept during the pass: after its row's committed ones."""
    positions: Tensor
    """Position of each node in a text that takes the path to it; in a chain its place."""
    deepest: int
    """No node is deeper."""
    is_tree: bool
    """False if every span is a chain."""
    layout: SpanLayout

    def visible_nodes(self) -> Tensor:
        """The nodes of its span that each sees, its ancestors and itself: bits of an int64 [T]."""
        bits, jump = torch.ones_like(self.parents) << self.layout.nodes, self.parents
        for _ in range(self.deepest.bit_length()):  # each time twice as far up
            bits, jump = bits | bits[jump], jump[jump]
        return bits


def flatten_drafts(drafts: DraftTable, layout: SpanLayout) -> list[Tensor]:
    """Tokens [T] of drafts, if there are some, and of trees the place [T] of each one's parent in its span."""
    return [x[layout.table_index] for x in (drafts.tokens, drafts.parents) if x is not None]


def make_spans(
    layout: SpanLayout, lengths: Tensor, deepest: int, tokens: Tensor, parents: Tensor | None = None
) -> Spans:
    """The spans of tokens [T] and parents [T] as in ``flatten_drafts``, for rows whose texts have these lengths [R]."""
    places = lengths[layout.rows] + layout.places_after_length
    if parents is None:
        return Spans(tokens, layout.chain_parents, places, places, deepest, False, layout)
    parents = layout.roots + parents
    depths, jump = (layout.nodes > 0).long(), parents
    for _ in range(deepest.bit_length()):
        depths, jump = depths + depths[jump], jump[jump]
    return Spans(tokens, parents, places, places - layout.nodes + depths, deepest, True, layout)


@dataclass(frozen=True)
class Walk:
    """The realised path of each row: each node on it drafted the target's choice at its parent."""

    path: Tensor
    """Index [R, m] of its nodes in order; entries beyond its length are meaningless."""
    accepted: Tensor
    """Its drafts [R]; -1: the row is not in the pass."""
    on_path: Tensor | None
    """Of trees the nodes on it, a mask [T]."""


def walk(choices: Tensor, spans: Spans) -> Walk:
    """The paths along the target's choices [T]."""
    layout = spans.layout
    if layout.longest == 1:
        return Walk(layout.span_nodes, layout.widths - 1, None)
    found = spans.tokens == choices[spans.parents]
    if not spans.is_tree:  # up to the first wrong one
        wrong = torch.where(found, len(found), layout.wrong_nodes)
        reached = layout.widths.clone().scatter_reduce_(0, layout.rows, wrong, "amin")
        return Walk(layout.span_nodes, reached - 1, None)
    found, jump = found | (layout.nodes == 0), spans.parents
    for _ in range(spans.deepest.bit_length()):
        found, jump = found & found[jump], jump[jump]
    longest, device = spans.deepest + 1, found.device
    column = torch.where(found, spans.positions - spans.places[layout.roots], longest)
    path = torch.zeros(layout.num_rows, longest + 1, dtype=torch.int64, device=device)
    path[layout.rows, column] = torch.arange(len(found), device=device)
    accepted = torch.full((layout.num_rows,), -1, device=device).index_add_(0, layout.rows, found.long())
    return Walk(path[:, :longest], accepted, found)


def emitted_counts(chosen: Tensor, accepted: Tensor, room: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that a row emits, and whether the last of them ends its response by an end token.

    Accepted drafts and the bonus token are emitted, cut after the first of the end tokens ``ends`` [e] and at the row's
    ``room`` [B]; ``chosen`` [B, m] are the choices along the path.
    """
    columns = torch.arange(chosen.shape[1], device=chosen.device)
    count = torch.minimum(accepted + 1, room)
    is_end = (chosen.unsqueeze(2) == ends).any(2) & (columns < count.unsqueeze(1))
    ended = is_end.any(1)
    first_end = is_end.long().argmax(1)
    return torch.where(ended, first_end + 1, count), ended
