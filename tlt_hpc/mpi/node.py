"""The ranks of one node: what the first of them reads is broadcast to the others.

So a shared file system serves one reader per node instead of all its ranks, which sleep meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.mpi.library import MPI
from tlt_hpc.mpi.progress import broadcast_bytes, broadcast_item, run_once

T = TypeVar("T")

_NAME = "broadcast within the node"


class NodeGroup:
    """The ranks of one node; this rank is number ``rank`` of ``size``. All methods are collective over them."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that reads."""
        return self.rank == 0

    def once(self, read: Callable[[], T]) -> T:
        """Call ``read`` on the first rank alone, and return its (picklable) result on all.

        Raises:
            UserError: on all ranks, as ``run_once``.
        """
        return run_once(self.is_first, read, partial(broadcast_item, self._comm, root=0, name=_NAME, scope="node"))

    def broadcast(self, values: NDArray[np.uint8]) -> None:
        """Write the first rank's bytes [N] into the others' of the same size."""
        broadcast_bytes(self._comm, values, 0, _NAME, scope="node")
