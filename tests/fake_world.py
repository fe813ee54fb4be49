"""A world of one rank without MPI, for tests of code that takes a ``World``."""

from __future__ import annotations

from typing import Any

from tlt_hpc.mpi.world import World


class OneRank:
    """Collectives of a single rank: they return at once."""

    rank, size, hostname = 0, 1, "here"
    all_or_none, once = World.all_or_none, World.once

    def allgather(self, item: Any) -> list[Any]:
        return [item]

    def broadcast(self, item: Any) -> Any:
        return item
