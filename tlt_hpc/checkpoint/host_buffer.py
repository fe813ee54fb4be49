"""Host memory into which a rank copies its share of a checkpoint; kept, and written to again, from save to save.

Memory is in chunks of 16 MiB, so that one budget fits any mixture of tensors, and
none is lost where torch rounds pinned memory up to powers of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_hpc.checkpoint.manifest import CheckpointError

CHUNK_BYTES = 2**24


class HostBuffer:
    """Copies of tensors, bytes in chunks; the memory grows to the most that was ever asked for, and stays."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._used = 0
        """Bytes in use; those of the first chunks."""
        self._copied: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that it occupies."""
        return len(self._chunks) * CHUNK_BYTES

    def reserve(self, num_bytes: int, pinned: bool) -> None:
        """Have memory for copies of so many bytes, already in place: the first save is as fast as the next.

        Raises:
            CheckpointError: the host has no room.
        """
        while self.num_bytes < num_bytes:
            self._grow(pinned)

    def clear(self) -> None:
        """Forget what was copied, and keep the memory."""
        self._used = 0

    def take(self, values: Tensor) -> list[Tensor]:
        """Copy a flat tensor; its bytes, in order, as views of the chunks, to be read after ``wait``.

        Raises:
            CheckpointError: the host has no room.
        """
        source = values.detach().view(torch.uint8)
        size, done, views = source.numel(), 0, []
        while done < size:
            if self._used == self.num_bytes:
                self._grow(values.is_cuda)
            offset = self._used % CHUNK_BYTES
            count = min(CHUNK_BYTES - offset, size - done)
            room = self._chunks[self._used // CHUNK_BYTES].narrow(0, offset, count)
            room.copy_(source.narrow(0, done, count), non_blocking=True)
            views.append(room)
            self._used, done = self._used + count, done + count
        if values.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return views

    def wait(self) -> None:
        """Wait until the last copy is done; at once where none was from a GPU."""
        if self._copied is not None:
            self._copied.synchronize()

    def _grow(self, pinned: bool) -> None:
        try:
            # zeros written, not asked for: a page that was never touched is found at the first write, in the step
            self._chunks.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned).fill_(0))
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(
                f"no room in host memory for a copy of this rank's state beyond {self.num_bytes / 1e9:.1f} GB "
                f"({str(error).splitlines()[0]})"
            ) from None
