"""Owns one exchange after another of a small record among all ranks, which never blocks. Knows not what records say.

Ranks of one node exchange through memory that they share: a look costs them no call of the MPI library, and a round is
over once the last of them has posted. Between nodes the first rank of each speaks for its node.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.mpi.library import MPI
from tlt_hpc.mpi.progress import LARGEST_CPU_SHARE, LONGEST_PAUSE_SECONDS, LONGEST_STRETCH, BackOff
from tlt_hpc.mpi.world import World

Records = NDArray[np.int64]

SLACK_SECONDS = 24e-3
"""What pauses may add to a release: two of a rank that waits, and one of a node's first rank for each stage between
nodes."""
LEAST_LONGEST_SECONDS = 4e-3
_SHARED_FOLDER = Path("/dev/shm")
_WORD_BYTES = 8
_BUFFERS = 2
"""A rank posts a round only when it has seen the last one, so a row is read by nobody any more two rounds later."""

_SPREAD, _ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)

logger = logging.getLogger(__name__)


class Exchange(ABC):
    """Rounds in which every rank posts a record [F] int64 and then takes all ranks', in rank order.

    A rank posts the next only when it has taken the last.
    """

    num_ranks: int
    crowding: float = 1.0
    """Ranks of this node for each of the cores that they may use, at least 1."""
    longest_pause_seconds: float = LONGEST_STRETCH * LONGEST_PAUSE_SECONDS
    """Between two looks of a rank that waits, where looks are dear."""

    @abstractmethod
    def post(self, record: Sequence[int]) -> None:
        """Begin a round."""

    @abstractmethod
    def take(self) -> Records | None:
        """All ranks' records [R, F] of this rank's round, a copy; None until all have posted, which never blocks."""

    def advance(self) -> None:
        """Let the others' rounds go on while this rank takes none and another thread of it is in the MPI library."""

    def back_off(self) -> BackOff:
        """Pauses between looks: the ranks that wait on one core take no more than 1 % of it together."""
        return BackOff(
            share=LARGEST_CPU_SHARE / self.crowding,
            stretched_seconds=self.longest_pause_seconds,
        )


class FlatExchange(Exchange):
    """One nonblocking allgather a round, over a communicator of all ranks that nobody else uses."""

    def __init__(self, comm: MPI.Comm, num_fields: int) -> None:
        self._comm, self.num_ranks = comm, comm.size
        # mpi4py does not keep the buffers of a nonblocking collective alive: they live as long as the exchange
        self._sent = np.zeros(num_fields, np.int64)
        self._received = np.zeros((comm.size, num_fields), np.int64)
        self._request: MPI.Request | None = None

    def post(self, record: Sequence[int]) -> None:
        assert self._request is None, "the last round has not been taken"
        self._sent[:] = record
        self._request = self._comm.Iallgather(self._sent, self._received)

    def take(self) -> Records | None:
        assert self._request is not None, "no round has been posted"
        if not self._request.Test():
            return None
        self._request = None
        return self._received.copy()


class SharedRows:
    """Rows of a table in memory that processes share, each written by one of them and read by all.

    Nothing orders one process's writes for another on some processors, so a row carries the number of its round and a
    sum over all of it, and is there once both are right.
    """

    def __init__(self, memory: mmap.mmap, start: int, num_rows: int, num_fields: int) -> None:
        self._width = num_fields + 2
        words = num_rows * self._width
        self._rows = np.frombuffer(memory, np.int64, words, start).reshape(num_rows, self._width)
        # odd, so that each field's every bit counts, and large, so that no two fields' changes cancel
        self._weights = (np.arange(1, num_fields + 2, dtype=np.uint64) * _SPREAD | _ODD).view(np.int64)
        self._words = self._rows.reshape(-1).data.cast("B").cast("q")
        self._num_there = 0

    @staticmethod
    def num_bytes(num_rows: int, num_fields: int) -> int:
        """What such a table takes."""
        return num_rows * (num_fields + 2) * _WORD_BYTES

    def write(self, first: int, turn: int, records: Records) -> None:
        """Put the records [N, F] of a round into the rows from ``first`` on."""
        rows = np.empty((len(records), self._width), np.int64)
        rows[:, 0], rows[:, 1:-1] = turn, records
        rows[:, -1] = rows[:, :-1] @ self._weights
        self._rows[first : first + len(records)] = rows

    def read(self, turn: int) -> Records | None:
        """A copy of the records [N, F] of a round; None until all are there."""
        words, width, num_rows = self._words, self._width, len(self._rows)
        while self._num_there < num_rows:  # most looks end at the row that the last one ended at
            if words[self._num_there * width] != turn:
                return None
            self._num_there += 1
        rows = self._rows.copy()
        if not ((rows[:, 0] == turn) & (rows[:, :-1] @ self._weights == rows[:, -1])).all():
            return None
        self._num_there = 0
        return rows[:, 1:-1]


