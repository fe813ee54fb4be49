"""Sums over all ranks of what a drafter's training has on its device. Knows no drafter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Pending(Protocol):
    """A sum under way."""

    def wait(self) -> NDArray[np.float32]: ...


class SumOverRanks(Protocol):
    """The part of the world that a merge needs."""

    @property
    def size(self) -> int: ...

    def start_sum(self, array: NDArray[np.float32]) -> Pending: ...

    def allgather(self, item: Any) -> list[Any]: ...


def sums_on_gpus() -> bool:
    """Whether every rank has a GPU of its own, and they are connected; the same on all ranks."""
    return torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl"


def start_sum(world: SumOverRanks, flat: Tensor) -> Callable[[], Tensor]:
    """Post the sum of ``flat`` [n], which belongs to it from now on; what is returned waits for it.

    With a process group of GPUs it is summed on them, beside other work; else through host memory by MPI.
    """
    if sums_on_gpus():
        work = torch.distributed.all_reduce(flat, async_op=True)
        assert work is not None

        def wait() -> Tensor:
            work.wait()
            return flat

        return wait
    pending, device = world.start_sum(flat.cpu().numpy()), flat.device
    return lambda: torch.from_numpy(pending.wait()).to(device)
