"""Writes a rank's copies of tensors as one safetensors file.

The format's own library wants whole tensors; these are in chunks, and each write lets other threads run meanwhile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tlt_hpc.checkpoint.manifest import Stored
from tlt_hpc.cluster.watch.beat import BEAT

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


@dataclass(frozen=True)
class Held:
    """A copied piece of a tensor of ``shape``: its elements ``start`` to ``stop``, in views of host memory."""

    part: str
    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    dtype: torch.dtype
    views: Sequence[Tensor]

    @property
    def stored(self) -> Stored:
        return Stored(self.name, self.shape, self.start, self.stop)


def write_file(path: Path, pieces: Sequence[Held]) -> None:
    """Write a safetensors file and have it reach the disk.

    Raises:
        OSError: as the disk says.
    """
    # wider types first, as the library does: then all of them are aligned
    ordered = sorted(pieces, key=lambda piece: (-piece.dtype.itemsize, piece.stored.key))
    with path.open("wb") as file:
        file.write(_header(ordered))
        for piece in ordered:
            for view in piece.views:
                file.write(view.numpy().data)
                BEAT.written += 1
        file.flush()
        os.fsync(file.fileno())


def _header(pieces: Sequence[Held]) -> bytes:
    entries, offset = {}, 0
    for piece in pieces:
        stored, end = piece.stored, offset + sum(view.numel() for view in piece.views)
        shape = piece.shape if stored.is_whole else (piece.stop - piece.start,)
        entries[stored.key] = {"dtype": DTYPE_NAMES[piece.dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
