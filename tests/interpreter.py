"""Triton as an interpreter that runs programs on CPU tensors through NumPy: slow, and for tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tlt_hpc.kernels.dispatch import forced

_INTERPRET = "TRITON_INTERPRET"  # Triton's own switch, read when triton and every program are first imported


def load_interpreter() -> None:
    """Import Triton as an interpreter; nothing uses it by itself.

    Raises:
        RuntimeError: triton was imported before, as a compiler; it cannot be both in one process.
    """
    if "triton" in sys.modules and not _is_interpreter():
        raise RuntimeError("triton is already imported as a compiler; call load_interpreter() before anything uses it")
    with _environment():
        from tlt_hpc.kernels.programs import attention, gumbel, pointwise, rotary  # noqa: F401


@contextmanager
def interpreted() -> Iterator[None]:
    """Run Triton programs on CPU tensors while this lasts. Needs ``load_interpreter`` first."""
    assert _is_interpreter(), "call load_interpreter() before triton is imported"
    with forced(), _environment():
        yield


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
