"""Values to a device and back without waiting for what the device does. Knows neither side's meaning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(
    values: Sequence[object] | NDArray[np.int64], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """A tensor of (nested) ``values``: through pinned memory on CUDA, since a copy from other memory waits."""
    held = torch.tensor(values, dtype=dtype)
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held.to(device)


def write_number_on_device(values: Tensor, index: int, number: float) -> None:
    """Write one number into ``values`` [n], as a kernel's argument.

    ``values[index] = number`` would make a tensor in host memory and copy it, and that copy waits for the device.
    """
    values[index : index + 1].fill_(number)


def swap_rows_in_place(values: Tensor, one: int, other: int) -> None:
    """Exchange two rows of ``values`` in place. A list as an index would be copied to the device, and waited for."""
    kept = values[one].clone()
    values[one] = values[other]
    values[other] = kept


class PendingHostCopy:
    """A tensor on its way to the host; on a CPU a copy, unless ``is_own`` says that it is not shared."""

    def __init__(self, x: Tensor, is_own: bool = False) -> None:
        self._event: torch.cuda.Event | None = None
        if not x.is_cuda:
            self._held = x if is_own else x.clone()
            return
        self._held = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._held.copy_(x, non_blocking=True)
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    @property
    def is_ready(self) -> bool:
        """True if ``wait`` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """The copy, once it is complete; sleeps until then."""
        if self._event is not None:
            self._event.synchronize()
        return self._held