class NodeExchange(Exchange):
    """Rounds through memory that the ranks of a node share.

    Args:
        memory: of ``memory_bytes``, zero to begin with.
        index: this rank's among the ``num_local`` of its node.
        order: [R] the world's ranks in the order of the nodes, and of their ranks on each.
        counts: ranks of each node.
        leaders: a communicator of the nodes' first ranks, on those; None where there is one node.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        index: int,
        order: NDArray[np.int64],
        counts: Sequence[int],
        num_local: int,
        num_fields: int,
        leaders: MPI.Comm | None,
    ) -> None:
        self._index, self._order = index, order
        self.num_ranks = len(order)
        sizes = [SharedRows.num_bytes(num, num_fields) for num in (num_local, len(order))]
        starts = np.cumsum([0, *sizes, *sizes])
        self._own = [SharedRows(memory, int(starts[2 * i]), num_local, num_fields) for i in range(_BUFFERS)]
        self._all = self._own
        if len(counts) > 1:
            self._all = [SharedRows(memory, int(starts[2 * i + 1]), len(order), num_fields) for i in range(_BUFFERS)]
        self._turn = self._num_relayed = 0
        self._leaders, self._request = leaders, None
        self._counts = [num_fields * count for count in counts]
        self._received = np.zeros((len(order), num_fields), np.int64)
        self._sent = np.zeros(0, np.int64)

    @staticmethod
    def memory_bytes(num_local: int, num_ranks: int, num_fields: int) -> int:
        """What a node's ranks share."""
        return _BUFFERS * sum(SharedRows.num_bytes(num, num_fields) for num in (num_local, num_ranks))

    def post(self, record: Sequence[int]) -> None:
        self._turn += 1
        self._own[self._turn % _BUFFERS].write(self._index, self._turn, np.array([record], np.int64))
        self.advance()

    def take(self) -> Records | None:
        self.advance()
        found = self._all[self._turn % _BUFFERS].read(self._turn)
        if found is None:
            return None
        records = np.empty_like(found)
        records[self._order] = found
        return records

    def advance(self) -> None:
        """On a node's first rank: tell the other nodes of this one's round once it is whole, and this one of theirs."""
        if self._leaders is None or self._num_relayed == self._turn:
            return
        if self._request is None:
            found = self._own[self._turn % _BUFFERS].read(self._turn)
            if found is None:
                return
            self._sent = np.ascontiguousarray(found)
            self._request = self._leaders.Iallgatherv(self._sent, [self._received, self._counts])
        if self._request.Test():
            self._request = None
            self._all[self._turn % _BUFFERS].write(0, self._turn, self._received)
            self._num_relayed = self._turn


def open_exchange(world: World, num_fields: int) -> Exchange:
    """The exchange that suits the ranks' nodes; collective.

    Where some node's ranks cannot share memory, all exchange by MPI alone, which rank 0 warns of: it costs the more, the
    more ranks share a core.
    """
    node = world.node_group
    num_bytes = NodeExchange.memory_bytes(node.size, world.size, num_fields)
    path, error = node.once(lambda: _make_shared(num_bytes))
    memory: mmap.mmap | None = None
    if not error:
        memory, error = _open_shared(path, num_bytes)
    told = world.allgather((world.node, world.hostname, _cores(), error))  # all have opened it from here on
    if node.is_first and path:
        Path(path).unlink(missing_ok=True)
    crowding = crowding_of([cores for number, _, cores, _ in told if number == world.node])
    nodes = np.array([number for number, *_ in told])
    counts = np.bincount(nodes).tolist()
    failed = [f"{hostname}: {error}" for _, hostname, _, error in told if error]
    if failed and world.rank == 0:
        logger.warning("ranks of a node share no memory, so waiting costs them more: %s", failed[0])
    found: Exchange
    if failed or max(counts) == 1 or memory is None:
        found = FlatExchange(world.private_comm(), num_fields)
    else:
        leaders = world.comm_of_first_ranks() if len(counts) > 1 else None
        order = np.argsort(nodes, kind="stable")
        found = NodeExchange(memory, node.rank, order, counts, node.size, num_fields, leaders)
        found.longest_pause_seconds = longest_pause(len(counts))
    found.crowding = crowding
    return found


def longest_pause(num_nodes: int) -> float:
    """Seconds that a rank beside a node's first may sleep between two looks, which the release waits for twice.

    An allgather among N nodes has log2(N) stages, each of which waits for a first rank's look.
    """
    stages = math.ceil(math.log2(num_nodes))
    return max(LEAST_LONGEST_SECONDS, (SLACK_SECONDS - stages * LONGEST_PAUSE_SECONDS) / 2)


def crowding_of(cores: Sequence[int]) -> float:
    """Ranks for each core, at least 1, given the cores that each rank of a node may use as bits."""
    together = 0
    for own in cores:
        together |= own
    return max(1.0, len(cores) / together.bit_count())


def _cores() -> int:
    return sum(1 << core for core in os.sched_getaffinity(0))


def _make_shared(num_bytes: int) -> tuple[str, str]:
    """Path of a new file of zeros in memory, or why there is none."""
    folder = _SHARED_FOLDER if _SHARED_FOLDER.is_dir() else Path(tempfile.gettempdir())
    try:
        with tempfile.NamedTemporaryFile(prefix="tlt-pulse-", dir=folder, delete=False) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # else a full disk shows as SIGBUS at the first write
            except OSError:
                Path(file.name).unlink()
                raise
    except OSError as error:
        return "", f"{folder}: {error.strerror}"
    return file.name, ""


def _open_shared(path: str, num_bytes: int) -> tuple[mmap.mmap | None, str]:
    """The file's memory, or why it cannot be had: ranks in containers of their own share no folder."""
    try:
        handle = os.open(path, os.O_RDWR)
        try:
            return mmap.mmap(handle, num_bytes), ""
        finally:
            os.close(handle)
    except (OSError, ValueError) as error:
        return None, f"{path}: {error}"
