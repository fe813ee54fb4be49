"""Decides whether an operation runs as a Triton program or in plain PyTorch, in one place. Knows no operation."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

_INTERPRET = "TRITON_INTERPRET"  # Triton's own switch, read when triton and every program are first imported


class _Forced:
    on = False


@cache
def has_triton() -> bool:
    """Triton is installed; it comes with CUDA builds of PyTorch, not with CPU builds."""
    return find_spec("triton") is not None


@cache
def has_flash_attention() -> bool:
    """The flash-attn package (FlashAttention 2) is installed."""
    return find_spec("flash_attn") is not None


def runs_triton(x: Tensor) -> bool:
    """The one rule: Triton for tensors on a GPU where triton is installed, else the PyTorch of the same module.

    Programs compute in float32, so float64 always runs in PyTorch.
    """
    return has_triton() and x.dtype != torch.float64 and (x.is_cuda or _Forced.on)


def load_interpreter() -> None:
    """Import Triton as an interpreter that runs programs on CPU tensors through NumPy; nothing uses it by itself.

    Raises:
        RuntimeError: triton was imported before, as a compiler; it cannot be both in one process.
    """
    if "triton" in sys.modules and not _is_interpreter():
        raise RuntimeError("triton is already imported as a compiler; call load_interpreter() before anything uses it")
    with _environment():
        from tlt_hpc.kernels.programs import attention, gumbel, pointwise, rotary  # noqa: F401


@contextmanager
def interpreted() -> Iterator[None]:
    """Run Triton programs on CPU tensors while this lasts: slow, and for tests. Needs ``load_interpreter`` first."""
    assert _is_interpreter(), "call load_interpreter() before triton is imported"
    with forced(), _environment():
        yield


@contextmanager
def forced() -> Iterator[None]:
    """Take the Triton path for CPU tensors as well; what then happens is up to Triton's driver."""
    _Forced.on = True
    try:
        yield
    finally:
        _Forced.on = False


@contextmanager
def _environment() -> Iterator[None]:
    """Triton's switch on, for what it imports meanwhile; its first launch imports more of itself."""
    before = os.environ.get(_INTERPRET)
    os.environ[_INTERPRET] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INTERPRET]
        else:
            os.environ[_INTERPRET] = before


def _is_interpreter() -> bool:
    """How triton was imported shows in its own library functions."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(tl.zeros, InterpretedFunction)
