"""Runs every Triton program of ``tlt_hpc.kernels`` against its PyTorch reference on a GPU, and times it.

    python tools/check_kernels.py                # on a CUDA machine; exit status 1 on a mismatch
    python tools/check_kernels.py --compile 90   # for sm_90 (H100, H200), which need not be there: what each takes

Needs torch and triton only. Microseconds are per call inside a CUDA graph; GB/s count each byte read or written once,
and may exceed the memory's rate where the data fits into the cache. With --compile exit status 1: forms of a program
for half precision do not all compute alike.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import run_script

# isort: split
import torch
from torch import Tensor

from tlt_hpc.cluster.device import set_cublas_workspaces
from tlt_hpc.common.errors import UserError
from tlt_hpc.kernels import attention, dispatch, gumbel, linear, pointwise
from tlt_hpc.kernels.dispatch import deterministic_operations
from tlt_hpc.kernels.graphs import GraphPool
from tlt_hpc.kernels.varlen import varlen_kernel
from tlt_hpc.models.documents import attend_documents
from tlt_hpc.models.policy_model import _Head
from tlt_hpc.rollout.pool_memory import PoolMemory

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 3584, 18944, 28, 4, 128, 152_064  # Qwen2.5-7B
SMALL_PASSES = [(1, 1, 300, 64), (1, 4, 300, 64), (1, 64, 300, 256)]  # sequences, queries, slots, page size
LONG_TAIL = (16, 5, 2048, 256)
LONGEST = 32_768
"""Slots of one of LONG_TAIL's sequences, and of all its page tables."""
PASSES = [
    (1, 1, 8192, 256),
    (32, 1, 2048, 256),
    (1, 64, 8192, 256),
    (8, 16, 4096, 16),
    (32, 4, 2048, 64),
    (32, 16, 2048, 256),
]
LAYERS = [
    (HIDDEN + 2 * KV_HEADS * HEAD_DIM, HIDDEN),
    (HIDDEN, HIDDEN),
    (2 * INTERMEDIATE, HIDDEN),
    (HIDDEN, INTERMEDIATE),
]
NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Case:
    """One call at one shape: what it gives, what it should give, the bytes it must move, the error it may make."""

    name: str
    run: Callable[[], Sequence[Tensor] | Tensor]
    reference: Callable[[], Sequence[Tensor] | Tensor]
    num_bytes: int
    tolerance: float
    ignores_near_ties: bool = False


