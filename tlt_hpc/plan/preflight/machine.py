"""What this machine has: GPUs and their driver, memory, mounts."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tlt_hpc.plan.preflight.program import NoAnswer, ProgramOutput, ask

MEBIBYTE = 2**20
_SECONDS = 30.0
"""nvidia-smi without a persistence daemon takes seconds on a node of eight GPUs."""
_MOUNTS = Path("/proc/self/mountinfo")
NETWORK = (
    "nfs", "lustre", "gpfs", "beegfs", "ceph", "panfs", "cifs", "smb", "fuse.", "afs", "9p", "orangefs", "wekafs"
)  # fmt: skip
"""Prefixes of file systems that several machines share; those on FUSE may be shared or not."""
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class DriverGpu:
    """One GPU as the driver sees it."""

    name: str
    num_bytes: int | None
    """None: the driver does not report it."""
    driver: str


@dataclass(frozen=True)
class Mount:
    """The file system that a path is on."""

    point: str
    kind: str
    source: str

    @property
    def is_shared(self) -> bool:
        return self.kind.startswith(NETWORK)

    @property
    def is_memory(self) -> bool:
        return self.kind in IN_MEMORY


def read_gpus() -> tuple[DriverGpu, ...]:
    """The GPUs of this machine; empty if there is no driver, or it does not answer."""
    query = "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"
    rows = (line.split(", ") for line in _driver_says(*query).splitlines())
    return tuple(
        DriverGpu(name, int(memory) * MEBIBYTE if memory.isdigit() else None, driver) for name, memory, driver in rows
    )


def driver_cuda() -> str:
    """The newest CUDA version that this machine's driver supports, such as ``12.4``; empty if there is none."""
    found = re.search(r"CUDA(?: UMD)? Version\s*:\s*(\d+\.\d+)", _driver_says())
    return found[1] if found else ""


def check_driver() -> None:
    """Refuse a driver that does not answer, as on a node with a broken GPU.

    Raises:
        NoAnswer: with the command to try.
    """
    if isinstance(answer := _ask_driver(), NoAnswer):
        raise answer


def _driver_says(*arguments: str) -> str:
    answer = _ask_driver(*arguments)
    return answer.out if isinstance(answer, ProgramOutput) and answer.status == 0 else ""


@cache
def _ask_driver(*arguments: str) -> ProgramOutput | NoAnswer | None:
    """What nvidia-smi answers, or the error if it does not; None if there is no nvidia-smi. Called once."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        return ask(["nvidia-smi", *arguments], _SECONDS)
    except NoAnswer as error:
        return error


def forget() -> None:
    """Forget the driver's answers."""
    _ask_driver.cache_clear()


def memory_bytes() -> int:
    """This machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def mount_of(path: Path) -> Mount:
    """The mount that an existing path is on: the last one at the nearest mount point above it."""
    resolved, best = path.resolve(), Mount("/", "unknown", "")
    for line in _MOUNTS.read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        point = _plain(before.split()[4])
        if resolved.is_relative_to(point) and len(point) >= len(best.point):
            kind, source = after.split()[:2]
            best = Mount(point, kind, _plain(source))
    return best


def nearest_folder(path: Path) -> Path:
    """The path if it is a folder, else the nearest folder above it."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def size(num_bytes: float) -> str:
    """Bytes in words."""
    value, unit = (num_bytes / 1e9, "GB") if num_bytes >= 1e9 else (num_bytes / 1e6, "MB")
    return f"{value:,.1f} {unit}"


def _plain(text: str) -> str:
    """A field of mountinfo with its octal escapes decoded."""
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), text)
