"""Triton as an interpreter that runs programs on CPU tensors through NumPy: slow, and for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tlt_hpc.kernels.dispatch import forced

_INTERPRET = "TRITON_INTERPRET"  # Triton's own switch, read when triton and every program are first imported


def load_interpreter() -> None:
    """Import Triton as an interpreter, before anything imports it as a compiler; nothing uses it by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_INTERPRET, "1")
        from tlt_hpc.kernels.programs import attention, gumbel, pointwise, rotary  # noqa: F401


@contextmanager
def interpreted() -> Iterator[None]:
    """Run Triton programs on CPU tensors while this lasts. Needs ``load_interpreter`` first."""
    with forced(), pytest.MonkeyPatch.context() as patch:
        patch.setenv(_INTERPRET, "1")  # the first launch imports more of Triton
        yield
