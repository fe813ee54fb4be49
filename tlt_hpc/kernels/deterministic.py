"""Has PyTorch compute what decides weights in a fixed order of additions; knows no model and no update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic


@contextmanager
def deterministic() -> Iterator[None]:
    """Context, or decorator, in which the same tensors give the same bits on the same device.

    It holds for all threads, so for backward passes and what they compute again, and must hold for the forward pass
    already: flash-attn chooses its backward pass there. An operator that has no fixed order raises RuntimeError; with
    warnings in its place flash attention would not be deterministic. On a GPU cuBLAS must have been prepared
    (``cluster.device.fix_workspaces``). Not for two threads at once: the second to leave restores what the first set.
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
