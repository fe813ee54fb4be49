"""Both paged caches against attention over plain dense tensors: pages anywhere, shared, gathered, moved."""

import random

import pytest
import torch
from tiny import CPU

from tlt_hpc.models.shape import shape_from
from tlt_hpc.rollout.device_cache import DevicePagedCache
from tlt_hpc.rollout.kv_cache import HostPagedCache, PoolSizes, page_bytes
from tlt_hpc.rollout.tree import tree

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


def filled(kind, tables, dense, size, num_pages):
    """A cache that holds the dense rows in pages ``tables``, written in a pass of its own for each row."""
    cache = kind(SHAPE, PoolSizes(num_pages, size, len(tables), num_pages * size), torch.float32, CPU)
    for row, table in enumerate(tables):
        cache.set_table(row, table)
        length = len(dense.kv[row])
        if length:
            positions = torch.arange(length).unsqueeze(0)
            layout = cache.layout([table], num_pages)
            attend = cache.attend(layout, cache.tables[row : row + 1], positions)
            for layer in range(2):
                attend(layer, torch.zeros(length, G * R, D), dense.kv[row])
    return cache


@both
@pytest.mark.parametrize("size", [4, 16, 64])
@pytest.mark.parametrize("lengths", [[1], [3, 17, 9], [30, 2, 2, 2, 41]])
def test_chains_over_scattered_pages(kind, size, lengths):
    source = random.Random(size)
    width = 3
    needed = [-(-(length + width) // size) for length in lengths]
    pages = source.sample(range(sum(needed) + 3), sum(needed))
    tables = [[pages.pop() for _ in range(count)] for count in needed]
    dense = Dense([length + width for length in lengths])
    held = Dense([0])
    held.kv = [kv[:length] for kv, length in zip(dense.kv, lengths, strict=True)]
    cache = filled(kind, tables, held, size, sum(needed) + 3)
    positions = torch.tensor(lengths).unsqueeze(1) + torch.arange(width)
    query = torch.randn(len(lengths) * width, G * R, D)
    new = torch.cat([kv[length:] for kv, length in zip(dense.kv, lengths, strict=True)])
    layout = cache.layout(tables, max(map(max, tables)) + 1)
    got = cache.attend(layout, cache.tables, positions)(1, query, new).view(len(lengths), width, -1)
    steps = cache.attend_steps(layout, cache.tables, positions)
    for row, length in enumerate(lengths):
        for i in range(width):
            wanted = dense.attend(row, query[row * width + i], range(length + i + 1))
            torch.testing.assert_close(got[row, i], wanted, atol=1e-5, rtol=1e-5)
    for i in range(width):
        one = steps[i](
            1, query.view(len(lengths), width, G * R, D)[:, i], new.view(len(lengths), width, 2 * G, D)[:, i]
        )
        torch.testing.assert_close(one, got[:, i], atol=1e-5, rtol=1e-5)


@both
@pytest.mark.parametrize("whole", [True, False])
def test_trees_see_their_ancestors_alone(kind, whole):
    lengths, size = [5, 18], 8
    tables = [[2, 0], [1, 3, 4]] if whole else [[20, 3], [11, 7, 15]]
    parents = torch.tensor([[0, 0, 0, 1, 2, 3]] * 2)
    drafts = tree(torch.zeros(2, 6, dtype=torch.int64), parents, 3)
    dense = Dense([length + 6 for length in lengths])
    held = Dense([0])
    held.kv = [kv[:length] for kv, length in zip(dense.kv, lengths, strict=True)]
    cache = filled(kind, tables, held, size, 24)
    committed = torch.tensor(lengths)
    positions = committed.unsqueeze(1) + torch.arange(6)
    query = torch.randn(12, G * R, D)
    new = torch.cat([kv[length:] for kv, length in zip(dense.kv, lengths, strict=True)])
    layout = cache.layout(tables, max(map(max, tables)) + 1)
    if kind is HostPagedCache:
        assert (layout.pages is None) == whole
    got = cache.attend(layout, cache.tables, positions, committed, drafts.ancestors)(0, query, new).view(2, 6, -1)
    for row, length in enumerate(lengths):
        for i in range(6):
            seen = [*range(length), *(length + j for j in drafts.ancestors[row, i].nonzero().flatten().tolist())]
            torch.testing.assert_close(got[row, i], dense.attend(row, query[row * 6 + i], seen), atol=1e-5, rtol=1e-5)


@both
def test_pages_that_several_rows_share(kind):
    """Two groups of three and two rows with common first pages, and one row alone."""
    size = 4
    tables = [[5, 6, 0], [5, 6, 1], [5, 6, 2], [7, 3], [7, 4, 8], [9]]
    lengths = [9, 11, 8, 6, 9, 2]
    dense = Dense([length + 1 for length in lengths])
    for row in (1, 2):
        dense.kv[row][:8] = dense.kv[0][:8]
    dense.kv[4][:4] = dense.kv[3][:4]
    held = Dense([0])
    held.kv = [kv[:-1] for kv in dense.kv]
    cache = filled(kind, tables, held, size, 10)
    layout = cache.layout(tables, 10)
    if kind is HostPagedCache:
        assert layout.shared is not None
        assert layout.shared.pages.tolist() == [5, 6, 7]
    query = torch.randn(6, G * R, D)
    positions = torch.tensor(lengths).unsqueeze(1)
    got = cache.attend(layout, cache.tables, positions)(0, query, torch.stack([kv[-1] for kv in dense.kv]))
    for row, length in enumerate(lengths):
        torch.testing.assert_close(got[row], dense.attend(row, query[row], range(length + 1)), atol=1e-5, rtol=1e-5)


@both
def test_a_page_with_nothing_to_see_changes_nothing(kind):
    """A page taken ahead of time holds numbers of its former owner."""
    dense = Dense([4])
    cache = filled(kind, [[1, 0]], dense, 4, 2)
    for pool in pools(cache):
        pool[:, 0] = 1e4
    layout = cache.layout([[1, 0]], 2)
    query, new = torch.randn(1, G * R, D), dense.kv[0][3:4]
    got = cache.attend(layout, cache.tables, torch.tensor([[3]]))(0, query, new)
    torch.testing.assert_close(got[0], dense.attend(0, query[0], range(4)), atol=1e-5, rtol=1e-5)


@both
def test_copied_pages_and_moved_slots_hold_what_they_held(kind):
    dense = Dense([8])
    cache = filled(kind, [[0, 1]], dense, 4, 4)
    before = [pool.clone() for pool in pools(cache)]
    cache.copy_pages({0: 3, 1: 2})
    for pool, was in zip(pools(cache), before, strict=True):
        assert torch.equal(pool[:, 3], was[:, 0])
        assert torch.equal(pool[:, 2], was[:, 1])
    cache.move_slots(torch.tensor([6, 7]), torch.tensor([5, 6]))
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
