"""Bytes of tensors alive on a device, and the most of them while something runs.

What the process occupies beside its tensors (code, Python, an allocator's slack) is none of it, so a figure repeats
to the byte on a CPU.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered; a tensor's storage counts once, however many views it has, until the last is gone.

    On CUDA the allocator's own counters are read; elsewhere every operation of this thread is watched, which makes it
    many times slower. Buffers that a kernel takes and gives back inside are not seen there.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device or torch.device("cpu")
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._live = 0
        self.at_start = 0
        """Bytes alive on entering."""
        self.peak = 0
        """Most bytes alive at once since then."""

    def __enter__(self) -> Self:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._live = torch.cuda.memory_allocated(self._device)
        else:
            for tensor in _all_tensors():
                self._see(tensor)
        self.at_start = self.peak = self._live
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.peak = torch.cuda.max_memory_allocated(self._device)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if self._device.type != "cuda":
            for leaf in tree_leaves(results):
                if isinstance(leaf, Tensor):
                    self._see(leaf)
            self.peak = max(self.peak, self._live)
        return results

    def _see(self, tensor: Tensor) -> None:
        if tensor.device.type != self._device.type or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            self._watches[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._live += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def _forget(self, key: int) -> None:
        self._watches.pop(key)
        self._live -= self._sizes.pop(key)


def _all_tensors() -> Iterator[Tensor]:
    gc.unfreeze()  # what existed when libraries were imported is not listed otherwise
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):  # isinstance would ask objects that load themselves when they are asked
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad
