"""What this machine has: GPUs and their driver, memory, file systems."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.plan.preflight.program import NoAnswer, ask

_SECONDS = 30.0
"""nvidia-smi without a persistence daemon takes seconds on a node of eight GPUs."""
_SHARED = (
    "nfs", "lustre", "gpfs", "beegfs", "ceph", "panfs", "cifs", "smb", "fuse.", "afs", "9p", "orangefs", "wekafs"
)  # fmt: skip
"""Prefixes of file systems that several machines share; those on FUSE may be shared or not."""


@dataclass(frozen=True)
class NvidiaDriver:
    """What nvidia-smi reports; nothing if there is no driver."""

    gpus: tuple[str, ...] = ()
    """Names."""
    memory_bytes: tuple[int, ...] = ()
    """Of each GPU that reports it."""
    version: str = ""
    cuda: str = ""
    """The newest CUDA version that the driver supports, such as ``12.4``."""
    error: str = ""
    """If nvidia-smi does not answer, as on a node with a broken GPU."""


def read_driver() -> NvidiaDriver:
    """Ask nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return NvidiaDriver()
    query = "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"
    try:
        listed, shown = ask(["nvidia-smi", *query], _SECONDS), ask(["nvidia-smi"], _SECONDS)
    except NoAnswer as error:
        return NvidiaDriver(error=str(error))
    rows = [line.split(", ") for line in listed.out.splitlines()] if listed.status == 0 else []
    if not rows:
        return NvidiaDriver()
    cuda = re.search(r"CUDA(?: UMD)? Version\s*:\s*(\d+\.\d+)", shown.out)
    return NvidiaDriver(
        gpus=tuple(name for name, _, _ in rows),
        memory_bytes=tuple(int(memory) * 2**20 for _, memory, _ in rows if memory.isdigit()),
        version=rows[0][2],
        cuda=cuda[1] if cuda else "",
    )


@dataclass(frozen=True)
class Mount:
    """The file system that a path is on."""

    point: str
    kind: str
    source: str

    @property
    def is_shared(self) -> bool:
        return self.kind.startswith(_SHARED)

    @property
    def is_memory(self) -> bool:
        return self.kind in ("tmpfs", "ramfs")


def mount_of(path: Path) -> Mount:
    """The mount that an existing path is on."""
    answer = ask(["df", "--output=fstype,source,target", str(path)], _SECONDS)
    words = answer.last_line.split(maxsplit=2)
    return Mount(words[2], words[0], words[1]) if answer.status == 0 and len(words) == 3 else Mount("/", "unknown", "")


def memory_bytes() -> int:
    """This machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def nearest_folder(path: Path) -> Path:
    """The path if it is a folder, else the nearest folder above it."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def size(num_bytes: float) -> str:
    """Bytes in words."""
    value, unit = (num_bytes / 1e9, "GB") if num_bytes >= 1e9 else (num_bytes / 1e6, "MB")
    return f"{value:,.1f} {unit}"
