"""A row of a pass has the same bits whatever else is in the pass: the Triton programs in their interpreter.

Matrices are multiplied with a fixed order of summation, as a matrix unit has it; what is tested is everything that the
programs add to that: tiles, spans, chunks, masks, pages, trees, and how results are joined. Then whole engines in
bfloat16, by the programs' references.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from interpreter import interpreted, summing_in_order
from test_engine import full_engine
from tiny import CPU, embedded_decoder, embedded_folder, gcd_requests, generate, texts
from torch import Tensor

from tlt_hpc.kernels import attention, dispatch, linear
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter_file import load_drafter
from tlt_hpc.models.folder import read_folder_weights
from tlt_hpc.rollout.strategy import OFF, Strategy

needs_interpreter = pytest.mark.skipif(
    not dispatch.has_triton() or torch.cuda.is_available(), reason="needs triton, imported as an interpreter"
)
WIDTHS = (1, 2, 5, 17, 64)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def programs() -> Iterator[None]:
    with interpreted(), summing_in_order():
        yield


def noise(source: random.Random, *sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(source.getrandbits(40))).to(dtype)


def linear_case(source: random.Random) -> None:
    """Some rows by themselves, and among others, in one or several programs."""
    dtype = source.choice(DTYPES)
    N, K = source.choice((8, 24, 70)), source.choice((40, 64, 200, 1088))
    T = source.choice((*range(1, 18), 33, 64, 130))
    weight, x = noise(source, N, K, dtype=dtype), noise(source, T, K, dtype=dtype)
    bias = noise(source, N, dtype=dtype) if source.random() < 0.5 else None
    out = source.choice((dtype, torch.float32))
    every = linear.invariant_linear(x, weight, bias, out, source.random() < 0.5)
    for row in source.sample(range(T), min(T, 2)):
        alone = linear.invariant_linear(x[row : row + 1], weight, bias, out, source.random() < 0.5)
        assert torch.equal(alone[0], every[row]), f"row {row} of {T}, {N} x {K}, {dtype}"


def expert_case(source: random.Random) -> None:
    """Some pairs by themselves, and among others, of tokens with one, two or three experts."""
    dtype, num_experts, each = source.choice(DTYPES), source.choice((3, 8)), source.choice((1, 2, 3))
    N, K, T = source.choice((8, 70)), source.choice((40, 64, 200)), source.choice((1, 2, 5, 17, 70))
    weight, x = noise(source, num_experts, N, K, dtype=dtype), noise(source, T, K, dtype=dtype)
    chosen = torch.tensor([source.sample(range(num_experts), each) for _ in range(T)])
    every = linear.expert_linear(x, weight, linear.sort_by_expert(chosen, num_experts), each)
    for row in source.sample(range(T), min(T, 2)):
        order = linear.sort_by_expert(chosen[row : row + 1], num_experts)
        alone = linear.expert_linear(x[row : row + 1], weight, order, each)
        assert torch.equal(alone, every[row * each : (row + 1) * each]), f"row {row} of {T}, {N} x {K}, {dtype}"


class Sequences:
    """Keys and values of sequences by position, and passes over them in pages of any size, in any order."""

    def __init__(self, source: random.Random, lengths: list[int], g: int, d: int, dtype: torch.dtype) -> None:
        self.source, self.lengths, self.window = source, lengths, source.choice((0, 0, 0, 5, 40, 300))
        self.keys = [noise(source, length, g, d, dtype=dtype) for length in lengths]
        self.values = [noise(source, length, g, d, dtype=dtype) for length in lengths]

    def read(self, query: Tensor, rows: list[int], slots: list[list[int]], own: list[list[list[int]]], *, tree: bool):
        """Attention of queries [B, N, h, d] of sequences ``rows``.

        ``slots`` are the positions that stand in each row's slots, of which the last ``own`` are the pass's; ``own``
        are the slots, after the committed ones, on each query's path.
        """
        source, size, B = self.source, self.source.choice((16, 32, 48)), len(query)
        widest = max(len(path) for row in own for path in row)
        committed = [len(row) - (1 + max(max(path) for path in paths)) for row, paths in zip(slots, own, strict=True)]
        pages = -(-(max(map(len, slots)) + 64) // size)
        table = torch.tensor(source.sample(range(B * pages + 3), B * pages)).view(B, pages)
        pools = []
        for held in (self.keys, self.values):
            pool = torch.full((B * pages + 3, size, *held[0].shape[1:]), torch.nan, dtype=query.dtype)
            for row, (sequence, positions) in enumerate(zip(rows, slots, strict=True)):
                at = torch.arange(len(positions))
                pool[table[row, at // size], at % size] = held[sequence][positions]
            pools.append(pool)
        paths = torch.tensor([[path + [0] * (widest - len(path)) for path in row] for row in own], dtype=torch.int32)
        count = query.shape[:2]
        found = attention.paged_attention(
            query.flatten(0, 1),
            *pools,
            table.int(),
            torch.tensor(committed, dtype=torch.int32),
            torch.tensor([[len(path) for path in row] for row in own], dtype=torch.int32),
            torch.arange(count.numel(), dtype=torch.int32).view(count),
            paths if tree else None,
            by_span=source.random() < 0.5,
            window=self.window,
        )
        return found.view(*count, -1)


def attention_case(source: random.Random) -> None:
    """One query alone, then in a chain of some width beside other rows, then as a node of a tree."""
    dtype, (h, g), d = source.choice(DTYPES), source.choice(((2, 1), (6, 2), (7, 1))), source.choice((16, 32))
    B, width = source.choice((1, 1, 2, 3)), source.choice(WIDTHS)
    lengths = [source.choice((width, width + source.randrange(330))) for _ in range(B)]
    sequences = Sequences(source, lengths, g, d, dtype)
    row, j = source.randrange(B), source.randrange(width)
    queries = noise(source, B, width, h, d, dtype=dtype)
    position = lengths[row] - width + j
    one = queries[row : row + 1, j : j + 1]
    alone = sequences.read(one, [row], [list(range(position + 1))], [[[0]]], tree=False)[0, 0]

    slots = [list(range(length)) for length in lengths]
    chain = [[list(range(i + 1)) for i in range(width)]] * B
    found = sequences.read(queries, list(range(B)), slots, chain, tree=False)[row, j]
    assert torch.equal(found, alone), f"chain of {width}, query {j}, {B} rows, length {lengths[row]}, {dtype}"

    # its last positions as scattered nodes of a tree, with other tokens between them
    depth = min(position + 1, source.choice((1, 2, 5, 9)))
    nodes = sorted([0, *source.sample(range(1, 24), depth - 1)])
    tail = list(range(position + 1 - depth, position + 1))
    standing = [source.randrange(lengths[row]) for _ in range(nodes[-1] + 1)]
    for node, at in zip(nodes, tail, strict=True):
        standing[node] = at
    places = [*range(position + 1 - depth), *standing]
    others = [sorted({0, *source.sample(range(nodes[-1] + 1), source.randrange(nodes[-1] + 1))}) for _ in range(3)]
    own = [*others[:2], nodes, others[2]]
    queries = noise(source, 1, 4, h, d, dtype=dtype)
    queries[0, 2] = one[0, 0]
    found = sequences.read(queries, [row], [places], [own], tree=True)[0, 2]
    assert torch.equal(found, alone), f"tree, nodes {nodes}, length {lengths[row]}, {dtype}"


@needs_interpreter
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("case", [linear_case, expert_case, attention_case])
@pytest.mark.parametrize("seed", [*(pytest.param(seed, marks=pytest.mark.ci) for seed in range(3)), 3])
def test_a_row_does_not_depend_on_its_pass(programs, monkeypatch, case, seed):
    from tlt_hpc.kernels.programs import attention as attention_programs

    monkeypatch.setattr(attention_programs, "is_hopper", lambda x: seed % 2 == 1)  # tiles of 16 or of 64 rows
    if seed > 1:  # several spans, though texts are short
        monkeypatch.setattr(attention_programs, "SPAN", 64)
    for number in range(20):
        case(random.Random(f"{seed} {number}"))


# -- whole engines ----------------------------------------------------------------------------------------------------

REQUESTS = gcd_requests(4, 4)


def half_engine(strategies: list[Strategy], **options):
    """An engine in bfloat16 without a tie guard, with the embedded weights and drafter, as it is on a GPU."""
    decoder = Decoder(embedded_decoder().shape, torch.bfloat16, CPU, is_invariant=True)
    decoder.load_weights(read_folder_weights(embedded_folder()), 0)
    drafter = load_drafter("embedded:tiny", decoder, "the embedded drafter")
    options = {"tie_guard": False, "chooser": "random", "max_new_tokens": 60, "attention": "paged-kernel"} | options
    return full_engine(strategies, decoder=decoder, drafter=drafter, **options)


@pytest.mark.parametrize("max_live", [1, 5, 16])
def test_speculation_does_not_change_the_text_in_bfloat16(max_live):
    plain = texts(generate(half_engine([OFF]), REQUESTS))
    drafting = [Strategy("drafter", 4), Strategy("drafter", 4, 2, 9), Strategy("ngram", 3), OFF]
    engine = half_engine(drafting, max_live=max_live, page_size=16, prefill_tokens=5)
    engine._rounds.graphs.capture(truncates=False)  # a round in which a graph is captured is not counted
    assert texts(generate(engine, list(reversed(REQUESTS)))) == plain
    counts = engine.take_counts()
    assert counts.num_guarded == 0 and all(counts.strategies[one.name][0] for one in drafting)
