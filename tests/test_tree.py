"""Draft trees and the walk, against a walk written as one would say it."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_hpc.rollout.tree import EMPTY, emitted_counts, make_tree, nodes_on_path, path_nodes_in_order

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


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 4))
def test_the_walk_follows_the_choices(seed, num_nodes, num_rows):
    source = random.Random(seed)
    rows = [random_tree(source, source.randint(1, num_nodes)) for _ in range(num_rows)]
    width = max(len(tokens) for tokens, _ in rows)
    padded = [(t + [EMPTY] * (width - len(t)), p + [0] * (width - len(p))) for t, p in rows]
    drafts = make_tree(torch.tensor([t for t, _ in padded]), torch.tensor([p for _, p in padded]), width)
    chosen = torch.tensor([[source.randrange(4) for _ in range(drafts.num_nodes)] for _ in rows])
    on_path = nodes_on_path(chosen, drafts)
    paths = path_nodes_in_order(on_path, drafts.num_nodes)
    for b, (tokens, parents) in enumerate(rows):
        wanted = plain_walk(chosen[b].tolist(), tokens, parents)
        assert on_path[b].nonzero().flatten().tolist() == wanted
        assert paths[b, : len(wanted)].tolist() == wanted


def test_ancestors_and_depths():
    #      0
    #    1   2
    #   3 4   5
    #     6
    drafts = make_tree(torch.tensor([[9, 1, 2, 1, 2, 3, 1]]), torch.tensor([[0, 0, 0, 1, 1, 2, 4]]), 3)
    assert drafts.depths.tolist() == [[0, 1, 1, 2, 2, 2, 3]]
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 1, 4, 6]]
    assert [row.nonzero().flatten().tolist() for row in drafts.ancestors[0]] == paths


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
