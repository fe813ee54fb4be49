"""What this machine has: GPUs, memory, file systems."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.plan.preflight.program import ask

GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder if NVIDIA's driver has found GPUs."""
_SECONDS = 30.0
_SHARED = (
    "nfs", "lustre", "gpfs", "beegfs", "ceph", "panfs", "cifs", "smb", "fuse.", "afs", "9p", "orangefs", "wekafs"
)  # fmt: skip
"""Prefixes of file systems that several machines share; those on FUSE may be shared or not."""


@dataclass(frozen=True)
class Mount:
    """The file system that a path is on."""

    point: str
    kind: str

    @property
    def is_shared(self) -> bool:
        return self.kind.startswith(_SHARED)

    @property
    def is_memory(self) -> bool:
        return self.kind in ("tmpfs", "ramfs")


def mount_of(path: Path) -> Mount:
    """The mount that an existing path is on."""
    answer = ask(["df", "--output=fstype,target", str(path)], _SECONDS)
    words = answer.last_line.split(maxsplit=1)
    return Mount(words[1], words[0]) if answer.status == 0 and len(words) == 2 else Mount("/", "unknown")


def memory_bytes() -> int:
    """This machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def nearest_folder(path: Path) -> Path:
    """The path if it is a folder, else the nearest folder above it."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
