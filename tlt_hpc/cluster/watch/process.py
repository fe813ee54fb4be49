"""What the system tells of the processes of this host: whether one runs, is stopped or dead, and of what it died."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_PIDFD_OPEN = 434
"""Of Linux 5.3 and later, on all processors. Pythons built for older ones, as conda's are, have no name for it."""
_LOOK_SECONDS = 0.2

_WORDS = {"T": "its process is stopped", "t": "a debugger holds its process", "Z": "its process is dead",
          "D": "its process is stuck in the system, as on a file system that hangs"}  # fmt: skip
_UNANSWERED = "its process runs, but its interpreter does not: a call into a library that does not return"


@dataclass(frozen=True)
class Process:
    """One look at a process."""

    state: str
    """One letter, as ``ps`` has it."""
    exit_code: int
    """Of a dead one that nobody has waited for yet, as ``wait`` gives it; else 0."""


def look_at(pid: int) -> Process | None:
    """A process of this host; None where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return Process(fields[0], int(fields[49]))


def open_end(pid: int) -> int:
    """A descriptor that can be read, or is hung up, from the end of a process on.

    Raises:
        ProcessLookupError: it is gone already.
    """
    descriptor: int = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_OPEN, pid, 0)
    if descriptor >= 0:
        return descriptor
    number = ctypes.get_errno()
    if number == errno.ESRCH:
        raise ProcessLookupError(number, os.strerror(number))
    return _look_for_end(pid)  # an older kernel, or a container that lets no new call through


def _look_for_end(pid: int) -> int:
    """The same from a thread that looks five times a second."""
    ours, its = os.pipe2(os.O_CLOEXEC)

    def look() -> None:
        while (process := look_at(pid)) is not None and process.state not in ("Z", "X"):
            time.sleep(_LOOK_SECONDS)
        os.close(its)

    threading.Thread(target=look, name=f"end of {pid}", daemon=True).start()
    return ours


def describe(pid: int) -> str:
    """What keeps a process from showing a sign of life, in words."""
    process = look_at(pid)
    if process is None:
        return "its process is gone"
    return _WORDS.get(process.state, _UNANSWERED)


def cause_of(exit_code: int | None) -> str:
    """Of what a process died, in words; None: nobody knows."""
    if exit_code is None:
        return "has died (the launcher may say of what)"
    if number := exit_code & 0x7F:
        return f"was killed by signal {number} ({signal.Signals(number).name})"
    return f"ended with status {exit_code >> 8} and no word"


def count_memory_kills() -> int:
    """How often the system has killed a process of this host for want of memory, in a control group or at large."""
    lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
