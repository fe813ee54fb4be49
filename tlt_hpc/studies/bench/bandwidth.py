"""What the memory can do: bytes per second of one large read, measured in the run whose figures it bounds.

Knows no model. The read is far beyond the caches, by the process's own threads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

_BUFFER_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
_REPEATS = 7


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second that a plain read of the device's memory reaches: the fastest way tried, median of several.

    A sum and a matrix-vector product read alike but for their inner loops; the better one is the closer to the limit.
    """
    numbers = _BUFFER_BYTES[device.type] // 4
    buffer = torch.ones(numbers, dtype=torch.float32, device=device)
    matrix, vector = buffer.view(-1, 4096), torch.ones(4096, device=device)
    ways: tuple[Callable[[], Tensor], ...] = (buffer.sum, lambda: matrix @ vector, buffer.max)
    return max(_bytes_per_second(way, buffer) for way in ways)


def _bytes_per_second(read: Callable[[], Tensor], buffer: Tensor) -> float:
    read()
    seconds = [timed(read, buffer.device) for _ in range(_REPEATS)]
    return buffer.numel() * buffer.element_size() / statistics.median(seconds)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that ``work`` takes, the device's own included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
