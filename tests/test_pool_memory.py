"""Memory of the page pool: given back and taken again at the same addresses, on a CPU and by CUDA's driver's calls."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import CPU, embedded_folder, gcd_requests, generate, make_engine, texts

from tlt_hpc.models.folder import read_folder_weights
from tlt_hpc.rollout.pool_memory import GpuMemory, PoolMemory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
# isort: split
from check_kernels import check_pool


def resident_bytes() -> int:
    found = re.search(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1])


def test_a_process_is_smaller_while_the_pool_is_given_back():
    memory, before = PoolMemory(CPU), resident_bytes()
    x = memory.allocate_zeros(3, 25_000_000, dtype=torch.bfloat16)
    address = x.fill_(3.0).data_ptr()
    held = resident_bytes()
    assert held - before > 0.9 * x.nbytes
    memory.release()
    assert memory.is_released and held - resident_bytes() > 0.9 * x.nbytes
    memory.restore()
    assert not memory.is_released and x.data_ptr() == address and not x.any()
    assert memory.allocate_zeros(0, 5, dtype=torch.float32).shape == (0, 5)


@pytest.mark.parametrize("attention", ["pages", "paged-kernel"])
def test_texts_after_a_release_are_the_same(attention):
    requests = gcd_requests(3, 4)
    engine = make_engine(max_new_tokens=60, attention=attention)
    first = texts(generate(engine, requests))
    engine.release_pages()
    assert engine._cache._memory.is_released
    engine.load_policy(read_folder_weights(embedded_folder()), 1)
    assert not engine._cache._memory.is_released
    assert texts(generate(engine, requests)) == first
    for pool in engine._cache._pools:
        pool.fill_(torch.nan)
    engine.load_policy(read_folder_weights(embedded_folder()), 2)
    assert not any(pool.any() for pool in engine._cache._pools), "what the weights before had left is gone"
    engine.submit(requests)
    with pytest.raises(AssertionError, match="live sequences"):
        engine.release_pages()


class Driver:
    """CUDA's driver with memory of a private mapping; notes its calls, and refuses the ``failing`` one."""

    def __init__(self, failing="", status=0):
        self.calls, self.failing, self.status = [], failing, status
        self.memory = mmap.mmap(-1, 1 << 24)
        self.address = np.frombuffer(self.memory, np.uint8).ctypes.data

    def __getattr__(self, name):
        def call(*given):
            values = [one._obj if hasattr(one, "_obj") else one for one in given]
            self.calls.append((name, *(getattr(value, "value", None) for value in values)))
            if name == self.failing:
                return self.status
            if name == "cuMemGetAllocationGranularity":
                values[0].value = 1 << 21
                place = values[1].location
                assert (values[1].type, place.type, place.id, values[1].handle_types) == (1, 1, 3, 0)
            if name == "cuMemAddressReserve":
                values[0].value = self.address
            if name == "cuMemCreate":
                values[0].value = 77
            if name == "cuMemSetAccess":
                assert (values[2].flags, values[2].location.id) == (3, 3)
            return 0

        return call


def test_a_gpus_memory_is_mapped_unmapped_and_mapped_again():
    driver = Driver()
    memory = GpuMemory(3_000_000, torch.device("cuda", 3), driver)
    size, at = 1 << 22, driver.address
    mapped = ["cuMemCreate", "cuMemMap", "cuMemSetAccess"]
    assert [name for name, *_ in driver.calls] == ["cuMemGetAllocationGranularity", "cuMemAddressReserve", *mapped]
    assert driver.calls[1][2:] == (size, 0, 0, 0) and driver.calls[2][2] == size
    assert driver.calls[3][1:] == (at, size, 0, 77, 0)
    driver.calls.clear()
    memory.release()
    assert driver.calls == [("cuMemUnmap", at, size), ("cuMemRelease", 77)]
    driver.calls.clear()
    memory.restore()
    assert [name for name, *_ in driver.calls] == mapped
    driver.calls.clear()
    memory.close()
    assert [name for name, *_ in driver.calls] == ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]


@pytest.mark.parametrize("failing", ["cuMemMap", "cuMemSetAccess"])
def test_what_fails_half_way_leaves_nothing_behind(failing):
    driver = Driver(failing, 1)
    with pytest.raises(OSError, match=failing):
        GpuMemory(100, torch.device("cuda", 3), driver)
    undone = ["cuMemUnmap"] * (failing == "cuMemSetAccess") + ["cuMemRelease", "cuMemAddressFree"]
    names = [name for name, *_ in driver.calls]
    assert names[names.index(failing) + 1 :] == undone


def test_a_graph_finds_its_memory_again():
    """The check that runs on a GPU, by the same functions on a CPU."""
    assert check_pool(CPU)


def test_a_driver_that_cannot_is_told_apart_from_a_full_gpu():
    with pytest.raises(OSError, match=r"cuMemAddressReserve returned error 801"):
        GpuMemory(100, torch.device("cuda", 3), Driver("cuMemAddressReserve", 801))
    with pytest.raises(torch.OutOfMemoryError, match=r"page pool needs 0\.0 GB of the GPU.*lower rollout\.kv_bytes"):
        GpuMemory(100, torch.device("cuda", 3), Driver("cuMemCreate", 2))
