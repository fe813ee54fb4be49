"""What the system knows about a process of this host: whether it runs, is stopped or dead, and of what it died."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

_WORDS = {"T": "its process is stopped", "t": "a debugger holds its process", "Z": "its process is dead",
          "D": "its process is stuck in the system, as on a file system that hangs"}  # fmt: skip
_UNANSWERED = "its process runs, but its interpreter does not: a call into a library that does not return"


@dataclass(frozen=True)
class Process:
    """The state of a process."""

    state: str
    """One letter, as ``ps`` has it."""
    exit_code: int
    """Of a dead one that its parent has not waited for yet, as ``wait`` gives it; else 0."""


def look_at(pid: int) -> Process | None:
    """A process of this host; None where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return Process(fields[0], int(fields[49]))


def describe(pid: int) -> str:
    """Why a process does not move its heartbeat, in words."""
    process = look_at(pid)
    if process is None:
        return "its process is gone"
    return _WORDS.get(process.state, _UNANSWERED)


def cause_of(exit_code: int | None) -> str:
    """Of what a process died, in words; None: unknown."""
    if exit_code is None:
        return "has died (the launcher may say of what)"
    if number := exit_code & 0x7F:
        return f"was killed by signal {number} ({signal.Signals(number).name})"
    return f"ended with status {exit_code >> 8} and no word"


def count_memory_kills() -> int:
    """How often the system has killed a process of this host for want of memory, in a control group or at large."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:  # hidden, as in some containers
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
