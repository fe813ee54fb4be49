"""Memory of a page pool that is given back between rollouts, at addresses that stay. Treats pages as opaque.

Graphs record addresses, so the pool cannot be freed and allocated again. On a GPU its addresses are reserved and memory
is mapped to them, through CUDA's driver ("Virtual Memory Management"). On a CPU the operating system takes back the
pages of a private mapping.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable
from contextlib import ExitStack
from math import prod
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
_OUT_OF_MEMORY = 2


class PoolMemory:
    """The tensors of a pool: they have memory but for the time between ``release`` and ``restore``."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._tensors = device, list[Tensor]()
        self._blocks: list[HostMemory | GpuMemory] = []
        self.is_released = False

    @property
    def is_releasable(self) -> bool:
        """True if ``release`` gives back all of it."""
        return len(self._blocks) == len(self._tensors)

    def allocate_zeros(self, *sizes: int, dtype: torch.dtype) -> Tensor:
        """A new tensor of zeros."""
        num_bytes = prod(sizes) * dtype.itemsize
        block = self._allocate_block(num_bytes) if num_bytes else None
        if block is None:
            tensor = torch.zeros(sizes, dtype=dtype, device=self._device)
        else:
            self._blocks.append(block)
            tensor = block.tensor()[:num_bytes].view(dtype).view(sizes).zero_()
        self._tensors.append(tensor)
        return tensor

    def release(self) -> None:
        """Give the memory back; the tensors must not be touched until ``restore``."""
        if self.is_released:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for block in self._blocks:
            block.release()
        self.is_released = True

    def restore(self) -> None:
        """Take memory again, full of zeros.

        Raises:
            torch.OutOfMemoryError: others have taken it meanwhile.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # what the update has left over
        for block in self._blocks:
            block.restore()
        for tensor in self._tensors:
            tensor.zero_()
        self.is_released = False

    def close(self) -> None:
        """Give memory and addresses back for good; nothing may run that reads the tensors."""
        if self._device.type == "cuda" and self._blocks:
            torch.cuda.synchronize(self._device)
        while self._blocks:
            self._blocks.pop().close()
        self._tensors.clear()

    def _allocate_block(self, num_bytes: int) -> HostMemory | GpuMemory | None:
        if self._device.type == "meta":
            return None
        if self._device.type == "cpu":
            return HostMemory(num_bytes)
        try:
            return GpuMemory(num_bytes, self._device)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # as torch's own allocator does
            return GpuMemory(num_bytes, self._device)
        except OSError as error:
            logger.warning("the page pool keeps its memory during the policy update: %s", error)
            return None


class HostMemory:
    """A private mapping, whose pages the system takes back and gives again as zeros when they are touched.

    Its methods are those of ``GpuMemory``.
    """

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def tensor(self) -> Tensor:
        """The bytes [n] as a uint8 tensor."""
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def release(self) -> None:
        """Give the memory back: its contents are lost."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """Nothing to do: memory comes with the first touch."""

    def close(self) -> None:
        """Give the memory back; the addresses stay until the tensor is gone."""
        self.release()


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class GpuMemory:
    """Reserved addresses of a GPU, to which memory is mapped; ``close`` is needed to give them back."""

    def __init__(self, num_bytes: int, device: torch.device, driver: Any = None) -> None:
        """``driver``: libcuda, which is loaded if it is not given.

        Raises:
            OSError: the driver cannot do it.
            torch.OutOfMemoryError: there is not so much memory.
        """
        self._driver = driver or ctypes.CDLL("libcuda.so.1")
        self._device, self._is_mapped = device, False
        self._place = _Location(_ON_DEVICE, device.index or 0)
        self._properties = _Properties(type=_PINNED, location=self._place)
        step, self._address, self._handle = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(self._properties), ctypes.c_int(0))
        self._size, zero = ctypes.c_size_t(-(-num_bytes // step.value) * step.value), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(self._address), self._size, ctypes.c_size_t(0), zero, zero)
        with ExitStack() as undo:
            undo.callback(self.close)
            self.restore()
            undo.pop_all()

    def tensor(self) -> Tensor:
        """All its bytes [n] uint8; read and written only while it has memory."""
        described = {"shape": (self._size.value,), "typestr": "|u1", "data": (self._address.value, False), "version": 3}
        holder = type("Holder", (), {"__cuda_array_interface__": described})()
        return torch.as_tensor(holder, device=self._device)

    def restore(self) -> None:
        """Take memory again; its contents are not defined."""
        zero = ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(self._handle), self._size, ctypes.byref(self._properties), zero)
        with ExitStack() as undo:
            undo.callback(self._call, "cuMemRelease", self._handle)
            self._call("cuMemMap", self._address, self._size, ctypes.c_size_t(0), self._handle, zero)
            undo.callback(self._call, "cuMemUnmap", self._address, self._size)
            access = _Access(self._place, _READ_WRITE)
            self._call("cuMemSetAccess", self._address, self._size, ctypes.byref(access), ctypes.c_size_t(1))
            undo.pop_all()
        self._is_mapped = True

    def release(self) -> None:
        """Give the memory back: its contents are lost."""
        self._call("cuMemUnmap", self._address, self._size)
        self._call("cuMemRelease", self._handle)
        self._is_mapped = False

    def close(self) -> None:
        """Give memory and addresses back for good: the tensor must not be touched any more."""
        if self._is_mapped:
            self.release()
        self._call("cuMemAddressFree", self._address, self._size)

    def _call(self, name: str, *given: Any) -> None:
        function: Callable[..., int] = getattr(self._driver, name)  # ctypes finds functions by their names alone
        status = function(*given)
        if status == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(
                f"the page pool needs {self._size.value / 1e9:.1f} GB of the GPU, which has less left: lower "
                "rollout.kv_bytes, or what else the job holds (tlt plan)"
            )
        if status:
            raise OSError(f"CUDA's {name} returned error {status}")
