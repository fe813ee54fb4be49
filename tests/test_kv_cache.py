"""Both paged caches against attention over plain dense tensors: pages anywhere, shared, gathered, moved."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from test_spans import random_drafts
from tiny import CPU, tree_relations

from tlt_hpc.models.shape import shape_from
from tlt_hpc.rollout.device_cache import DevicePagedCache, make_block_layout
from tlt_hpc.rollout.kv_cache import HostPagedCache, PoolSizes, page_bytes
from tlt_hpc.rollout.spans import flatten_drafts, group_by_width, make_span_layout, make_spans

SHAPE = shape_from(
    {
        "model_type": "qwen2",
        "vocab_size": 11,
        "hidden_size": 24,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
    },
    "test",
)
G, R, D = 2, 3, 4
both = pytest.mark.parametrize("kind", [HostPagedCache, DevicePagedCache])


class Dense:
    """Keys and values of each row as plain lists of positions."""

    def __init__(self, lengths, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.kv = [torch.randn(length, 2 * G, D, generator=generator) for length in lengths]

    def attend(self, row, query, seen):
        """query [h, d] over the positions ``seen`` of a row."""
        keys = self.kv[row][seen, :G].repeat_interleave(R, 1)
        values = self.kv[row][seen, G:].repeat_interleave(R, 1)
        weight = (torch.einsum("hd,shd->hs", query, keys) * D**-0.5).softmax(-1)
        return torch.einsum("hs,shd->hd", weight, values).flatten()


def pools(cache):
    """The tensors [layers, pages, ...] that hold keys and values."""
    return [cache._pool] if isinstance(cache, HostPagedCache) else [cache._keys, cache._values]


def filled(kind, tables, dense, size, num_pages, shape=SHAPE):
    """A cache that holds the dense rows in pages ``tables``, written in a pass of its own for each row."""
    cache = kind(shape, PoolSizes(num_pages, size, len(tables), num_pages * size), torch.float32, CPU)
    for pool in pools(cache):
        pool.fill_(1e4)  # what a page's former owner left
    for row, table in enumerate(tables):
        cache.set_table(row, table)
        length = len(dense.kv[row])
        if length:
            positions = torch.arange(length).unsqueeze(0)
            layout = cache.build_layout([table], num_pages)
            attend = cache.make_attention(layout, cache.tables[row : row + 1], positions)
            for layer in range(2):
                attend(layer, torch.zeros(length, G * R, D), dense.kv[row])
    return cache


def random_rows(source, size, width):
    """Page tables, and rows with room for ``width`` more tokens; rows of a group share their first pages."""
    groups = [[source.randint(1, 40) for _ in range(source.randint(1, 3))] for _ in range(3)]
    pages = source.sample(range(160), 160 if size == 4 else 100)
    tables, kv = [], []
    for lengths in groups:
        num_shared = min(lengths) // size
        common, first = [pages.pop() for _ in range(num_shared)], len(tables)
        for row in Dense([length + width for length in lengths], source.randrange(99)).kv:
            kv.append(row)
            row[: num_shared * size] = kv[first][: num_shared * size]
            tables.append(common + [pages.pop() for _ in range(-(-len(row) // size) - num_shared)])
    return tables, kv


@both
@pytest.mark.parametrize("window", [0, 1, 3, 12])
@pytest.mark.parametrize("seed", range(8))
def test_attention_is_that_over_dense_tensors(kind, seed, window):
    """Chains, the same step by step, and trees, over rows of all lengths whose pages are anywhere and partly shared."""
    shape = replace(SHAPE, window=window, local_layers=(True, True)) if window else SHAPE
    source, width = random.Random(seed), 6 if seed < 6 else 70  # more than a kernel takes at once
    size = source.choice([4, 16, 64] if width == 6 else [16, 64])
    tables, kv = random_rows(source, size, width)
    dense, held = Dense([]), Dense([])
    dense.kv, held.kv = kv, [row[:-width] for row in kv]
    lengths = [len(row) for row in held.kv]
    cache = filled(kind, tables, held, size, 160, shape)
    layout = cache.build_layout(tables, max(map(max, tables)) + 1)
    query, new = torch.randn(len(kv), width, G * R, D), torch.stack([row[-width:] for row in kv])
    committed, close = torch.tensor(lengths), partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
    positions = committed.unsqueeze(1) + torch.arange(width)
    ancestors = tree_relations([0, 0, 0, 1, 2, 3])[1].repeat(len(kv), 1, 1)

    def read(layer, part, *of_tree):
        attend = cache.make_attention(layout, cache.tables, positions[:, part], *of_tree)
        return attend(layer, query[:, part].flatten(0, 1), new[:, part].flatten(0, 1)).view(len(kv), -1, G * R * D)

    branched, chain = read(0, slice(6), committed, ancestors), read(1, slice(width))
    if not window:  # the newest nodes alone, as the drafter grows its tree
        close(read(0, slice(4, 6), committed, ancestors[:, 4:]), branched[:, 4:])
    steps = enumerate(cache.make_step_attentions(layout, cache.tables, positions[:, :6]))
    close(torch.stack([step(1, query[:, i], new[:, i]) for i, step in steps], 1), chain[:, :6])
    for row, length in enumerate(lengths):
        for i in range(width):
            close(chain[row, i], dense.attend(row, query[row, i], range(length + i + 1)[-window:]))
        for i in range(6):
            seen = [*range(length), *(length + j for j in ancestors[row, i].nonzero().flatten().tolist())]
            close(branched[row, i], dense.attend(row, query[row, i], seen[-window:]))


@both
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("seed", range(6))
def test_attention_of_spans_is_that_over_dense_tensors(kind, seed, window):
    """Chains and trees of any lengths in one pass, over pages that are partly shared."""
    shape = replace(SHAPE, window=window, local_layers=(True, True)) if window else SHAPE
    source, width = random.Random(seed), 12
    tables, kv = random_rows(source, 16, width)
    dense, held = Dense([]), Dense([])
    dense.kv, held.kv = kv, [row[:-width] for row in kv]
    rows, drafts = random_drafts(source, len(kv), width)
    held.kv.append(kv[0][:0])  # the row of the padding, which has no page
    cache = filled(kind, [*tables, []], held, 16, 160, shape)
    lengths = torch.tensor([len(row) for row in held.kv])
    if kind is HostPagedCache:
        layout = make_span_layout(group_by_width(drafts.widths), CPU)
    else:
        layout = make_block_layout(drafts.widths, sum(drafts.widths) + 3, len(kv) + 1, 5, CPU)
    spans = make_spans(layout, lengths + 1, drafts.deepest, *flatten_drafts(drafts, layout))
    high = max(map(max, tables)) + 1
    layouts = [cache.build_layout([tables[row] for row in group.rows], high) for group in layout.groups]
    query = torch.randn(len(layout.rows), G * R, D)
    attend = cache.make_span_attention(spans, layouts)
    places = zip(layout.rows.tolist(), spans.places.tolist(), strict=True)
    new = torch.stack([(kv[row] if row < len(kv) else kv[0])[place] for row, place in places])
    found, first = attend(0, query, new), layout.first_tokens
    for row, (_, parents) in enumerate(rows):
        for node, above in enumerate(tree_relations(parents)[1]):
            seen = [*range(lengths[row]), *(int(lengths[row]) + above.nonzero().flatten()).tolist()]
            at = int(first[row]) + node
            wanted = dense.attend(row, query[at], seen[-window:])
            torch.testing.assert_close(found[at], wanted, atol=1e-5, rtol=1e-5)


@both
def test_copied_pages_and_moved_slots_hold_what_they_held(kind):
    dense = Dense([8])
    cache = filled(kind, [[0, 1]], dense, 4, 4)
    before = [pool.clone() for pool in pools(cache)]
    cache.copy_pages({0: 3, 1: 2})
    for pool, was in zip(pools(cache), before, strict=True):
        assert torch.equal(pool[:, 3], was[:, 0])
        assert torch.equal(pool[:, 2], was[:, 1])
    cache.copy_slots(torch.tensor([6, 7]), torch.tensor([5, 6]))
    axis = 2 if kind is HostPagedCache else 1
    for pool, was in zip(pools(cache), before, strict=True):
        moved, held = pool[:, 1].unbind(axis), was[:, 1].unbind(axis)
        assert torch.equal(moved[1], held[2])
        assert torch.equal(moved[2], held[3]), "an overlapping move reads before it writes"
        assert torch.equal(moved[0], held[0])


@both
def test_bytes_of_a_page(kind):
    cache = kind(SHAPE, PoolSizes(7, 16, 2, 64, 1), torch.float32, CPU)
    held = sum(pool.nbytes for pool in pools(cache)) + cache.features.nbytes
    assert held == 8 * page_bytes(SHAPE, 16, torch.float32, 1)
    assert page_bytes(SHAPE, 16, torch.bfloat16, 0) == 16 * 2 * 2 * 2 * G * D
