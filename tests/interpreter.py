"""Triton as an interpreter that runs programs on CPU tensors through NumPy: slow, and for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tlt_hpc.kernels.dispatch import forcing_triton

_INTERPRET = "TRITON_INTERPRET"  # Triton's own switch, read when triton and every program are first imported


def load_interpreter() -> None:
    """Import Triton as an interpreter, before anything imports it as a compiler; nothing uses it by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_INTERPRET, "1")
        from tlt_hpc.kernels.programs import attention, gumbel, linear, pointwise  # noqa: F401


@contextmanager
def interpreted() -> Iterator[None]:
    """Run Triton programs on CPU tensors while this lasts. Needs ``load_interpreter`` first."""
    with forcing_triton(), pytest.MonkeyPatch.context() as patch:
        patch.setenv(_INTERPRET, "1")  # the first launch imports more of Triton
        yield


@contextmanager
def summing_in_order() -> Iterator[None]:
    """Multiply matrices as a matrix unit does: each number of the product sums its own terms, always in one order.

    NumPy's product chooses how it sums by the number of rows, and has no bfloat16.
    """
    from triton.runtime import interpreter

    def numbers(tensor: Any) -> np.ndarray:
        bits = tensor.data
        if tensor.dtype.scalar.is_bf16():
            return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return bits.astype(np.float32)

    def dot(_: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        left, right, total = numbers(a), numbers(b), d.data.copy()
        for k in range(left.shape[1]):
            total += left[:, k : k + 1] * right[k : k + 1]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield
