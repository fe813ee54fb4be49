"""Opens files that can be read to their end, no pipes or devices, and names those that may not be read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tlt_hpc.errors import UserError


@contextmanager
def naming_denied() -> Iterator[None]:
    """Raise a ``UserError`` where a file or folder on the way may not be looked at; also a decorator."""
    try:
        yield
    except PermissionError as error:
        reason = f"{error.filename}: {error.strerror}"
        raise UserError(f"{reason}; ask its owner for access, or name another file or folder") from None


def open_regular(path: Path, limit: int | None = None) -> BinaryIO:
    """Open a regular file for reading; never waits.

    Args:
        limit: the most bytes that the file may have.

    Raises:
        UserError: it is not there, cannot be read, is no regular file, or is over the limit; begins with the path.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise UserError(f"{path}: {error.strerror if isinstance(error, OSError) else error}") from None
    found = os.fstat(opened)
    if reason := _refusal(found, limit):
        os.close(opened)
        raise UserError(f"{path}: {reason}")
    return os.fdopen(opened, "rb")


def _refusal(found: os.stat_result, limit: int | None) -> str:
    if stat.S_ISDIR(found.st_mode):
        return "Is a directory"
    if not stat.S_ISREG(found.st_mode):
        return "is a pipe, a socket or a device, not a regular file"
    if limit is not None and found.st_size > limit:
        return f"has {found.st_size} bytes, and at most {limit} are read"
    return ""
