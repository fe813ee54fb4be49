"""The state of a process of this host, as the system reports it: running, stopped or dead."""

from __future__ import annotations

from pathlib import Path

_WORDS = {"T": "its process is stopped", "t": "a debugger holds its process", "Z": "its process is dead",
          "D": "its process is stuck in the system, as on a file system that hangs"}  # fmt: skip
_UNANSWERED = "its process runs, but its interpreter does not: a call into a library that does not return"


def process_state(pid: int) -> str:
    """The state of a process of this host as one letter, as ``ps`` shows it; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def describe(pid: int) -> str:
    """Why a process does not move its heartbeat, in words."""
    state = process_state(pid)
    return _WORDS.get(state, _UNANSWERED) if state else "its process is gone"
