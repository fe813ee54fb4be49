"""The kernels: every Triton program against plain PyTorch, and the PyTorch against independent computations.

Where there is no GPU, Triton's interpreter runs the programs on CPU tensors; where there is one, they are compiled.
"""

from __future__ import annotations

import gc
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from interpreter import interpreted
from torch import Tensor

from tlt_hpc.common.records import SampleKey
from tlt_hpc.kernels import attention, dispatch, graphs, gumbel, linear, pointwise
from tlt_hpc.kernels.graphs import GraphPool
from tlt_hpc.rollout import noise

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # a unit in the last place of halves
DTYPES = [torch.float32, torch.bfloat16]
# the interpreter multiplies no bf16 matrices
DOT_DTYPES = [torch.float32, torch.float16 if DEVICE.type == "cpu" else torch.bfloat16]


@pytest.fixture
def triton() -> Iterator[None]:
    if not dispatch.has_triton():
        pytest.skip("triton is not installed")
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh tensors with NaN: nothing unwritten hides
    with interpreted() if DEVICE.type == "cpu" else nullcontext():
        yield
    torch.use_deterministic_algorithms(False)


def draw(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(got: Tensor, wanted: Tensor, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> None:
    tolerance = TOLERANCE[dtype] * scale
    torch.testing.assert_close(got.float(), wanted.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "H"), [(1, 128), (3, 100), (5, 3584), (0, 64)])
def test_pointwise_operations(triton, T, H, dtype):
    x, residual, weight = draw(T, H, dtype=dtype), draw(T, H, seed=1, dtype=dtype), draw(H, seed=2, dtype=dtype)
    assert_close(pointwise.rms_norm(x, weight, 1e-6), pointwise.rms_norm_reference(x, weight, 1e-6), dtype)
    wanted = pointwise.add_rms_norm_reference(x, residual, weight, 1e-6)
    got = pointwise.add_rms_norm(x, residual, weight, 1e-6)
    assert_close(got[1], wanted[1], dtype)  # the interpreter cuts bf16 off where a GPU rounds
    assert_close(got[0], wanted[0], dtype, 3.0)
    gate_up = 8 * draw(T, 2 * H, dtype=dtype)
    assert_close(pointwise.gate_mul(gate_up), pointwise.gate_mul_reference(gate_up), dtype)
    gate, up = gate_up.double().chunk(2, -1)
    assert_close(pointwise.gate_mul_reference(gate_up), F.silu(gate) * up, dtype)
    gelu = "gelu_pytorch_tanh"
    wanted = F.gelu(gate, approximate="tanh") * up
    assert_close(pointwise.gate_mul(gate_up, gelu), wanted, dtype)
    assert_close(pointwise.gate_mul_reference(gate_up, gelu), wanted, dtype, 3.0)  # loses digits below zero


def rotary_case(T: int, h: int, g: int, d: int, page_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    angles = torch.outer(torch.arange(50).double(), 100.0 ** -(torch.arange(0, d, 2).double() / d))
    free = torch.randperm(5 * page_size, generator=torch.Generator().manual_seed(3))
    return {
        "qkv": draw(T, h + 2 * g, d, dtype=dtype),
        "cosine": torch.cat([angles.cos(), angles.cos()], -1).to(DEVICE, dtype),
        "sine": torch.cat([-angles.sin(), angles.sin()], -1).to(DEVICE, dtype),
        "positions": ((torch.arange(T) * 7) % 50).to(DEVICE),
        "key_pages": torch.full((5, page_size, g, d), 7.0, dtype=dtype, device=DEVICE),
        "value_pages": torch.full((5, page_size, g, d), 9.0, dtype=dtype, device=DEVICE),
        "slots": free[:T].to(DEVICE),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("T", "h", "g", "d", "page_size"),
    [(1, 4, 2, 32, 16), (6, 3, 1, 64, 16), (3, 14, 2, 128, 17), (4, 9, 3, 20, 32), (2, 8, 8, 80, 256)],
)
def test_rotate_and_store(triton, T, h, g, d, page_size, normed, dtype):
    case = rotary_case(T, h, g, d, page_size, dtype)
    norms = (draw(d, seed=5, dtype=dtype), draw(d, seed=6, dtype=dtype), 1e-6) if normed else None
    there = {name: tensor.clone() for name, tensor in case.items()}
    wanted = pointwise.rotate_and_store_reference(**there, norms=norms)
    got = pointwise.rotate_and_store(**case, norms=norms)
    # a norm may round differently by one unit, which the rotation passes on
    scale = 4.0 if normed else 1.0
    assert_close(got, wanted, dtype, scale)
    assert_close(case["key_pages"], there["key_pages"], dtype, scale)
    assert torch.equal(case["value_pages"], there["value_pages"])


WORDS = torch.tensor([noise.noise_key(SampleKey(1, 0, 0, 0, i)) for i in range(7)], device=DEVICE)
TEMPERATURES = torch.tensor([1.0, 0.0, 0.6, 1.7, 0.05, 1.0, 0.0], device=DEVICE)
POSITIONS = torch.tensor([0, 3, 2**31, 5, 9, 11, 2**32 - 1], device=DEVICE)


@pytest.mark.parametrize("vocab", [20, 1, 1024, 4099])
def test_triton_noise(triton, vocab):
    ids = torch.randperm(152_064, generator=torch.Generator().manual_seed(0))[:vocab].to(DEVICE)
    every = gumbel.gumbel_noise_reference(WORDS, POSITIONS, 152_064)
    assert_close(gumbel.gumbel_noise(WORDS, POSITIONS, vocab), every[:, :vocab], scale=0.5)
    assert_close(gumbel.gumbel_noise(WORDS, POSITIONS, ids), every[:, ids], scale=0.5)


def extreme_words() -> Tensor:
    near = torch.arange(-300, 300)
    centres = torch.tensor([0, 2**23, 2**24, 2**31, 2**32 - 2**24, 2**32 - 2**23, 2**32 - 1, round(2**32 * 0.6321)])
    ladder = 2 ** torch.arange(0, 32)
    spread = torch.randint(0, 2**32, (20_000,), generator=torch.Generator().manual_seed(0))
    every = torch.cat([(centres.unsqueeze(1) + near).flatten(), ladder, 2**32 - ladder, spread])
    return every[(every >= 0) & (every < 2**32)]


def test_triton_gumbel_is_accurate_at_both_tails(triton):
    from tlt_hpc.kernels.programs.gumbel import gumbel_of_words

    k = extreme_words()
    got = gumbel_of_words(k.to(DEVICE)).cpu()
    exact = -torch.log(-torch.log1p(-((k.double() + 0.5) * 2.0**-32)))
    assert torch.isfinite(got).all()
    assert ((got.double() - exact).abs() / exact.abs().clamp(min=1.0)).max() < 1e-6


def both_choices(
    logits: Tensor, num_tokens: int, temperatures: Tensor = TEMPERATURES
) -> tuple[gumbel.GumbelChoice, gumbel.GumbelChoice]:
    R = len(logits)
    arguments = (logits, temperatures[:R], WORDS[:R], POSITIONS[:R], num_tokens)
    return gumbel.gumbel_argmax(*arguments), gumbel.gumbel_argmax_reference(*arguments)


def assert_same_choice(got: gumbel.GumbelChoice, wanted: gumbel.GumbelChoice) -> None:
    assert torch.equal(got.token, wanted.token)
    for name in ("best", "second", "log_normaliser", "scaled_logit"):
        assert_close(vars(got)[name], vars(wanted)[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab", "num_tokens"), [(20, 20), (24, 20), (1, 1), (1024, 1024), (1025, 1025), (5000, 4097)]
)
def test_gumbel_argmax(triton, vocab, num_tokens, dtype):
    logits = 4 * draw(7, vocab, dtype=dtype)
    logits[:, num_tokens:] = 1000.0  # padding, never chosen
    assert_same_choice(*both_choices(logits, num_tokens))


def test_choices_at_the_edge(triton):
    """Banned tokens, a whole block of them too; NaN; and of equal scores the first."""
    logits = draw(3, 3000)
    logits[:, 1:2999] = -torch.inf
    got, wanted = both_choices(logits, 3000)
    assert_same_choice(got, wanted)
    assert set(got.token.tolist()) <= {0, 2999} and torch.isfinite(got.log_normaliser).all()
    logits[:, 0] = -torch.inf
    for choice in both_choices(logits, 3000):
        assert choice.token.tolist() == [2999] * 3 and (choice.second == -torch.inf).all()
    logits[:] = -torch.inf
    for choice in both_choices(logits, 3000):
        assert ((choice.token >= 0) & (choice.token < 3000)).all() and (choice.best == -torch.inf).all()
    logits[:, 1500] = torch.nan
    for choice in both_choices(logits, 3000):
        assert choice.log_normaliser.isnan().all() and ((choice.token >= 0) & (choice.token < 3000)).all()
    equal = torch.zeros(2, 3000, device=DEVICE)
    equal[0, [700, 701, 2500]] = equal[1, [2047, 2048]] = 1.0
    for choice in both_choices(equal, 3000, torch.zeros(7, device=DEVICE)):
        assert choice.token.tolist() == [700, 2047] and torch.equal(choice.best, choice.second)


def random_paths(N: int, seed: int) -> tuple[Tensor, Tensor]:
    """Paths [N, N] of a random tree, each node below an earlier one, and their lengths [N]; some nodes see nothing."""
    generator = torch.Generator().manual_seed(seed)
    paths: list[list[int]] = []
    for node in range(N):
        parent = int(torch.randint(-1, node, (1,), generator=generator)) if node else -1
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    if N > 3:
        paths[3] = []
    filled = torch.tensor([path + [0] * (N - len(path)) for path in paths], dtype=torch.int32)
    return filled, torch.tensor([len(path) for path in paths], dtype=torch.int32)


def order_of_tokens(seen: Tensor) -> Tensor:
    """Tokens of queries [B, N], not in the order of the queries."""
    return torch.randperm(seen.numel(), generator=torch.Generator().manual_seed(5)).view(seen.shape).to(torch.int32)


def attention_case(
    B: int, N: int, h: int, g: int, d: int, page_size: int, longest: int, dtype: torch.dtype, kind: str
) -> dict[str, Tensor]:
    """Rows of very different lengths in shuffled pages, tokens in any order; slots beyond a row's nodes hold NaN."""
    M = -(-(longest + N) // page_size)
    order = torch.randperm(B * M + 2, generator=torch.Generator().manual_seed(B + N))
    lengths = [longest, 0, longest // 3, 1][:B] + [longest // 2] * (B - 4)
    table = order[: B * M].view(B, M)
    key, value = (draw(B * M + 2, page_size, g, d, seed=seed, dtype=dtype) for seed in (1, 2))
    for row, length in enumerate(lengths):
        for slot in range(length + N, M * page_size):
            key[table[row, slot // page_size], slot % page_size] = torch.nan
            value[table[row, slot // page_size], slot % page_size] = torch.nan
    paths, seen = zip(*(random_paths(N, seed) for seed in range(B)), strict=True)
    chain = (torch.arange(N, dtype=torch.int32) + 1).repeat(B, 1)
    own = {"seen": chain} if kind == "chain" else {"seen": torch.stack(seen), "paths": torch.stack(paths)}
    own["tokens"] = order_of_tokens(own["seen"])
    return {
        "query": draw(B * N, h, d, dtype=dtype),
        "key_pages": key,
        "value_pages": value,
        "page_table": table.to(DEVICE, torch.int32),
        "committed": torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        **{name: tensor.to(DEVICE) for name, tensor in own.items()},
    }


def with_empty_places(case: dict[str, Tensor]) -> dict[str, Tensor]:
    """The case with places for further queries that do not take part, in each sequence and in one more."""
    unchanged = "query", "key_pages", "value_pages"
    more = {name: torch.cat([x, x[:1]]) for name, x in case.items() if name not in unchanged}
    more["seen"][-1] = -1
    more |= {name: F.pad(more[name], (0, 2), value=value) for name, value in (("seen", -1), ("tokens", 0))}
    if "paths" in more:
        more["paths"] = F.pad(more["paths"], (0, 0, 0, 2))
    return case | more


def by_definition(case: dict[str, Tensor], window: int = 0) -> Tensor:
    """Attention of each query by itself."""
    query, table = case["query"].double(), case["page_table"].long()
    (B, N), (_, h, d) = case["seen"].shape, query.shape
    out = torch.zeros(B * N, h, d, dtype=torch.float64)
    for row in range(B):
        keys, values = (case[name][table[row]].flatten(0, 1).double() for name in ("key_pages", "value_pages"))
        for i in range(N):
            prefix, seen = int(case["committed"][row]), int(case["seen"][row, i])
            own = case["paths"][row, i, :seen].tolist() if "paths" in case else list(range(seen))
            slots = [*range(prefix), *(prefix + node for node in own)][-window:]
            if slots:
                group = h // keys.shape[1]
                key, value = (x[slots].repeat_interleave(group, 1) for x in (keys, values))
                token = int(case["tokens"][row, i])
                score = torch.einsum("hd,shd->hs", query[token], key) / math.sqrt(d)
                out[token] = torch.einsum("hs,shd->hd", score.softmax(1), value)
    return out.flatten(1)


CASES = [  # (B, N, h, g, d, page_size, longest), window, tall tiles
    ((1, 1, 2, 2, 32, 16, 5), 0, False),
    ((4, 4, 4, 2, 32, 16, 70), 0, True),
    ((3, 5, 6, 2, 64, 48, 530), 0, False),
    ((3, 5, 6, 2, 64, 48, 530), 1, False),
    ((3, 5, 6, 2, 64, 48, 530), 33, True),
    ((3, 5, 6, 2, 64, 48, 530), 300, False),
    ((1, 64, 7, 1, 128, 256, 70), 0, True),
    ((5, 3, 8, 1, 64, 32, 40), 0, False),
    ((2, 17, 8, 1, 80, 64, 33), 0, False),
]


@pytest.mark.parametrize("window", [0, pytest.param(100, marks=pytest.mark.ci)])
@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize(("N", "B"), [(3, 5), pytest.param(9, 2, marks=pytest.mark.ci)])
def test_programs_share_the_spans_of_all_sequences(triton, N, B, kind, window, monkeypatch):
    """Few programs take many spans of sequences of any length, in tables with room for more, each span once.

    In several launches where there is no memory for all.
    """
    from tlt_hpc.kernels.programs import attention as programs

    case = attention_case(B, N, 4, 2, 16, 48, 450, torch.float32, kind)
    case["page_table"] = F.pad(case["page_table"], (0, 9))
    monkeypatch.setattr(programs, "SPAN", 64)
    wanted, found = by_definition(case, window).float(), []
    monkeypatch.setattr(programs.torch, "empty", lambda size, **kinds: torch.full(size, torch.nan, **kinds))
    for num_processors, by_span, num_bytes in ((1, True, 2**29), (66, True, 2**29), (2, False, 2**29), (2, True, 9)):
        monkeypatch.setattr(programs, "num_multiprocessors", lambda x, number=num_processors: number)
        monkeypatch.setattr(attention, "PARTIAL_BYTES", num_bytes)
        found.append(attention.paged_attention(**with_empty_places(case), by_span=by_span, window=window))
    assert_close(found[0], wanted, torch.float32, scale=2.0)
    assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize(
    "dtype", [DOT_DTYPES[0], *(pytest.param(each, marks=pytest.mark.ci) for each in DOT_DTYPES[1:])]
)
@pytest.mark.parametrize("by_span", [False, True])
@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize(("sizes", "window", "tall"), CASES)
def test_paged_attention(triton, monkeypatch, sizes, window, tall, kind, by_span, dtype):
    """Also within a window, and in the tiles of 64 rows that Hopper takes."""
    from tlt_hpc.kernels.programs import attention as programs

    monkeypatch.setattr(programs, "is_hopper", lambda x: tall)
    case = attention_case(*sizes, dtype, kind)
    wanted = by_definition(case, window).to(dtype)
    got = attention.paged_attention(**case, by_span=by_span, window=window)
    assert got.shape == wanted.shape and got.dtype == dtype
    assert_close(got, wanted, dtype, scale=2.0)
    reference = attention.paged_attention_reference(**with_empty_places(case), window=window)
    assert_close(reference, wanted, dtype, scale=2.0)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("T", "each", "num_experts"), [(1, 2, 4), (9, 3, 5), (70, 2, 3), (0, 2, 3)])
def test_expert_linear(triton, T, each, num_experts, dtype):
    """Some experts are nobody's; each pair has its own input, or a token's pairs share one."""
    N, K = 70, 100
    weight = draw(num_experts, N, K, seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(T)
    chosen = torch.rand(T, num_experts - 1, generator=generator).argsort(1)[:, :each].to(DEVICE)
    order = linear.sort_by_expert(chosen, num_experts)
    for x, shared in ((draw(T, K, dtype=dtype), each), (draw(T * each, K, dtype=dtype), 1)):
        pairs = x.double().repeat_interleave(shared, 0)
        wanted = torch.einsum("pk,pnk->pn", pairs, weight[chosen.flatten()].double())
        assert_close(linear.expert_linear(x, weight, order, shared), wanted, dtype, scale=K**0.5)
        assert_close(linear.expert_linear_reference(x, weight, order, shared), wanted, dtype, scale=K**0.5)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("by_chunk", [False, True])
@pytest.mark.parametrize(("T", "N", "K"), [(1, 24, 64), (3, 70, 1100), (17, 130, 2048), (130, 65, 40), (0, 8, 64)])
def test_invariant_linear(triton, T, N, K, by_chunk, dtype):
    x, weight, bias = draw(T, K, dtype=dtype), draw(N, K, seed=1, dtype=dtype), draw(N, seed=2, dtype=dtype)
    for given in (None, bias):
        wanted = F.linear(x.double(), weight.double(), None if given is None else given.double())
        for out in (dtype, torch.float32):
            got = linear.invariant_linear(x, weight, given, out, by_chunk)
            assert got.dtype == out and got.shape == (T, N)
            assert_close(got, wanted, dtype, scale=K**0.5)
            assert_close(linear.invariant_linear_reference(x, weight, given, out), wanted, dtype, scale=K**0.5)


@pytest.mark.ci
@pytest.mark.parametrize("target", [pytest.param("80", marks=pytest.mark.slow), "90"])
def test_programs_compile_for_a_gpu_that_is_not_there(tmp_path, target):
    if not dispatch.has_triton():
        pytest.skip("triton is not installed")
    command = [sys.executable, "tools/check_kernels.py", "--compile", target]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    used = re.findall(r"STACK:(\d+)", done.stdout)
    assert len(used) >= 30, done.stderr
    assert max(map(int, used)) <= 64, "registers are spilled"
    assert max(map(int, re.findall(r"shared +(\d+)", done.stdout))) <= 100_000, "two programs must fit on a processor"
    assert done.returncode == 0, done.stderr
    assert "\nbatch-invariant: all forms of a program compute alike" in done.stdout


def test_graph_pool_runs_on_static_buffers():
    pool, weight, shift = GraphPool(DEVICE), draw(4, 4), torch.ones(4, device=DEVICE)

    def function(x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        return x @ weight + shift, x.sum(1)

    xs = [draw(3, 4, seed=seed) for seed in range(2)]
    first = pool.capture_once_and_replay(3, function, (xs[0], shift))
    assert_close(first[0], xs[0] @ weight + 1)
    assert pool.capture_once_and_replay(2, lambda x: (x + 1,), (shift[:2],))[0].tolist() == [2.0, 2.0]
    weight.mul_(2)
    second = pool.replay(3, (xs[1], shift * 2))
    assert second[0] is first[0], "outputs stay where they are"
    assert_close(first[0], xs[1] @ weight + 2)
    assert_close(first[1], xs[1].sum(1))
    assert len(pool) == 2 and pool.num_bytes >= 0
    with pytest.raises(AssertionError, match="captured for"):
        pool.replay(3, (torch.zeros(4, 4, device=DEVICE), shift))


def test_nothing_is_collected_during_a_capture():
    with pytest.raises(RuntimeError), graphs._without_collection():
        assert not gc.isenabled()
        raise RuntimeError
    assert gc.isenabled()
