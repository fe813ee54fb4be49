"""Owns the set of ranks: who and where this one is, collectives that wait without spinning, and the stop flag.

The ranks of a node are a group that shares what one of them has read or computed: a shared file system then serves one
reader per node instead of all its ranks, which sleep meanwhile.
Independent of rollouts, models and training. No other module touches COMM_WORLD.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.cluster.stopping import Stop, StopFlag
from tlt_hpc.cluster.watch.rank_progress import BEAT, Member
from tlt_hpc.common.files import os_error_text
from tlt_hpc.common.formatting import format_count
from tlt_hpc.config import UserError
from tlt_hpc.mpi.library import MPI, remove_shared_memory_names
from tlt_hpc.mpi.progress import wait_for_request

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
        wait_for_request(self._comm.Ibcast(length, root), "broadcast", self._scope)
        payload = payload or bytearray(int(length[0]))
        self.broadcast_bytes(np.frombuffer(payload, np.uint8), root)
        return item if self.rank == root else unpickle(payload)  # type: ignore[no-any-return]

    def broadcast_bytes(self, values: NDArray[np.uint8], root: int = 0) -> None:
        """Write rank ``root``'s bytes [N] into the others' of the same size."""
        for start in range(0, values.size, BLOCK_BYTES):
            wait_for_request(self._comm.Ibcast(values[start : start + BLOCK_BYTES], root), "broadcast", self._scope)

    def run_first_and_broadcast(self, work: Callable[[], T]) -> T:
        """The result (picklable) of ``work``, run on the first rank and given to all; its failure too.

        Raises:
            UserError: on all ranks, if the first raised a UserError (see ``as_sendable_error``) or an OSError; if it
                raised another ValueError, on the others.
        """
        outcome: tuple[UserError | None, Any] = None, None
        if self.rank == 0:
            try:
                outcome = None, work()
            except (ValueError, OSError) as error:
                self.broadcast((as_sendable_error(error), None))
                if isinstance(error, OSError):
                    raise as_sendable_error(error) from error
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


def as_sendable_error(error: ValueError | OSError) -> UserError:
    """An error as it is raised on the other ranks: of its own class if that is a UserError made from its text alone."""
    if isinstance(error, UserError) and type(error).__init__ is UserError.__init__:
        return type(error)(*error.args)
    return UserError(os_error_text(error) if isinstance(error, OSError) else str(error))


_LONG_SECONDS = 5.0
"""What takes so long says at its end how long it took."""
MOST_BYTES = 2**30
"""Of one gather or sum: counts and displacements must fit a C int in libraries older than MPI 4."""


class LaunchError(UserError):
    """A user's mistake in how the ranks were started; its text is one line with the remedy."""


@dataclass(frozen=True, eq=False)
class PendingSum:
    """A sum over ranks in progress. ``pending`` has it until it has been waited for: MPI writes to its buffers."""

    requests: list[MPI.Request]
    sent: NDArray[Any]
    received: NDArray[Any]
    pending: set[PendingSum]

    def wait(self) -> NDArray[Any]:
        """The sum, of the shape and dtype of what was given; sleeps until it is there. May be called again."""
        for request in self.requests:
            wait_for_request(request, "sum")
        self.pending.discard(self)
        return self.received


class World(NodeGroup):
    """All ranks of the job, and this rank's place among them.

    ``rank`` of ``size``; ``node`` counts the hosts in order of their lowest rank, ``local_rank`` the ranks of one host,
    which are ``node_group``.
    All methods named after collectives are collective: every rank calls them in the same order.
    """

    def __init__(self, comm: MPI.Comm, flag: StopFlag | None = None) -> None:
        super().__init__(_duplicate(comm), "world")
        self.flag = flag or StopFlag()
        self._pending_sums: set[PendingSum] = set()
        self.stages: dict[str, float] = {}
        """What ``print_once`` has been told, with the time of each in seconds since the epoch."""
        self.placement: tuple[str, ...] = ()
        """Where the ranks run, in lines for the user; on rank 0, once they have been placed (placing.py)."""
        self.hostname: str = socket.gethostname()
        self.node, self.local_rank = node_and_local_rank(self.allgather(self.hostname), self.rank)
        self.node_group = NodeGroup(self._comm.Split(self.node, self.rank))  # all ranks have joined by now
        if self.local_rank == 0:
            remove_shared_memory_names()

    @classmethod
    def connect(cls, flag: StopFlag | None = None) -> World:
        """The world of all ranks that were launched, or of this process alone where there was no launcher.

        Initialises MPI with MPI_THREAD_MULTIPLE where that has not happened yet; it is finalised at exit.

        Raises:
            LaunchError: the library gives a lower thread level, or another number of ranks than was asked for.
        """
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        check_thread_level(MPI.Query_thread(), MPI.Get_library_version())
        check_rank_count(MPI.COMM_WORLD.size, os.environ)
        world = cls(MPI.COMM_WORLD, flag)
        told = world.allgather((world.hostname, os.getpid(), BEAT.monitor or uuid4().hex))
        BEAT.set_member(Member.from_ranks(world.rank, told), MPI.COMM_WORLD.Abort)
        return world

    def print_once(self, words: str, note: str = "") -> None:
        """Have rank 0 print what a start does, each thing once: further runs of this process start quickly."""
        if self.rank == 0 and words not in self.stages:
            print(f"  {words}{note}", flush=True)
        self.stages.setdefault(words, time.time())

    @contextmanager
    def printing_duration(self, words: str, note: str) -> Iterator[None]:
        """Context of a long action: ``print_once`` at its start and, if it took long, its seconds at the end."""
        began = time.monotonic()
        self.print_once(words, note)
        yield
        if self.rank == 0 and (seconds := time.monotonic() - began) >= _LONG_SECONDS:
            print(f"  {words} took {seconds:.0f} s", flush=True)

    @property
    def mpi_version(self) -> str:
        """The version string of the MPI library, in one or more lines."""
        return str(MPI.Get_library_version())

    def allgather(self, item: T) -> list[T]:
        """Every rank's ``item`` (picklable, of any size), in rank order; collective.

        Raises:
            ConnectionResetError: as ``unpickle``.
        """
        payload = np.frombuffer(pickle.dumps(item, pickle.HIGHEST_PROTOCOL), np.uint8)
        own, lengths = np.array([payload.size], np.int64), np.empty(self.size, np.int64)
        wait_for_request(self._comm.Iallgather(own, lengths), "allgather")
        if lengths.sum() > MOST_BYTES:
            return [self.broadcast(item, root) for root in range(self.size)]
        received = np.empty(int(lengths.sum()), np.uint8)
        wait_for_request(self._comm.Iallgatherv(payload, [received, lengths.tolist()]), "allgather")
        return [unpickle(each.data) for each in np.split(received, np.cumsum(lengths)[:-1])]

    def run_on_all_ranks(self, work: Callable[[], T]) -> T:
        """The result of ``work``, run on every rank; if it fails on one rank, all ranks raise. Collective.

        Raises:
            UserError: on all ranks, where one rank raised a UserError (see ``as_sendable_error``) or an OSError; of
                several failed ranks the lowest one's.
        """
        failure = None
        try:
            result = work()
        except (UserError, OSError) as error:
            failure = as_sendable_error(error)
        for each in self.allgather(failure):
            if each is not None:
                raise each
        return result

    def sum_over_ranks(self, array: NDArray[Any]) -> NDArray[Any]:
        """The elementwise sum of all ranks' arrays (float32, float64 or int64, equal shapes), the same bits on all."""
        return self.start_sum(array).wait()

    def start_sum(self, array: NDArray[Any]) -> PendingSum:
        """Begin ``sum_over_ranks`` of a copy of ``array``, of any shape, and return at once."""
        sent = np.array(array, order="C", copy=True)
        received = np.empty_like(sent)
        block = max(1, MOST_BYTES // sent.itemsize)
        requests = [
            self._comm.Iallreduce(sent.ravel()[start : start + block], received.ravel()[start : start + block], MPI.SUM)
            for start in range(0, sent.size, block)
        ]
        pending = PendingSum(requests, sent, received, self._pending_sums)
        self._pending_sums.add(pending)
        return pending

    def barrier(self) -> None:
        """Sleep until every rank has called this."""
        wait_for_request(self._comm.Ibarrier(), "barrier")

    def duplicate_comm_all_ranks(self) -> MPI.Comm:
        """A duplicate of the world's communicator for one owner alone; collective."""
        return _duplicate(self._comm)

    @property
    def stop_requested(self) -> bool:
        """True if this rank was asked to stop, or all have agreed to."""
        return self.flag.kind is not Stop.NONE

    def gather_first_stop_reason(self) -> str:
        """The stop reason of the lowest rank that has one, the same on all ranks; collective."""
        return next(filter(None, self.allgather(self.flag.reason)), "")

    def agree_to_stop(self) -> Stop:
        """The most urgent of all ranks' wishes to stop, the same on all, whose flags are raised to it."""
        return self.allgather_with_stop_vote(None)[1]

    def allgather_with_stop_vote(self, item: T) -> tuple[list[T], Stop]:
        """Every rank's ``item``, as ``allgather``, and ``agree_to_stop``, in one collective."""
        votes = self.allgather((item, self.flag.kind, self.flag.reason))
        agreed = max(kind for _, kind, _ in votes)
        if agreed:
            rank, reason = next((rank, reason) for rank, (_, kind, reason) in enumerate(votes) if kind is agreed)
            self.flag.request(agreed, f"rank {rank}: {reason}")
        return [item for item, _, _ in votes], agreed

    def answer_signals(self) -> None:
        """Have SIGTERM, SIGINT and SIGUSR2 set the stop flag, which is voted on, instead of ending the rank."""
        self.flag.install_signal_handlers()
        self.flag.is_answered = True

    def finalise_mpi_all_ranks(self) -> None:
        """Have all ranks end together, and MPI with them, so that each rank exits with its own status; collective."""
        self.flag.ignore_time_limit_signal()
        self.barrier()
        MPI.Finalize()


def node_and_local_rank(hostnames: Sequence[str], rank: int) -> tuple[int, int]:
    """(node, local rank) of ``rank``, given every rank's host name: nodes in order of first appearance."""
    own = hostnames[rank]
    return list(dict.fromkeys(hostnames)).index(own), list(hostnames[:rank]).count(own)


def check_thread_level(level: int, library: str) -> None:
    """Refuse an MPI library whose calls may not come from several threads at once.

    Raises:
        LaunchError: with the library's name and the remedy.
    """
    if level < MPI.THREAD_MULTIPLE:
        raise LaunchError(
            f"MPI thread level {level} where MPI_THREAD_MULTIPLE ({MPI.THREAD_MULTIPLE}) is needed, from "
            f"{library.splitlines()[0].strip()!r}; load an MPI that is built with thread support"
        )


def check_rank_count(size: int, environment: Mapping[str, str]) -> None:
    """Refuse a world of another size than was asked for: a foreign launcher starts N jobs of one rank each.

    Raises:
        LaunchError: with both counts and the remedy.
    """
    variable = "TLT_RANKS" if "TLT_RANKS" in environment else "SLURM_NTASKS"  # what ``tlt`` asked mpiexec for; srun
    asked = environment.get(variable, str(size))
    if asked != str(size):
        raise LaunchError(
            f"MPI sees {format_count(size, 'rank')} where {variable}={asked}: the launcher does not belong to this MPI "
            "library, or there was none; under Slurm start with `srun --mpi=pmi2` (MPICH) or `srun --mpi=pmix` (Open "
            f"MPI), elsewhere with the mpiexec of this environment, or set TLT_RANKS={size} if that number is meant"
        )


def _duplicate(comm: MPI.Comm) -> MPI.Comm:
    duplicate, request = comm.Idup()
    wait_for_request(request, "duplication of a communicator")
    return duplicate
