"""Ranks that share what one of them has read or computed; the ranks of a node are such a group.

A shared file system then serves one reader per node instead of all its ranks, which sleep meanwhile.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import told
from tlt_hpc.mpi.library import MPI
from tlt_hpc.mpi.progress import wait

T = TypeVar("T")

BLOCK_BYTES = 2**26
"""Size of one broadcast, so that the MPI library's own buffers stay small."""


class NodeGroup:
    """A group of ranks, in which this one is number ``rank`` of ``size``; all methods are collective.

    Args:
        comm: a communicator of these ranks alone.
        scope: their name for the watch.
    """

    def __init__(self, comm: MPI.Comm, scope: str = "node") -> None:
        self._comm = comm
        self._scope = scope
        self.rank: int = comm.rank
        self.size: int = comm.size

    def broadcast(self, item: T, root: int = 0) -> T:
        """The ``item`` (picklable, of any size) of rank ``root``; what the others give is ignored.

        Raises:
            ConnectionResetError: as ``unpickle``.
        """
        payload = bytearray(pickle.dumps(item, pickle.HIGHEST_PROTOCOL)) if self.rank == root else bytearray()
        length = np.array([len(payload)], np.int64)
        wait(self._comm.Ibcast(length, root), "broadcast", self._scope)
        payload = payload or bytearray(int(length[0]))
        self.broadcast_bytes(np.frombuffer(payload, np.uint8), root)
        return item if self.rank == root else unpickle(payload)  # type: ignore[no-any-return]

    def broadcast_bytes(self, values: NDArray[np.uint8], root: int = 0) -> None:
        """Write rank ``root``'s bytes [N] into the others' of the same size."""
        for start in range(0, values.size, BLOCK_BYTES):
            wait(self._comm.Ibcast(values[start : start + BLOCK_BYTES], root), "broadcast", self._scope)

    def once(self, work: Callable[[], T]) -> T:
        """The result (picklable) of ``work``, run on the first rank and given to all; its failure too.

        Raises:
            UserError: on all ranks, if the first raised a UserError (see ``to_send``) or an OSError; if it raised
                another ValueError, on the others.
        """
        outcome: tuple[UserError | None, Any] = None, None
        if self.rank == 0:
            try:
                outcome = None, work()
            except (ValueError, OSError) as error:
                self.broadcast((to_send(error), None))
                if isinstance(error, OSError):
                    raise to_send(error) from error
                raise
        failure, result = self.broadcast(outcome)
        if failure is not None:
            raise failure
        return result  # type: ignore[no-any-return]


def unpickle(payload: bytes | bytearray | memoryview) -> Any:
    """The object that another rank sent.

    Raises:
        ConnectionResetError: it did not arrive: MPICH may complete a collective although a rank was killed in it.
    """
    try:
        return pickle.loads(payload)
    except (pickle.UnpicklingError, EOFError) as error:
        raise ConnectionResetError(f"Connection reset by peer: a rank has ended while it sent ({error})") from None


def to_send(error: ValueError | OSError) -> UserError:
    """An error as it is raised on the other ranks: of its own class if that is a UserError made from its text alone."""
    if isinstance(error, UserError) and type(error).__init__ is UserError.__init__:
        return type(error)(*error.args)
    return UserError(told(error) if isinstance(error, OSError) else str(error))
