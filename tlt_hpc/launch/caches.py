"""The folder for caches on each node's own disk: made by the ranks, since a batch script runs on one node alone."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from tlt_hpc.config import UserError

FOLDER = "TLT_NODE_CACHE"
"""Set by ``sbatch/env.sh``, which also points the caches of Triton, torch and Hugging Face below it."""


def make_node_cache(environment: Mapping[str, str]) -> None:
    """Make the folder on this node, for this user alone, where the batch script asked for one.

    The rank that made it removes it when it ends; one that was there before is left.

    Raises:
        UserError: it cannot be made, or is another's.
    """
    if FOLDER not in environment:
        return
    folder = Path(environment[FOLDER])
    try:
        if is_made(folder):
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        found = folder.lstat()
    except OSError as error:
        raise _refusal(folder, error.strerror or str(error)) from None
    # whoever made it first in a folder that is open to all could swap the programs that are compiled there
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        raise _refusal(folder, "it is not this user's own folder")


def is_made(folder: Path) -> bool:
    """Make it; False where it was there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return False
    return True


def _refusal(folder: Path, why: str) -> UserError:
    return UserError(
        f"cannot keep caches in {folder} on {socket.gethostname()}: {why}; name another disk that every node has, "
        "with TLT_LOCAL_DISK in sbatch/env.sh"
    )
