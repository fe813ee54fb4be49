"""Captured calls: a function recorded once per key into a CUDA graph and replayed. Knows no model and no batch.

All graphs of a pool share the memory of their intermediates, so only one of them may run at a time.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

NUM_WARM_UPS = 2
"""Runs before a capture: libraries allocate and Triton compiles on the first, caches settle on the second."""

Function = Callable[..., Sequence[Tensor]]

_CAN_CHECK = "check_input_liveness" in inspect.signature(torch.cuda.graph).parameters


@dataclass(frozen=True)
class _Captured:
    function: Function
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    graph: torch.cuda.CUDAGraph | None  # None on a CPU, where a replay calls the function
    num_bytes: int

    def replay(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        with torch.inference_mode():
            for kept, fresh in zip(self.outputs, self.function(*self.inputs), strict=True):
                kept.copy_(fresh)


class GraphPool:
    """Captures functions by key and replays them on static inputs and outputs; eager with the same buffers on a CPU.

    A captured function reads and writes tensors only: no synchronisation, no shape that depends on data. It runs
    ``NUM_WARM_UPS`` times before it is recorded, so it must not mind being repeated on the same inputs. Other tensors
    that it touches (weights, caches) keep their addresses for as long as the pool lives. Capture the largest key
    first: the smaller ones then fit into its memory. Outputs are kept per key, so return tokens and counts rather than
    logits. All runs in inference mode.
    """

    checks_inputs: ClassVar[bool] = False
    """Whether a replay raises if a tensor that torch's own operators read in the graph has been freed since.

    For checks: a replay then walks over these tensors in Python, which takes up to milliseconds. Needs torch 2.13, and
    does not see what Triton programs read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._captured: dict[Hashable, _Captured] = {}
        self._memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        # one stream for all captures: cuBLAS keeps a workspace per stream
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._captured)

    def capture(
        self, key: Hashable, function: Function, inputs: Sequence[Tensor], state: Sequence[Tensor] = ()
    ) -> None:
        """Record ``function`` under ``key`` for inputs of these shapes and dtypes; the inputs themselves are copied.

        ``state`` are the tensors that the function counts on in its next run: the warm-ups leave them as they were.
        """
        assert key not in self._captured, f"{key!r} is captured already"
        before = _used_bytes(self.device)
        kept = [x.clone() for x in state]
        with torch.inference_mode(False):  # so that a caller may fill them in any mode
            static = tuple(x.detach().clone(memory_format=torch.contiguous_format) for x in inputs)
        if self._side is None:
            graph, outputs = None, self._warm_up(function, static)
        else:
            graph, outputs = self._record(function, static, self._side)
        with torch.inference_mode():
            for x, value in zip(state, kept, strict=True):
                x.copy_(value)
        self._captured[key] = _Captured(function, static, outputs, graph, _used_bytes(self.device) - before)

    def replay(self, key: Hashable, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the function of ``key`` on copies of ``inputs``, of the shapes that it was captured for.

        The outputs hold until the next replay of any key: another graph's intermediates may share their memory.
        """
        captured = self._captured[key]
        for static, given in zip(captured.inputs, inputs, strict=True):
            assert static.shape == given.shape and static.dtype == given.dtype, (
                f"{key!r} was captured for {list(static.shape)} {static.dtype}, not {list(given.shape)} {given.dtype}"
            )
            static.copy_(given, non_blocking=True)
        captured.replay()
        return captured.outputs

    def capture_once_and_replay(
        self, key: Hashable, function: Function, inputs: Sequence[Tensor], state: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """Replay ``key``, captured on its first use; inputs and outputs are of the shapes of that first call."""
        if key not in self._captured:
            self.capture(key, function, inputs, state)
        return self.replay(key, inputs)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory that the captures took, graph nodes included; another process disturbs it."""
        return sum(captured.num_bytes for captured in self._captured.values())

    def _warm_up(self, function: Function, static: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Warm up and return the last outputs, apart from what the function may keep or alias."""
        outputs: Sequence[Tensor] = ()
        with torch.inference_mode():
            for _ in range(NUM_WARM_UPS):
                outputs = function(*static)
        return tuple(x.clone() for x in outputs)

    def _record(
        self, function: Function, static: tuple[Tensor, ...], side: torch.cuda.Stream
    ) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.inference_mode(), torch.cuda.stream(side):
            for _ in range(NUM_WARM_UPS):
                function(*static)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that drives MPI may call CUDA meanwhile
        checked = {"check_input_liveness": True} if self.checks_inputs and _CAN_CHECK else {}
        capture = torch.cuda.graph(graph, pool=self._memory, stream=side, capture_error_mode="thread_local", **checked)
        with torch.inference_mode(), _without_collection(), capture:
            outputs = tuple(function(*static))
        return graph, outputs


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection meanwhile: one that destroys a graph ends the capture that is under way.

    For one capture at a time: the first to leave turns it on again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _used_bytes(device: torch.device) -> int:
    """Bytes in use on the device, once the allocator has handed back what nobody holds."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free
