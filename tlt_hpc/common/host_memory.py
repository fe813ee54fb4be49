"""The memory of this process: how much of the host's it may still take, and when Python's garbage collector runs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that are left of the machine's memory and of its cgroups' limits, with caches that can be freed.

    Unlimited on systems other than Linux, which have no /proc/meminfo.
    """
    if not (root / "proc/meminfo").is_file():
        return sys.maxsize
    lines = (root / "proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([machine, *_cgroup_bytes_left(root)])


def _cgroup_bytes_left(root: Path) -> Iterator[int]:
    """Yield the bytes left below each limit on this process's cgroup and those above it, of version 1 or 2."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        folder = top / path.lstrip("/")
        limit_file, usage_file, cached = _V1 if controllers else _V2
        for group in (folder, *folder.parents):
            if group.is_relative_to(top) and (group / limit_file).is_file():
                limit = (group / limit_file).read_text().strip()
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                if limit != "max":
                    yield int(limit) - int((group / usage_file).read_text()) + int(stat[cached])


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Inside, nothing is collected, and what is imported is excluded from all later collections.

    Almost all that an import makes stays. Collections would take a fifth of the import's time, and each later one a
    third of a second: in the middle of a rollout all ranks would wait for it. Use it before there is a model: an engine
    that is reachable from an excluded object would never be collected. Not to be nested.
    """
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if len(sys.modules) > before:
            gc.freeze()
