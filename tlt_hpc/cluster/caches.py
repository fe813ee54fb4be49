"""The folder for caches on each node's own disk: made by the ranks, since a batch script runs on one node alone."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from tlt_hpc.cluster.topology import System
from tlt_hpc.config import UserError

FOLDER = "TLT_NODE_CACHE"
"""Set by ``sbatch/env.sh``, which also points the caches of Triton, torch and Hugging Face below it. Its name ends with
the job and how often it was restarted."""
_GB = 10**9
_made = list[Path]()
"""The folder, on the rank that made it."""


def make_node_cache(environment: Mapping[str, str]) -> None:
    """Make the folder on this node, for this user alone, if the batch script asked for one.

    The rank that made it removes it when it ends, and before that those of the job's earlier starts, which were killed.

    Raises:
        UserError: it cannot be made, or belongs to another user.
    """
    if FOLDER not in environment:
        return
    folder, is_first = Path(environment[FOLDER]), True
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            is_first = False
        if not is_own(folder):  # its owner could replace the programs that are compiled there
            raise OSError("it is not this user's own folder")
    except OSError as error:
        raise UserError(
            f"cannot keep caches in {folder} on {socket.gethostname()}: {error.strerror or error}; name another disk "
            "that every node has, with TLT_LOCAL_DISK in sbatch/env.sh"
        ) from None
    if is_first:
        _made.append(folder)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        job, _, restarts = folder.name.rpartition("-")
        for earlier in range(int(restarts) if restarts.isdecimal() else 0):
            if is_own(left := folder.with_name(f"{job}-{earlier}")):
                shutil.rmtree(left, ignore_errors=True)


def remove_node_cache() -> None:
    """Remove the folder if this rank made it; for an end without Python's exit functions."""
    for folder in _made:
        shutil.rmtree(folder, ignore_errors=True)


def is_own(folder: Path) -> bool:
    """Return True if the path is a folder that this user owns, and no link to one. Reads the disk."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode)


def memory_cache_warning(environment: Mapping[str, str]) -> str:
    """Return a warning if the caches of this node are in its memory, as where it has no disk; else an empty text."""
    folder = Path(environment.get(FOLDER, ""))
    mount = System.from_environment(environment).find_mount(folder)
    if FOLDER not in environment or not mount.is_memory:
        return ""
    found = os.statvfs(folder)
    free = f", {found.f_bavail * found.f_frsize / _GB:,.0f} GB free" if found.f_blocks else ""  # ramfs has no limit
    return (
        f"caches in {folder} take memory: {mount.point} on {socket.gethostname()} is {mount.kind}{free}; where "
        "nodes have a disk, name it with TLT_LOCAL_DISK"
    )
