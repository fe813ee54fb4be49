"""Decides whether an operation runs as a Triton program or in plain PyTorch, in one place. Knows no operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
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
def forced() -> Iterator[None]:
    """Context in which CPU tensors take the Triton path too: with its interpreter, or a driver that only compiles."""
    _Forced.on = True
    try:
        yield
    finally:
        _Forced.on = False
