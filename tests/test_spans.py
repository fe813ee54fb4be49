"""Spans of drafts and the walk, against a walk written as one would say it."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tree_relations

from tlt_hpc.rollout.device_cache import make_block_layout
from tlt_hpc.rollout.graph_pass import graph_size, graph_sizes
from tlt_hpc.rollout.spans import (
    DraftTable,
    emitted_counts,
    flatten_drafts,
    group_by_width,
    make_draft_chains,
    make_span_layout,
    make_spans,
    replace_rows,
    walk,
)

CPU = torch.device("cpu")


def plain_walk(chosen, tokens, parents):
    """The nodes on the realised path, from the root on."""
    at, path = 0, [0]
    while True:
        following = [i for i in range(1, len(tokens)) if parents[i] == at and tokens[i] == chosen[at]]
        if not following:
            return path
        at = following[0]
        path.append(at)


def random_tree(source, num_nodes, num_tokens=4):
    """Tokens and parents of a tree whose siblings differ."""
    tokens, parents, taken = [source.randrange(num_tokens)], [0], set()
    while len(tokens) < num_nodes:
        parent, token = source.randrange(len(tokens)), source.randrange(num_tokens)
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


def random_drafts(source, num_rows, most):
    """Trees and chains by row (tokens, parents), and the table of both."""
    is_tree = [source.random() < 0.5 for _ in range(num_rows)]
    width = source.randint(1, most)
    rows = [random_tree(source, width) if tree else random_chain(source, most) for tree in is_tree]
    table = make_draft_chains(
        [tokens[:1] if tree else tokens for tree, (tokens, _) in zip(is_tree, rows, strict=True)], CPU
    )
    which = [row for row, tree in enumerate(is_tree) if tree]
    if which:
        tokens, parents = (torch.tensor([rows[row][i] for row in which]) for i in range(2))
        depth = max(int(tree_relations(rows[row][1])[0].max()) for row in which)
        table = replace_rows(table, which, DraftTable(tokens, [width] * len(which), parents, depth))
    return rows, table


def random_chain(source, most):
    length = source.randint(1, most)
    return [source.randrange(4) for _ in range(length)], [max(0, i - 1) for i in range(length)]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 5), st.booleans())
def test_the_walk_follows_the_choices(seed, most, num_rows, is_padded):
    """In each row, whatever the others draft, in groups or filled up to a number of tokens."""
    source = random.Random(seed)
    rows, table = random_drafts(source, num_rows, most)
    assert list(table.widths) == [len(tokens) for tokens, _ in rows]
    if is_padded:
        total = sum(table.widths) + source.randint(0, 9)
        layout = make_block_layout(table.widths, total, num_rows + 1, source.randint(1, 5), CPU)
    else:
        layout = make_span_layout(group_by_width(table.widths), CPU)
    lengths = torch.tensor([source.randint(1, 9) for _ in range(layout.num_rows)])
    spans = make_spans(layout, lengths, table.deepest, *flatten_drafts(table, layout))
    chosen = torch.tensor([source.randrange(4) for _ in spans.tokens])
    first = layout.first_tokens.tolist()
    found, visible = walk(chosen, spans), spans.visible_nodes()
    for b, (tokens, parents) in enumerate(rows):
        own = slice(first[b], first[b] + len(tokens))
        assert spans.tokens[own].tolist() == tokens and set(layout.rows[own].tolist()) == {b}
        wanted = [first[b] + node for node in plain_walk(chosen[own].tolist(), tokens, parents)]
        assert found.path[b, : len(wanted)].tolist() == wanted and int(found.accepted[b]) == len(wanted) - 1
        if found.on_path is not None:
            assert (found.on_path & (layout.rows == b)).nonzero().flatten().tolist() == wanted
        for node, parent in enumerate(parents):
            above = int(visible[first[b] + parent]) if node else 0
            assert int(visible[first[b] + node]) == above | 1 << node
            assert spans.places[first[b] + node] == lengths[b] - 1 + node
            assert spans.positions[first[b] + node] == lengths[b] - 1 + above.bit_count()
    depths = spans.positions - lengths[layout.rows] + 1
    assert int(depths.max()) <= spans.deepest, "there is noise for no more"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_groups_hold_each_row_once_and_pad_little(widths):
    groups = group_by_width(widths)
    assert sorted(row for group in groups for row in group.rows) == list(range(len(widths)))
    assert all(1 <= widths[row] <= group.width for group in groups for row in group.rows)
    cost = sum(len(group.rows) * group.width + 8 for group in groups)
    assert cost <= len(widths) * max(widths) + 8 and cost <= sum(widths) + 8 * len(set(widths))


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(0, 20), st.integers(1, 8))
def test_blocks_hold_each_token_once_and_none_of_two_rows(widths, missing, num_queries):
    total = max(1, sum(widths) + missing)
    layout = make_block_layout(widths, total, 13, num_queries, CPU)
    slots = layout.token_of_slot.flatten()
    assert sorted(slots[slots >= 0].tolist()) == list(range(total))
    for block in layout.token_of_slot:
        used = block[block >= 0]
        assert (block[: len(used)] == used).all()
        if len(used) and layout.rows[used[0]] < 12:
            assert len(set(layout.rows[used].tolist())) == 1
    other = make_block_layout((), total, 13, num_queries, CPU)
    assert other.token_of_slot.shape == layout.token_of_slot.shape, "a graph serves both"


@pytest.mark.parametrize(
    ("chosen", "accepted", "room", "ends", "count", "ended"),
    [
        ([3, 4, 5], 2, 9, [1], 3, False),
        ([3, 4, 5], 0, 9, [1], 1, False),
        ([3, 1, 5], 2, 9, [1], 2, True),
        ([3, 4, 1], 1, 9, [1], 2, False),
        ([3, 4, 5], 2, 2, [1], 2, False),
        ([3, 4, 1], 2, 2, [1], 2, False),
        ([3, 6, 1], 2, 9, [1, 6], 2, True),
    ],
)
def test_what_a_row_emits(chosen, accepted, room, ends, count, ended):
    counts, over = emitted_counts(
        torch.tensor([chosen]), torch.tensor([accepted]), torch.tensor([room]), torch.tensor(ends)
    )
    assert (counts.item(), over.item()) == (count, ended)


@given(st.integers(1, 3000), st.booleans(), st.data())
def test_a_graph_is_hardly_larger_than_what_it_serves(most, is_tree, data):
    count = data.draw(st.integers(1, most))
    size, sizes = graph_size(count, most, is_tree), graph_sizes(most, most, is_tree)
    assert count <= size <= max(64, count + 63, (6 if is_tree else 5) * count // 4) and size <= most
    assert size in sizes and len(sizes) < (15 if is_tree else 21)
