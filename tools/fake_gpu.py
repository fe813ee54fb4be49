"""A GPU that computes nothing: what runs on "cuda:0" is checked and counted, on a machine without one. For tests.

Tensors on the GPU have shapes but no numbers (PyTorch's FakeTensorMode); those on the CPU are real. What a CUDA graph
cannot hold, or would silently replay with old values, raises ``GraphError``: see ``FakeGpu``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


# isort: split
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tlt_hpc.config import UserError
from tlt_hpc.kernels import graphs
from tlt_hpc.rollout import pool_memory

GPU = torch.device("cuda", 0)
PROPERTIES = SimpleNamespace(multi_processor_count=132, total_memory=85_520_809_984, name="fake", major=9, minor=0)
"""Of an H100."""
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}
"""
_aten = torch.ops.aten
_NUMBERS = (_aten.item, _aten._local_scalar_dense)
_READS_BACK = (*_NUMBERS, _aten.nonzero, _aten.masked_select, _aten.equal, _aten._unique2)
_INDEXES = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)
_PINS = (_aten.pin_memory, _aten._pin_memory)
_IS_NO_KERNEL = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.detach, _aten.lift_fresh, _aten.reshape)


class GraphError(AssertionError):
    """Something was done on the GPU that a CUDA graph cannot hold, or that waits for the GPU."""


@cache
def load_guard() -> None:
    """Register the device guard that PyTorch's CPU build lacks, for the whole process; before any backward pass.

    Raises:
        UserError: there is no C++ compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise UserError(
            f"no C++ compiler ({compiler}) for the fake GPU: apt-get install g++, or conda install -c conda-forge gxx"
        )
    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(_GUARD)
        libraries = f"-L{home}/lib", "-lc10", f"-Wl,-rpath,{home}/lib"
        command = compiler, "-shared", "-fPIC", "-std=c++20", f"-I{home}/include", source, *libraries, "-o", library
        subprocess.run(command, check=True)
        ctypes.CDLL(str(library))


class _Recording:
    """What a captured function did: operations in order, with all that a graph takes as it is at capture."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []
        self.kernels = Counter[str]()
        self._own: dict[int, int] = {}
        self._kept: list[Any] = []  # storages, so that none gets the identity of one that was freed

    def add(self, name: str, given: Sequence[Any], made: Sequence[Any]) -> None:
        """Note an operation: the tensors and numbers that it was given, and the tensors that came of it."""
        before = set[int]()
        self.steps.append((name, *(self._told(x, before) for x in given)))
        for x in made:
            if isinstance(x, FakeTensor) and (storage := x.untyped_storage())._cdata not in before:
                self._kept.append(storage)
                self._own[storage._cdata] = len(self._own)

    def _told(self, x: Any, storages: set[int]) -> Any:
        if isinstance(x, Tensor) and not isinstance(x, FakeTensor):
            with _disable_current_modes():
                x = x.item()  # a number, which the kernel is given
        if not isinstance(x, FakeTensor):
            return x if isinstance(x, (int, float, bool, str, type(None))) else repr(x)
        storage = x.untyped_storage()
        self._kept.append(storage)
        storages.add(storage._cdata)
        owner = ("own", self._own[storage._cdata]) if storage._cdata in self._own else ("outside", storage._cdata)
        return (*owner, tuple(x.shape), x.stride(), x.storage_offset(), x.dtype)


class FakeGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it tensors can be made on "cuda:0", and Triton programs and graphs be launched there.

    Raises ``GraphError``:
    - in the rounds of ``is_waiting_wrong`` and in captured functions, for what waits for the GPU: a number or a list
      read back, a copy from or to memory that is not pinned, an index or a mask whose size depends on data;
    - in captured functions, for a tensor of the CPU;
    - for memory of a page pool that was given back;
    - where a graph is replayed, if the function would not do now what was recorded: other operations, shapes or
      numbers, or another tensor where one was read that the function had not made itself.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._undo = ExitStack()
        self._pinned, self._released = set[int](), set[int]()
        self._recording: _Recording | None = None
        self.is_waiting_wrong = False
        self.counts = Counter[str]()
        """Operations on the GPU outside of graphs, by name, and copies between CPU and GPU."""

    def __enter__(self) -> FakeGpu:
        load_guard()
        self._undo.enter_context(self._fake)
        super().__enter__()  # type: ignore[no-untyped-call]
        for holder, name, value in self._replaced():
            self._undo.enter_context(mock.patch.object(holder, name, value))
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._undo.close()

    def _replaced(self) -> Iterator[tuple[Any, str, Any]]:
        """What of PyTorch and Triton needs a GPU, and what stands for it."""
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        yield JITFunction, "run", lambda program, *given, **options: self._launch(program, given, options)
        yield InterpretedFunction, "run", lambda program, *given, **options: self._launch(program, given, options)
        # a bound method would not be given the object that it is called on
        yield pool_memory, "GpuMemory", lambda num_bytes, device: _Memory(self._released, num_bytes, device)
        yield Tensor, "backward", lambda loss: self._run_backward(loss)  # noqa: PLW0108
        yield graphs.GraphPool, "_record", lambda pool, function, static, side: self._capture(function, static)
        yield graphs, "_used_bytes", lambda device: 0
        yield graphs._Captured, "replay", lambda captured: self._replay(captured)  # noqa: PLW0108
        stream = SimpleNamespace(synchronize=self._wait, wait_stream=lambda other: None)
        for name, value in {
            "Stream": lambda *_: stream,
            "Event": _Event,
            "current_stream": lambda *_: stream,
            "graph_pool_handle": lambda: (0, 0),
            "synchronize": lambda *_: self._wait(),
            "empty_cache": lambda: None,
            "get_device_properties": lambda *_: PROPERTIES,
            "get_device_capability": lambda *_: (PROPERTIES.major, PROPERTIES.minor),
        }.items():
            yield torch.cuda, name, value

    # -- operations ---------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # a question for the device
            return func(*args)
        kwargs = dict(kwargs or {})
        given = tree_leaves((args, kwargs))
        if not any(isinstance(x, FakeTensor) or (isinstance(x, torch.device) and x.type == "cuda") for x in given):
            return self._on_cpu(func, args, kwargs)
        if self._released and any(
            isinstance(x, FakeTensor) and x.untyped_storage()._cdata in self._released for x in given
        ):
            raise GraphError(f"memory is touched that was given back: {func}")
        hosts = [x for x in given if isinstance(x, Tensor) and not isinstance(x, FakeTensor) and x.dim()]
        if self._recording is not None and hosts:
            raise GraphError(f"a captured function reads a tensor of the CPU: {func} of {list(hosts[0].shape)}")
        if self._recording is None and not self.is_waiting_wrong:
            if func.overloadpacket in _NUMBERS:
                return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
            if func.overloadpacket is _aten.nonzero:  # at most
                return args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        self._check_reads(func, args)
        if func is _aten.copy_.default and not all(isinstance(x, FakeTensor) for x in args[:2]):
            self._check_copy(func, given, [x for x in args[:2] if not isinstance(x, FakeTensor)])
            if not isinstance(args[0], FakeTensor):
                return args[0]  # the host's numbers stay as they are
        if hosts:
            args, kwargs = tree_map(self._to_fake, (args, kwargs))
        made = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        is_download = any(x.device.type == "cpu" for x in outputs)
        if is_download or hosts:
            self._check_copy(func, given, hosts)
        if is_download:
            with _disable_current_modes():
                return tree_map(lambda x: torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x, made)
        if self._recording is not None:
            self._recording.add(str(func), given, outputs)
        if outputs and not func.is_view and func.overloadpacket not in _IS_NO_KERNEL:
            self._count(func.overloadpacket.__name__)
        return made

    def _count(self, name: str) -> None:
        (self.counts if self._recording is None else self._recording.kernels)[name] += 1

    def _to_fake(self, x: Any) -> Any:
        return self._fake.from_tensor(x) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x

    def _on_cpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._recording is not None and not (func is _aten.lift_fresh.default and args[0].dim() == 0):
            raise GraphError(f"a captured function computes on the CPU: {func}")
        pins, is_pinned_copy = kwargs.pop("pin_memory", False), func.overloadpacket in _PINS
        with _disable_current_modes():
            made = args[0].clone() if is_pinned_copy else func(*args, **kwargs)
            if pins:
                made.zero_()
        if pins or is_pinned_copy:
            self._pinned.add(id(made))
            weakref.finalize(made, self._pinned.discard, id(made))
        return made

    @property
    def _where(self) -> str:
        return "a captured function" if self._recording is not None else "a round"

    def _wait(self) -> None:
        if self._recording is not None or self.is_waiting_wrong:
            raise GraphError(f"{self._where} waits for all that the GPU has to do")

    def _check_reads(self, func: Any, args: Any) -> None:
        if func.overloadpacket in _READS_BACK:
            raise GraphError(f"{self._where} reads a number back: {func}")
        if func.overloadpacket in _INDEXES and any(
            isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        ):
            raise GraphError(f"{self._where} indexes with a mask: {func}")

    def _check_copy(self, func: Any, given: Sequence[Any], hosts: Sequence[Tensor]) -> None:
        if self._recording is not None:
            raise GraphError(f"a captured function copies between CPU and GPU: {func}")
        self.counts["copies between CPU and GPU"] += 1
        is_async = any(x is True for x in given) and all(id(x) in self._pinned for x in hosts) and bool(hosts)
        if self.is_waiting_wrong and not is_async:
            raise GraphError(f"a round waits for a copy between CPU and GPU: {func}")

    def _launch(self, program: Any, given: Sequence[Any], options: dict[str, Any]) -> None:
        name = getattr(program, "__name__", None) or program.fn.__name__
        options.pop("warmup", None)
        every = [*given, *options.values()]
        if hosts := [x for x in every if isinstance(x, Tensor) and not isinstance(x, FakeTensor)]:
            raise GraphError(f"{name} is given a tensor of the CPU: {list(hosts[0].shape)}")
        if self._recording is not None:
            self._recording.add(name, every, ())
        self._count(name)

    def _run_backward(self, loss: Tensor) -> None:
        """Give all parameters a gradient; PyTorch's engine needs a real GPU."""
        nodes, seen = [loss.grad_fn], set[Any]()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                node.variable.grad = torch.zeros_like(node.variable)
            nodes += [each for each, _ in node.next_functions]

    # -- graphs -------------------------------------------------------------------------------------------------

    @contextmanager
    def _recorded(self) -> Iterator[_Recording]:
        assert self._recording is None, "a capture within a capture"
        self._recording = _Recording()
        try:
            yield self._recording
        finally:
            self._recording = None

    def _capture(self, function: Callable[..., Sequence[Tensor]], static: tuple[Tensor, ...]) -> Any:
        with torch.inference_mode(), self._recorded() as recording:
            outputs = tuple(function(*static))
        return recording, outputs

    def _replay(self, captured: Any) -> None:
        with torch.inference_mode(), self._recorded() as now:
            captured.function(*captured.inputs)
        for step, (was, is_now) in enumerate(zip(captured.graph.steps, now.steps, strict=False)):
            if was != is_now:
                raise GraphError(f"operation {step} of a graph would not be what was recorded: {was}, now {is_now}")
        if len(captured.graph.steps) != len(now.steps):
            raise GraphError(f"a graph of {len(captured.graph.steps)} operations would now have {len(now.steps)}")


class _Memory:
    """Of a page pool, which may be given back."""

    def __init__(self, released: set[int], num_bytes: int, device: torch.device) -> None:
        self._released, self._bytes = released, torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def tensor(self) -> Tensor:
        return self._bytes

    def release(self) -> None:
        self._released.add(self._bytes.untyped_storage()._cdata)

    def restore(self) -> None:
        self._released.discard(self._bytes.untyped_storage()._cdata)

    close = release


class _Event:
    """A mark that the GPU has reached the second time somebody asks; to wait for it is what a round is read by."""

    def __init__(self, **_: object) -> None:
        self._num_asked = 0

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        self._num_asked += 1
        return self._num_asked > 1

    def elapsed_time(self, other: object) -> float:
        return 1.0
