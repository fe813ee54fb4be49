"""What this machine has: GPUs, memory, file systems."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.cluster.topology import System

GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder if NVIDIA's driver has found GPUs."""
_SHARED = (
    "nfs", "lustre", "gpfs", "beegfs", "ceph", "panfs", "cifs", "smb", "fuse.", "afs", "9p", "orangefs", "wekafs"
)  # fmt: skip
"""Prefixes of file systems that several machines share; those on FUSE may be shared or not."""
NEEDS_COMPILER = "install c-compiler with conda, or load a module that has one (TLT_MODULES)"


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
    """The mount that a path is on."""
    point, kind = System().mount(path)
    return Mount(point or "/", kind or "unknown")


def nearest_folder(path: Path) -> Path:
    """The path if it is a folder, else the nearest folder above it."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def missing_for_triton(environment: Mapping[str, str]) -> str:
    """What this machine lacks for the small C program with which Triton launches each kernel; empty: nothing.

    Triton compiles it where the job runs: by ``CC``, gcc or clang, with Python's headers.
    """
    named = environment.get("CC")
    if not any(shutil.which(name) for name in ([named] if named else ["gcc", "clang"])):
        return f"no C compiler ({f'CC={named}' if named else 'gcc or clang'})"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    return "" if header.is_file() else f"no {header}"
