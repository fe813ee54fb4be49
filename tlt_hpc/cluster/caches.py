"""The folder for caches on each node's own disk: made by the ranks, since a batch script runs on one node alone.

Every rank of the node holds a lock on it, which the system takes back however the rank ends. So the next job that comes
to the node knows which folders killed ranks have left, and removes them.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import shutil
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from tlt_hpc.config import UserError

FOLDER = "TLT_NODE_CACHE"
"""Set by ``sbatch/env.sh``, which also points the caches of Triton, torch and Hugging Face below it."""
LOCK = ".in-use-"
"""In it, with the host behind: by this file a folder is known as one of these, and as one that somebody works in."""
_NAME = re.compile(r"(tlt-.+-)\d+-\d+")
"""Of the user, the job and its start."""


def make_node_cache(environment: Mapping[str, str]) -> None:
    """Make the folder on this node, for this user alone, where the batch script asked for one.

    The rank that made it removes it when it ends, and first those that ranks of this user have left on the node; one
    that was there before is left.

    Raises:
        UserError: it cannot be made, or is another's.
    """
    if FOLDER not in environment:
        return
    folder = Path(environment[FOLDER])
    try:
        if take(folder):
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            for left in left_behind(folder):
                shutil.rmtree(left, ignore_errors=True)
    except OSError as error:
        raise _refusal(folder, error.strerror or str(error)) from None


def take(folder: Path) -> bool:
    """Make it, or find it made, and lock it for as long as this process lives, beside others; whether this made it.

    Raises:
        UserError: it is another's.
        OSError: it cannot be made.
    """
    while True:
        made = is_made(folder)
        try:
            # whoever made it first in a folder that is open to all could swap the programs that are compiled there
            if not is_own(folder):
                raise _refusal(folder, "it is not this user's own folder")
            path = folder / f"{LOCK}{socket.gethostname()}"
            lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)  # stays open
            with suppress(OSError):  # a disk without locks: nobody can take it for left behind
                fcntl.flock(lock, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(lock), path.stat()):
                return made
            os.close(lock)
        except FileNotFoundError:  # taken for left behind before it was locked
            continue


def is_made(folder: Path) -> bool:
    """Make it; False where it was there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return False
    return True


def is_own(folder: Path) -> bool:
    """Whether it is a folder, no link to one, and this user's."""
    found = folder.lstat()
    return found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode)


def left_behind(folder: Path) -> Iterator[Path]:
    """This user's folders beside it that nobody holds any more; each is locked until the next is asked for."""
    named = _NAME.fullmatch(folder.name)
    if named is None:
        return
    for other in sorted(folder.parent.glob(f"{named[1]}*")):
        if other == folder or not _NAME.fullmatch(other.name):
            continue
        try:
            locks = list(other.glob(f"{LOCK}*")) if is_own(other) else []
            if [path.name for path in locks] != [f"{LOCK}{socket.gethostname()}"]:
                continue  # another's, not locked yet, or on a disk that nodes share
            lock = os.open(locks[0], os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # gone meanwhile
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield other
        except OSError:  # held, or a disk without locks
            continue
        finally:
            os.close(lock)


def _refusal(folder: Path, why: str) -> UserError:
    return UserError(
        f"cannot keep caches in {folder} on {socket.gethostname()}: {why}; name another disk that every node has, "
        "with TLT_LOCAL_DISK in sbatch/env.sh"
    )
