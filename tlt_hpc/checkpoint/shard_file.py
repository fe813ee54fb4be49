"""Writes a rank's copies of tensors as one safetensors file. Knows no checkpoint.

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
class Copied:
    """A tensor of the file, its bytes in views of host memory."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    views: Sequence[Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(view.numel() for view in self.views)


def write_file(path: Path, tensors: Sequence[Copied]) -> None:
    """Write a safetensors file and have it reach the disk.

    Raises:
        OSError: as the disk says.
    """
    # wider types first, as the library does: then all of them are aligned
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.key))
    with path.open("wb") as file:
        file.write(_header(ordered))
        for tensor in ordered:
            for view in tensor.views:
                file.write(view.numpy().data)
                BEAT.written += 1
        file.flush()
        os.fsync(file.fileno())


def _header(tensors: Sequence[Copied]) -> bytes:
    entries, offset = {}, 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        entries[tensor.key] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
