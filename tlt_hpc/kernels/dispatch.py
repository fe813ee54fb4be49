"""Decides how operations are computed: by a Triton program or in PyTorch, and in which order of additions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor


class _Forced:
    on = False


@cache
def has_triton() -> bool:
    """True if Triton is installed; it comes with CUDA builds of PyTorch, not with CPU builds."""
    return find_spec("triton") is not None


@cache
def has_flash_attention() -> bool:
    """True if the flash-attn package (FlashAttention 2) is installed."""
    return find_spec("flash_attn") is not None


def runs_triton(x: Tensor) -> bool:
    """True if operations on x, of any shape, run in Triton: on a GPU where triton is installed; else in PyTorch.

    Programs compute in float32, so float64 always runs in PyTorch.
    """
    return has_triton() and x.dtype != torch.float64 and (x.is_cuda or _Forced.on)


@contextmanager
def forcing_triton() -> Iterator[None]:
    """Context in which CPU tensors take the Triton path too: with its interpreter, or a driver that only compiles."""
    _Forced.on = True
    try:
        yield
    finally:
        _Forced.on = False


@contextmanager
def deterministic_operations() -> Iterator[None]:
    """Context, or decorator, in which the same tensors give the same bits on the same device.

    It holds for all threads, so for backward passes and what they compute again, and must hold for the forward pass
    already: flash-attn chooses its backward pass there. An operator that has no fixed order raises RuntimeError; with
    warnings in its place flash attention would not be deterministic. On a GPU cuBLAS must have been prepared
    (``cluster.device.set_cublas_workspaces``). Not for two threads at once: the second to leave restores what
    the first set.
    """
    filling: Any = torch.utils.deterministic
    # of the two public switches the one that does not import the compiler, which takes seconds
    before = torch.get_deterministic_debug_mode(), filling.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    filling.fill_uninitialized_memory = False  # nothing here reads what it has not written
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        filling.fill_uninitialized_memory = before[1]
