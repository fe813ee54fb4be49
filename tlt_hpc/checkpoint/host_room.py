"""How much host memory is left to the processes of a node, as Linux tells it, and whether copies fit there."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tlt_hpc.checkpoint.manifest import CheckpointError

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World

_ROOT = Path("/")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def check_room(world: World, num_bytes: int) -> None:
    """Refuse what the ranks of a node together have no memory for; collective.

    Raises:
        CheckpointError: on all ranks.
    """
    wants = world.allgather((world.node, world.hostname, num_bytes, available_bytes()))
    wanted_on: Counter[int] = Counter()
    for node, _, count, _ in wants:
        wanted_on[node] += count
    for node, hostname, _, available in wants:
        wanted = wanted_on[node]
        if wanted > available:
            raise CheckpointError(
                f"{hostname} has {available / 1e9:.1f} GB of host memory left, and to save a checkpoint its ranks copy "
                f"{wanted / 1e9:.1f} GB of training state there; ask for more memory a node, or for more nodes"
            )


def available_bytes(root: Path = _ROOT) -> int:
    """Bytes that processes may still take before the kernel must kill one: of the machine, and of the job's cgroup.

    Without limit where the system is not Linux and tells nothing.
    """
    if not (root / "proc/meminfo").is_file():
        return sys.maxsize
    lines = (root / "proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([machine, *_cgroup_rooms(root)])


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """What is left in each cgroup above this process that has a limit; Slurm sets one where it holds jobs to theirs."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(top):
                yield from _room_of(group, _V1 if controllers else _V2)


def _room_of(group: Path, names: tuple[str, str, str]) -> Iterator[int]:
    limit_file, usage_file, cached = names
    if not (group / limit_file).is_file() or (limit := (group / limit_file).read_text().strip()) == "max":
        return
    lines = (group / "memory.stat").read_text().splitlines()
    reclaimable = next(int(line.split()[1]) for line in lines if line.split()[0] == cached)
    yield int(limit) - int((group / usage_file).read_text()) + reclaimable
