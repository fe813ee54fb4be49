"""The ranks of one node: what the first of them reads is broadcast to the others.

So a shared file system serves one reader per node instead of all its ranks, which sleep meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.config import UserError
from tlt_hpc.mpi.library import MPI
from tlt_hpc.mpi.progress import broadcast_item, wait

T = TypeVar("T")

BLOCK_BYTES = 2**26
"""Size of one broadcast, so that the MPI library's own buffers stay small."""


@dataclass(frozen=True)
class _Failure:
    """The text of a ValueError on the first rank."""

    text: str


class NodeGroup:
    """The ranks of one node; this rank is number ``rank`` of ``size``. All methods are collective over them.

    Args:
        comm: a communicator of these ranks, in order of their ranks in the world; None for a rank on its own.
    """

    def __init__(self, comm: MPI.Comm | None) -> None:
        self._comm = comm
        self.rank: int = comm.rank if comm is not None else 0
        self.size: int = comm.size if comm is not None else 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that reads."""
        return self.rank == 0

    def once(self, read: Callable[[], T]) -> T:
        """Call ``read`` on the first rank alone, and return its (picklable) result on all.

        Raises:
            ValueError: on all ranks, if ``read`` raises one; on the others it is a UserError of the same text.
        """
        if self._comm is None or self.size == 1:
            return read()
        found: T | _Failure = _Failure("")
        try:
            if self.is_first:
                found = read()
        except ValueError as error:
            self._share(_Failure(str(error)))
            raise
        shared = self._share(found)
        if isinstance(shared, _Failure):
            raise UserError(shared.text)
        return shared

    def broadcast(self, values: NDArray[np.uint8]) -> None:
        """Write the first rank's bytes [N] into the others' of the same size, a block at a time."""
        if self._comm is None or self.size == 1:
            return
        for start in range(0, values.size, BLOCK_BYTES):
            wait(self._comm.Ibcast(values[start : start + BLOCK_BYTES], 0), "broadcast within the node", scope="node")

    def _share(self, item: T) -> T:
        assert self._comm is not None
        shared: T = broadcast_item(self._comm, item, 0, BLOCK_BYTES, "broadcast within the node", scope="node")
        return shared


ALONE = NodeGroup(None)
"""The group of a rank that reads for itself."""