def draw(*sizes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal random numbers of these sizes."""
    return torch.randn(*sizes, device=device).to(dtype)


def pointwise_cases(T: int, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Norms and SiLU of T tokens."""
    x, residual = (draw(T, HIDDEN, dtype=dtype, device=device) for _ in range(2))
    weight = draw(HIDDEN, dtype=dtype, device=device)
    gate_up = draw(T, 2 * INTERMEDIATE, dtype=dtype, device=device)
    calls: tuple[tuple[Any, Any, tuple[Any, ...], int], ...] = (
        (pointwise.rms_norm, pointwise.rms_norm_reference, (x, weight, 1e-6), 2 * HIDDEN),
        (pointwise.add_rms_norm, pointwise.add_rms_norm_reference, (x, residual, weight, 1e-6), 4 * HIDDEN),
        (pointwise.gate_mul, pointwise.gate_mul_reference, (gate_up,), 3 * INTERMEDIATE),
        (pointwise.gate_mul, pointwise.gate_mul_reference, (gate_up, "gelu_pytorch_tanh"), 3 * INTERMEDIATE),
    )
    tolerance = 5e-6 if dtype == torch.float32 else 1.6e-2
    for function, reference, given, moved in calls:
        name, num_bytes = f"{function.__name__} T={T} {str(dtype)[6:]}", T * moved * dtype.itemsize
        yield Case(name, partial(function, *given), partial(reference, *given), num_bytes, tolerance)


def rotary_case(T: int, dtype: torch.dtype, device: torch.device, normed: bool) -> Case:
    """T tokens into pages of 64 slots."""
    heads, positions = HEADS + 2 * KV_HEADS, torch.randint(0, 4096, (T,), device=device)
    angles = torch.rand(4096, HEAD_DIM // 2, device=device).repeat(1, 2)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    qkv = draw(T, heads, HEAD_DIM, dtype=dtype, device=device)
    a, b, c, d = (torch.zeros(T // 32 + 1, 64, KV_HEADS, HEAD_DIM, dtype=dtype, device=device) for _ in range(4))
    slots = torch.randperm(64 * (T // 32 + 1), device=device)[:T]
    gains = [draw(HEAD_DIM, dtype=dtype, device=device) for _ in range(2)]
    norms = (gains[0], gains[1], 1e-6) if normed else None
    rest = (cosine, sine, positions)
    return Case(
        f"rotate_and_store{' normed' * normed} T={T} {str(dtype)[6:]}",
        lambda: (pointwise.rotate_and_store(qkv, *rest, a, b, slots, norms), a, b),
        lambda: (pointwise.rotate_and_store_reference(qkv, *rest, c, d, slots, norms), c, d),
        2 * qkv.numel() * dtype.itemsize,
        5e-6 if dtype == torch.float32 else 3e-2,
    )


def gumbel_cases(R: int, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Noise and choice over the vocabulary for R rows, and a draft vocabulary's noise."""
    logits = 3 * draw(R, VOCAB, dtype=dtype, device=device)
    temperature = torch.tensor([1.0, 0.6, 0.0], device=device).repeat(R)[:R].contiguous()
    words = torch.randint(0, 2**32, (R, 4), device=device)
    positions = torch.randint(0, 2**15, (R,), device=device)
    columns = torch.randperm(VOCAB, device=device)[:32_768].sort().values
    arguments = (logits, temperature, words, positions, 151_665)
    yield Case(
        f"gumbel_argmax R={R} {str(dtype)[6:]}",
        lambda: tuple(vars(gumbel.gumbel_argmax(*arguments)).values()),
        lambda: tuple(vars(gumbel.gumbel_argmax_reference(*arguments)).values()),
        logits.nbytes,
        5e-6,
        ignores_near_ties=True,
    )
    noises: dict[str, int | Tensor] = {"all": VOCAB, "draft": columns} if dtype == torch.float32 else {}
    for what, wanted in noises.items():
        yield Case(
            f"gumbel_noise {what} R={R}",
            partial(gumbel.gumbel_noise, words, positions, wanted),
            partial(gumbel.gumbel_noise_reference, words, positions, wanted),
            4 * R * (wanted if isinstance(wanted, int) else len(wanted)),
            1e-6,
        )


def tail_case(device: torch.device) -> Case:
    """The noise of words at both ends of the range, where a careless formula is infinite."""
    from tlt_hpc.kernels.programs.gumbel import gumbel_of_words

    near = torch.arange(70_000, device=device)
    bits = torch.cat([near, 2**31 - 35_000 + near, 2**32 - 1 - near, torch.randint(0, 2**32, (10**6,), device=device)])
    return Case(
        "gumbel tails",
        lambda: gumbel_of_words(bits),
        lambda: -torch.log(-torch.log1p(-((bits.double() + 0.5) * 2.0**-32))),
        12 * len(bits),
        1e-6,
    )


def attention_case(
    B: int,
    N: int,
    length: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kind: str = "chain",
    by_span: bool | None = None,
    window: int = 0,
    longest: int = 0,
) -> Case:
    """N queries of each of B sequences, of ``length`` committed slots the longest and fewer the others.

    ``longest`` above 0: the slots of the last sequence instead, and of all tables.
    """
    M = -(-(max(length, longest) + N) // page_size)
    lengths = torch.linspace(length, length // 2, B).int()
    if longest:
        lengths[-1] = longest
    num_pages = (lengths + N + page_size - 1) // page_size
    pages = [draw(int(num_pages.sum()), page_size, KV_HEADS, HEAD_DIM, dtype=dtype, device=device) for _ in range(2)]
    table = torch.zeros(B, M, dtype=torch.int32)
    table[torch.arange(M) < num_pages.unsqueeze(1)] = torch.randperm(int(num_pages.sum())).int()
    table, committed = table.to(device), lengths.to(device)
    query = draw(B * N, HEADS, HEAD_DIM, dtype=dtype, device=device)
    tokens = torch.arange(B * N, dtype=torch.int32, device=device).view(B, N)
    seen, paths = torch.arange(1, N + 1, device=device).expand(B, -1).int().contiguous(), None
    if kind == "tree":  # of two branches
        paths = torch.zeros(B, N, N, dtype=torch.int32, device=device)
        for i in range(N):
            paths[:, i, : i // 2 + 1] = torch.arange(i % 2, i + 1, 2, device=device)
        seen = (torch.arange(N, device=device) // 2 + 1).expand(B, -1).int().contiguous()
    arguments = (query, pages[0], pages[1], table, committed, seen, tokens, paths)
    form = "" if by_span is None else " by span" if by_span else " whole"
    form += f" window={window}" if window else ""
    form += f" longest={longest}" if longest else ""
    return Case(
        f"{kind} B={B} N={N} slots={length} page={page_size}{form} {str(dtype)[6:]}",
        partial(attention.paged_attention, *arguments, by_span=by_span, window=window),
        partial(attention.paged_attention_reference, *arguments, window=window),
        int(committed.sum() + B * N) * 2 * KV_HEADS * HEAD_DIM * dtype.itemsize,
        1e-5 if dtype == torch.float32 else 1e-2,
    )


def linear_case(T: int, N: int, K: int, dtype: torch.dtype, device: torch.device, by_chunk: bool | None = None) -> Case:
    """A layer of T tokens in half precision; float32 is left to the library."""
    x = draw(T, K, dtype=dtype, device=device)
    weight = (K**-0.5 * draw(N, K, dtype=torch.float32, device=device)).to(dtype)
    bias = draw(N, dtype=dtype, device=device)
    form = "" if by_chunk is None else " by chunk" if by_chunk else " whole"
    return Case(
        f"linear T={T} N={N} K={K}{form} {str(dtype)[6:]}",
        partial(linear.invariant_linear, x, weight, bias, by_chunk=by_chunk),
        partial(linear.invariant_linear_reference, x, weight, bias, dtype),
        (N * K + T * (N + K)) * dtype.itemsize,
        1.6e-2,
    )


def expert_case(T: int, dtype: torch.dtype, device: torch.device) -> Case:
    """The first product of a mixture of experts, of the sizes of Qwen3-30B-A3B but for fewer experts."""
    num_experts, each, N, K = 32, 8, 1536, 2048
    x = draw(T, K, dtype=dtype, device=device)
    weight = (K**-0.5 * draw(num_experts, N, K, dtype=torch.float32, device=device)).to(dtype)
    order = linear.sort_by_expert(torch.rand(T, num_experts, device=device).argsort(1)[:, :each], num_experts)
    return Case(
        f"experts T={T} {str(dtype)[6:]}",
        partial(linear.expert_linear, x, weight, order, each),
        partial(linear.expert_linear_reference, x, weight, order, each),
        (min(num_experts, T * each) * N * K + T * (K + each * N)) * dtype.itemsize,
        1.6e-2 if dtype.itemsize < 4 else 1e-4,
    )


def all_cases(device: torch.device, small: bool) -> Iterator[Case]:
    """Every program in fp32 and bf16, at the shapes of a 7B model; ``small`` keeps one shape of each variant."""
    for dtype in (torch.float32, torch.bfloat16):
        for T in (1,) if small else (1, 16, 512, 4096):
            yield from pointwise_cases(T, dtype, device)
        for T in (2,) if small else (1, 64, 4096):
            yield from (rotary_case(T, dtype, device, normed) for normed in (False, True))
        for R in (1,) if small else (1, 16, 128):
            yield from gumbel_cases(R, dtype, device)
        for B, N, length, page_size in SMALL_PASSES if small else SMALL_PASSES + PASSES:
            for kind in ("chain", "tree") if N > 1 else ("chain",):
                forms: tuple[bool | None, ...] = (False, True) if small else (None,)
                yield from (attention_case(B, N, length, page_size, dtype, device, kind, form) for form in forms)
                if small:
                    yield attention_case(B, N, length, page_size, dtype, device, kind, None, 64)
        if not small:
            yield attention_case(*LONG_TAIL, dtype, device, longest=LONGEST)
        for T in (1, 65) if small else (1, 16, 512):
            yield expert_case(T, dtype, device)
    for T in (1, 17, 33, 65) if small else (1, 5, 16, 64, 320, 4096):
        for N, K in ((HIDDEN, HIDDEN),) if small else LAYERS:
            for form in (False, True) if small else (None,):
                yield linear_case(T, N, K, torch.bfloat16, device, form)
    yield tail_case(device)


def error_of(case: Case) -> float:
    """The largest difference, relative where the value is above 1; a NaN or an infinity alone is infinite."""
    got, wanted = ([found] if isinstance(found, Tensor) else found for found in (case.run(), case.reference()))
    # a token's choice and logit do not count where less than a near-tie decided
    clear = wanted[1] - wanted[2] > NEAR_TIE if case.ignores_near_ties else None
    worst = 0.0
    for place, (a, b) in enumerate(zip(got, wanted, strict=True)):
        difference = (a.double() - b.double()).abs() / b.double().abs().clamp(min=1.0)
        if clear is not None and place in (0, 4):
            difference = difference[clear]
        worst = max(worst, float(difference.nan_to_num(torch.inf).max())) if difference.numel() else worst
    return worst


def check_graphs(device: torch.device) -> bool:
    """A pool of graphs over two batch sizes gives what the eager call gives."""
    GraphPool.checks_inputs = True
    pool, right = GraphPool(device), True
    for R in (64, 8):
        words, positions = torch.randint(0, 2**32, (R, 4), device=device), torch.arange(R, device=device)
        heat = torch.ones(R, device=device)

        def choose(logits: Tensor, words: Tensor, positions: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
            choice = gumbel.gumbel_argmax(logits * 2, heat, words, positions, VOCAB)
            return choice.token, choice.best

        pool.capture(R, choose, (torch.zeros(R, VOCAB, device=device), words, positions, heat))
        for _ in range(3):
            logits = torch.randn(R, VOCAB, device=device)
            replayed = pool.replay(R, (logits, words, positions, heat))
            eager = choose(logits, words, positions, heat)
            right &= all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True))
    print(f"graphs: {'equal to eager' if right else 'WRONG'}")
    return right


def check_rows(device: torch.device) -> bool:
    """Return True if rows have the same bits alone and in wider passes, in one or several programs; half precision."""
    right, dtype = True, torch.bfloat16
    for N, K in LAYERS:
        x, weight = draw(300, K, dtype=dtype, device=device), draw(N, K, dtype=dtype, device=device)
        alone = torch.cat([linear.invariant_linear(x[i : i + 1], weight) for i in range(8)])
        for T, by_chunk in itertools.product((8, 17, 40, 100, 300), (False, True)):
            right &= torch.equal(linear.invariant_linear(x[:T], weight, by_chunk=by_chunk)[:8], alone)
    length, size = 3000, 64
    keys, values = (draw(64, size, KV_HEADS, HEAD_DIM, dtype=dtype, device=device) for _ in range(2))
    table = torch.randperm(64, device=device).int().unsqueeze(0)
    query = draw(64, HEADS, HEAD_DIM, dtype=dtype, device=device)

    def read(first: int, count: int, by_span: bool) -> Tensor:
        committed = torch.tensor([length + first], dtype=torch.int32, device=device)
        seen = torch.arange(1, count + 1, device=device).int().unsqueeze(0)
        return attention.paged_attention(
            query[first : first + count], keys, values, table, committed, seen, seen - 1, by_span=by_span
        )

    alone = torch.cat([read(i, 1, False) for i in range(64)])
    for count, by_span in itertools.product((1, 2, 5, 16, 64), (False, True)):
        right &= torch.equal(torch.cat([read(i, count, by_span) for i in range(0, 65 - count, count)]),
                             alone[: 64 // count * count])  # fmt: skip
    print(f"rows: {'the same bits in every pass' if right else 'NOT batch-invariant'}")
    return right


def check_documents(device: torch.device) -> bool:
    """Packed documents through a kernel, forward and backward, against float32 in PyTorch."""
    lengths, right = (1, 7, 130, 1, 900), True
    query, key_value, slope = (draw(sum(lengths), heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
                               for heads in (HEADS, 2 * KV_HEADS, HEADS))  # fmt: skip
    kernel = varlen_kernel(query)
    for window in (0, 64):
        results = []
        for dtype in (torch.bfloat16, torch.float32):
            given = [x.to(dtype, copy=True).requires_grad_() for x in (query, key_value)]
            mixed = attend_documents(lengths, [window])(0, *given)
            torch.autograd.backward(mixed, slope.flatten(1).to(dtype))
            results.append([mixed.detach(), *(x.grad for x in given)])
        for got, wanted in zip(*results, strict=True):
            error = float((got.float() - wanted).norm() / wanted.norm())
            right &= error < 1e-2
            print(f"documents, window {window}, {tuple(wanted.shape)}: relative error {error:.1e}")
    print(f"documents by {kernel or 'PyTorch, without a kernel'}: {'right' if right else 'WRONG'}")
    return right


def check_update(device: torch.device) -> bool:
    """Return True if an update repeats its gradients three times: embedding, attention by document, and head."""
    lengths, dtype = (1, 7, 130, 1, 900, 3000), torch.bfloat16
    tokens = torch.randint(0, 50, (sum(lengths),), device=device)  # few: many gradients meet in a row
    where = torch.arange(0, sum(lengths), 2, device=device)
    sizes = (VOCAB, KV_HEADS * HEAD_DIM), (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM), (VOCAB, HEADS * HEAD_DIM)
    table, up, weight = (torch.nn.Parameter(draw(*size, dtype=dtype, device=device)) for size in sizes)
    head = _Head(weight)

    @deterministic_operations()
    def gradients() -> list[Tensor]:
        table.grad = up.grad = weight.grad = None
        x = torch.nn.functional.embedding(tokens, table)
        query, key = (y.view(len(tokens), -1, HEAD_DIM) for y in (torch.nn.functional.linear(x, up), x))
        mixed = attend_documents(lengths)(0, query, torch.cat([key, key], 1))
        head(mixed[where] * 0.01, tokens[where], 1.0, False)[0].sum().backward()
        return [each.grad.clone() for each in (table, up, weight) if each.grad is not None]

    first, *others = (gradients() for _ in range(3))
    right = len(first) == 3 and all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    print(f"gradients of an update: {'the same bits again' if right else 'DIFFER'}")
    return right


def check_pool(device: torch.device) -> bool:
    """Return True if memory of a page pool can be given back, and a graph finds it again."""
    memory, graphs = PoolMemory(device), GraphPool(device)
    x = memory.allocate_zeros(1 << 28, dtype=torch.uint8)
    graphs.capture("add", lambda: (x.add_(1)[:1],), (), (x,))
    graphs.replay("add", ())
    memory.release()
    given_back = torch.zeros(1 << 28, dtype=torch.uint8, device=device)  # others use it meanwhile
    del given_back
    memory.restore()
    graphs.replay("add", ())
    right = bool((x == 1).all()) and memory.is_releasable
    memory.close()
    print(f"page pool: {'given back and found again' if right else 'WRONG, or CUDA cannot give it back'}")
    return right


def check_on_gpu() -> int:
    """Run and time all cases and checks; returns 1 if one is wrong."""
    from triton.testing import do_bench_cudagraph

    set_cublas_workspaces(os.environ)
    device = torch.device("cuda")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'':56} {'error':>9} {'allowed':>9} {'us':>9} {'GB/s':>7}")
    failed = 0
    for case in all_cases(device, small=False):
        # fills fresh tensors with NaN, so that nothing unwritten is overlooked
        torch.use_deterministic_algorithms(True, warn_only=True)
        error = error_of(case)
        torch.use_deterministic_algorithms(False)
        taken = 1e3 * do_bench_cudagraph(case.run, return_mode="median")
        wrong = not error <= case.tolerance
        failed += wrong
        rate = case.num_bytes / taken / 1e3
        print(f"{case.name:56} {error:9.1e} {case.tolerance:9.1e} {taken:9.1f} {rate:7.0f}{'  WRONG' * wrong}")
    for check in (check_graphs, check_rows, check_documents, check_update, check_pool):
        failed += not check(device)
    print(f"{failed} wrong" if failed else "all right")
    return 1 if failed else 0


# -- compiled for a GPU that is not there ------------------------------------------------------------------------


def usage_of(binary: bytes) -> str:
    """Registers and stack (spilled) bytes of a compiled kernel, as cuobjdump has them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return next(line.strip() for line in shown.splitlines() if "REG:" in line)


def arithmetic_of(compiled: Any) -> tuple[str, int, str]:
    """The properties of a compiled program on which the bits of its result depend.

    Its matrix instruction without the width; how many multiplications are fused with additions, without those of a
    logarithm (ftz); over which layout it sums.
    """
    code = compiled.asm["ptx"]
    sums = re.findall(r"tensor<[^>]*> *\) -> tensor<[^>]*#ttg.slice[^>]*>", compiled.asm["ttgir"])
    instructions = re.findall(r"(?:wgmma\.mma_async|mma\.sync)\.[\w.]+", code)
    layouts = re.findall(r"warpsPerCTA = \[[\d, ]*\]", compiled.asm["ttgir"]) if sums else []
    kinds = {re.sub(r"n\d+k", "nNk", name) for name in instructions}
    return " ".join(sorted(kinds)), len(re.findall(r"\bfma\.(?!rn\.ftz)", code)), " ".join(sorted({*sums, *layouts}))


def num_unlike(groups: Sequence[Sequence[Any]]) -> int:
    """Groups of programs whose forms for half precision do not all compute alike; prints what each computes with."""
    unlike = 0
    for programs in groups:
        caches = [cache for program in programs for cache in program.device_caches.values()]
        forms = [arithmetic_of(one) for cache in caches for one in cache[0].values()]
        alike = {form for form in forms if form[0]}  # float32 has no matrix instruction, and tiles of its own
        unlike += len(alike) != 1
        names = ", ".join(program.__name__ for program in programs)
        print(f"{names}: {len(forms)} forms, {'; '.join(sorted(form[0] for form in alike))}")
    return unlike


def compile_all(architecture: str) -> int:
    """Compile what the cases launch and print what each program takes; a compiler's error ends it."""
    import triton
    from triton.backends.compiler import GPUTarget

    from tlt_hpc.kernels.programs import attention as programs
    from tlt_hpc.kernels.programs.linear import _multiply, _multiply_experts

    rows = list[tuple[str, int, str]]()

    def take(name: str, binary: bytes, shared: int, _device: int) -> tuple[int, int, int, int, int]:
        """The place where a real driver loads the machine code."""
        rows.append((name, shared, usage_of(binary)))
        return 0, 0, 0, 0, 1024

    properties = {"max_shared_mem": {"80": 166_912, "90": 232_448}.get(architecture, 101_376)}
    # the driver interface of Triton 3.6 and 3.7; what is launched does nothing
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", int(architecture), 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0,
        launcher_cls=lambda _source, _metadata: lambda *_: None,
        utils=SimpleNamespace(load_binary=take, get_device_properties=lambda _device: properties),
    )
    triton.runtime.driver.set_active(driver)
    programs.is_hopper = lambda x: architecture == "90"
    spilled = 0
    with dispatch.forcing_triton():
        for case in all_cases(torch.device("cpu"), small=True):
            before = len(rows)
            case.run()
            for name, shared, usage in rows[before:]:
                print(f"{case.name:44} {name:20} shared {shared:6}  {usage}")
                spilled += "STACK:0" not in usage
    print(f"{len(rows)} programs for {architecture}, {spilled} with spilled registers")
    unlike = num_unlike([(programs._attend, programs._attend_spans), (_multiply,), (_multiply_experts,)])
    print("NOT batch-invariant" if unlike else "batch-invariant: all forms of a program compute alike")
    return 1 if unlike else 0


def main() -> int:
    """Check the kernels of this machine's GPU, or compile them; returns the exit status.

    Raises:
        UserError: there is no Triton, or no GPU.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", metavar="NN", help="compile for this architecture, e.g. 90 for H100 and H200")
    architecture = parser.parse_args().compile
    if not dispatch.has_triton():
        raise UserError("triton is not installed: it comes with a CUDA build of torch, or pip install triton==3.7.1")
    if architecture:
        return compile_all(architecture)
    if not torch.cuda.is_available():
        raise UserError("no CUDA device; without one, --compile compiles the programs and pytest interprets them")
    return check_on_gpu()


if __name__ == "__main__":
    sys.exit(run_script("check_kernels", main))
