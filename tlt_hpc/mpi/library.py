"""The import of mpi4py: it does not initialise MPI on import, and finalises it at exit.

``World.connect`` initialises MPI with the thread level that it needs.
"""

from __future__ import annotations

from pathlib import Path

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = True

from mpi4py import MPI  # noqa: E402  (the settings above are read when the library loads)

__all__ = ["MPI", "remove_shared_memory_names"]


def remove_shared_memory_names(maps: Path = Path("/proc/self/maps")) -> None:
    """Remove the names of MPICH's files in /dev/shm once all ranks of the node have opened them; for one of them.

    MPICH removes them when MPI is finalised, so each rank that is killed would leave megabytes behind.
    """
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.is_file() else []
    for path in {line.split(maxsplit=5)[5] for line in lines if " /dev/shm/mpich_shm_" in line}:
        Path(path).unlink(missing_ok=True)
