"""A program that prints which MPI library mpi4py loads; with ``--talk``, whether the ranks that run it form one world.

``python -m mpi4py -m tlt_hpc.mpi.probe --talk`` on every rank: rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> int:
    """Print the result; returns the exit status, 2 if the ranks were started wrongly."""
    from tlt_hpc.mpi.library import MPI
    from tlt_hpc.mpi.world import LaunchError, World

    if "--talk" not in arguments:
        print(json.dumps({"version": MPI.Get_library_version(), "files": loaded_mpi_libraries()}))
        return 0
    try:
        world = World.connect()
    except LaunchError as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    hosts = world.allgather(world.hostname)
    if world.rank == 0:
        print(json.dumps({"ranks": world.size, "hosts": sorted(set(hosts))}), flush=True)
    return 0


def loaded_mpi_libraries() -> list[str]:
    """The MPI libraries that this process has loaded."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    return sorted(path for path in paths if Path(path).name.startswith(("libmpi.", "libmpi_", "libmpich")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
