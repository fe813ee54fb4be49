"""The folder for caches on each node's own disk: made by the ranks, since a batch script runs on one node alone."""

from __future__ import annotations

import atexit
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
MARK = ".made-on-"
"""A file in it, followed by host and PID namespace: processes of another node or container cannot be seen from here."""
_NAME = re.compile(r"(tlt-.+-)\d+-\d+")
"""User, job, and how often it was restarted."""


def make_node_cache(environment: Mapping[str, str]) -> None:
    """Make the folder on this node, for this user alone, if the batch script asked for one.

    The rank that made it removes it when it ends, and before that those that killed jobs of this user have left.

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
        (folder / f"{MARK}{_seen_from()}").touch(0o600)
    except OSError as error:
        raise UserError(
            f"cannot keep caches in {folder} on {socket.gethostname()}: {error.strerror or error}; name another disk "
            "that every node has, with TLT_LOCAL_DISK in sbatch/env.sh"
        ) from None
    if is_first:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for left in left_behind(folder):
            shutil.rmtree(left, ignore_errors=True)


def is_own(folder: Path) -> bool:
    """Whether it is a folder, no link to one, and this user's."""
    try:
        found = folder.lstat()
    except FileNotFoundError:  # removed meanwhile
        return False
    return found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode)


def left_behind(folder: Path) -> Iterator[Path]:
    """This user's folders beside it that were made on this host, and that no process of this host has as its own."""
    named = _NAME.fullmatch(folder.name)
    others = sorted(folder.parent.glob(f"{named[1]}*")) if named is not None else []
    used = folders_in_use() if others else set()
    for other in others:
        is_idle = other != folder and _NAME.fullmatch(other.name) and os.fsencode(other) not in used
        hosts = [path.name.removeprefix(MARK) for path in other.glob(f"{MARK}*")]
        if is_idle and hosts == [_seen_from()] and is_own(other):
            yield other


def _seen_from() -> str:
    """Host and PID namespace of this process."""
    return f"{socket.gethostname()}-{Path('/proc/self/ns/pid').stat().st_ino}"


def folders_in_use() -> set[bytes]:
    """The cache folders of this user's processes on this host."""
    found = set[bytes]()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's, or it has ended
            found |= {value for value in path.read_bytes().split(b"\0") if value.startswith(FOLDER.encode() + b"=")}
    return {value.partition(b"=")[2] for value in found}
