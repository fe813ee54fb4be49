"""Packed documents through a kernel of flash-attn's signature, a plain one standing in for it; where it is called."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
from torch import Tensor

from tlt_hpc.kernels import varlen
from tlt_hpc.kernels.dispatch import deterministic_operations
from tlt_hpc.kernels.varlen import VarlenKernel, varlen_kernel
from tlt_hpc.models import documents

LENGTHS = (1, 7, 130, 1, 40)
HEADS, KV_HEADS, SIZE = 6, 2, 8


def stand_in(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, before: int, after: int) -> Tensor:
    """What both kernels compute: causal attention between two neighbouring starts, to at most so many tokens before a
    query (-1: all), heads shared in order.
    """
    assert after == 0
    assert starts.dtype == torch.int32 and int(starts[0]) == 0 and int(starts[-1]) == len(query)
    out = []
    for start, end in zip(starts.tolist(), starts[1:].tolist(), strict=False):
        q = query[start:end]
        k, v = (x[start:end].repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
        scores = torch.einsum("ihd,jhd->hij", q, k) * SIZE**-0.5
        shown = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        hidden = ~(shown if before < 0 else shown.triu(-before))
        out.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(out)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels ran; both are stood in for, with their own arguments checked."""
    made: list[str] = []

    def flash(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **rest: Any) -> Any:
        window = rest.pop("window_size")
        assert rest == {"causal": True, "deterministic": True} and cu_q is cu_k and max_q == max_k == max(LENGTHS)
        made.append("flash-attn")
        return stand_in(q, k, v, cu_q, *window)

    def own(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
        window_size: tuple[int, int], enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        assert enable_gqa and cu_q is cu_k and max_q == max_k == max(LENGTHS)
        made.append("torch")
        return stand_in(q, k, v, cu_q, *window_size)

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(torch_varlen, "varlen_attn", own)
    return made


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(sum(LENGTHS), HEADS, SIZE, generator=generator, requires_grad=True)
    return query, torch.randn(sum(LENGTHS), 2 * KV_HEADS, SIZE, generator=generator, requires_grad=True)


@pytest.mark.parametrize("window", [0, 1, 6, 50, 200])
@pytest.mark.parametrize("kernel", ["flash-attn", "torch"])
def test_a_kernel_gives_what_the_cpu_gives(
    kernel: VarlenKernel, window: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for chosen in (None, kernel):
        monkeypatch.setattr(documents, "varlen_kernel", lambda query, chosen=chosen: chosen)
        query, key_value = batch()
        with deterministic_operations():
            mixed = documents.attend_documents(LENGTHS, [window])(0, query, key_value)
            mixed.square().sum().backward()
        results.append((mixed.detach(), query.grad, key_value.grad))
    assert calls == [kernel] and results[1][0].shape == (sum(LENGTHS), HEADS * SIZE)
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, atol=1e-5, rtol=1e-5)


class OnGpu:
    """As much of a tensor on a GPU as the choice asks for."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, dtype: torch.dtype, head: int = 128) -> None:
        self.dtype, self.shape = dtype, (4, 2, head)


def test_which_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    choose: Any = varlen_kernel
    for installed, kernel in ((True, "flash-attn"), (False, "torch")):
        monkeypatch.setattr(varlen, "has_flash_attention", lambda installed=installed: installed)
        assert choose(OnGpu(torch.bfloat16)) == kernel
    assert choose(OnGpu(torch.float32)) is None and choose(OnGpu(torch.bfloat16, 512)) is None
    assert choose(torch.zeros(4, 2, 8, dtype=torch.bfloat16)) is None, "there is none for a CPU"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose(OnGpu(torch.bfloat16)) is None, "too old a GPU"
