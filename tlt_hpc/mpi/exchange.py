"""Owns one exchange after another of a small record among all ranks, which never blocks. Knows not what records say.

Ranks of one node exchange through memory that they share: a look costs them no call of the MPI library, and the last to
post wakes the others. Between nodes the first rank of each speaks for its node.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.mpi.library import MPI
from tlt_hpc.mpi.progress import IPROBE_EVERY_SECONDS, BackOff
from tlt_hpc.mpi.shared import Bells, Records, SharedRows, make_shared, open_bells, open_shared
from tlt_hpc.mpi.world import World

SLEEP_SECONDS = (0.05, 0.8)
"""The first, which double, and the longest of a rank that will be woken: so late is it where a bell goes unheard, which
takes a processor that delays its writes."""
_BUFFERS = 2
"""A rank posts a round only when it has seen the last one, so a row is read by nobody any more two rounds later."""

logger = logging.getLogger(__name__)


class Exchange(ABC):
    """Rounds in which every rank posts a record [F] int64 and then takes all ranks', in rank order.

    A rank posts the next only when it has taken the last.
    """

    comm: MPI.Comm
    """Of all ranks, and nobody else's: whoever enters the library there lets all that is under way go on."""
    num_ranks: int
    crowding: float = 1.0
    """Ranks of this node for each of the cores that they may use, at least 1."""

    @abstractmethod
    def post(self, record: Sequence[int]) -> None:
        """Begin a round."""

    @abstractmethod
    def take(self) -> Records | None:
        """All ranks' records [R, F] of this rank's round, a copy; None until all have posted, which never blocks."""

    @abstractmethod
    def advance(self) -> None:
        """Let the others' rounds go on while this rank takes none and another thread of it is in the MPI library."""

    @abstractmethod
    def pause(self) -> None:
        """Sleep for a while, or until this rank's round may be over."""

    def rest(self) -> None:
        """As ``pause``, of a thread that looks in this rank's place while it works."""
        time.sleep(IPROBE_EVERY_SECONDS)

    @abstractmethod
    def wake(self) -> None:
        """End a ``rest`` that may be under way."""

    @abstractmethod
    def begin(self) -> None:
        """The next pauses are short: a rollout begins."""


class FlatExchange(Exchange):
    """One nonblocking allgather a round, over a communicator of all ranks that nobody else uses."""

    def __init__(self, comm: MPI.Comm, num_fields: int) -> None:
        self.comm, self.num_ranks = comm, comm.size
        # mpi4py does not keep the buffers of a nonblocking collective alive: they live as long as the exchange
        self._sent = np.zeros(num_fields, np.int64)
        self._received = np.zeros((comm.size, num_fields), np.int64)
        self._request: MPI.Request | None = None
        self._back_off = BackOff()

    def post(self, record: Sequence[int]) -> None:
        assert self._request is None, "the last round has not been taken"
        self._sent[:] = record
        self._request = self.comm.Iallgather(self._sent, self._received)

    def take(self) -> Records | None:
        assert self._request is not None, "no round has been posted"
        if not self._request.Test():
            return None
        self._request = None
        return self._received.copy()

    def advance(self) -> None:
        """Nothing: to be in the library is enough."""

    def pause(self) -> None:
        self._back_off.pause()

    def wake(self) -> None:
        """Nothing: rests are short."""

    def begin(self) -> None:
        self._back_off.reset()


class NodeExchange(Exchange):
    """Rounds through memory that the ranks of a node share.

    Args:
        comm: of all ranks, and nobody else's.
        memory: of ``memory_bytes``, zero to begin with.
        bells: which lie at its beginning.
        index: this rank's among those of its node.
        node: this rank's, of which there are ``len(counts)``.
        counts: ranks of each node.
        order: [R] the world's ranks in the order of the nodes, and of their ranks on each.
        leaders: a communicator of the nodes' first ranks, on those; None where there is one node.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        memory: mmap.mmap,
        bells: Bells,
        index: int,
        node: int,
        counts: Sequence[int],
        order: NDArray[np.int64],
        num_fields: int,
        leaders: MPI.Comm | None,
    ) -> None:
        num_local = counts[node]
        self.comm, self.num_ranks, self._index, self._order = comm, len(order), index, order
        self._is_in_order = bool((order == np.arange(len(order))).all())
        sizes = [SharedRows.num_bytes(num, num_fields) for num in (num_local, num_local, len(order), len(order))]
        starts = [int(start) for start in np.cumsum([Bells.num_bytes(num_local), *sizes])]
        self._own = [SharedRows(memory, start, num_local, num_fields) for start in starts[:2]]
        self._all, self._is_one_node = self._own, len(counts) == 1
        if not self._is_one_node:
            self._all = [SharedRows(memory, start, len(order), num_fields) for start in starts[2:4]]
        self._bells = bells
        self._others = [number for number in range(num_local) if number != index]
        self._turn = self._num_relayed = 0
        self._leaders = leaders
        self._request: MPI.Request | None = None
        self._counts = [num_fields * count for count in counts]
        self._received = np.zeros((len(order), num_fields), np.int64)
        self._sent = np.zeros(0, np.int64)
        self._back_off, self._sleep_seconds = BackOff(), SLEEP_SECONDS[0]

    @staticmethod
    def memory_bytes(num_local: int, num_ranks: int, num_fields: int) -> int:
        """What a node's ranks share."""
        tables = sum(SharedRows.num_bytes(num, num_fields) for num in (num_local, num_ranks))
        return _BUFFERS * tables + Bells.num_bytes(num_local)

    def post(self, record: Sequence[int]) -> None:
        self._turn += 1
        own = self._own[self._turn % _BUFFERS]
        own.write(self._index, self._turn, np.array([record], np.int64))
        self._bells.order_memory()  # of two that post last at the same moment one has to see the other's
        if own.are_numbered(self._turn):
            self._bells.ring(self._others if self._is_one_node else self._others[: self._index > 0])
        self.advance()

    def take(self) -> Records | None:
        self.advance()
        found = self._all[self._turn % _BUFFERS].read(self._turn)
        if found is None or self._is_in_order:
            return found
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
            self._back_off.reset()
            self._bells.ring(self._others)

    def pause(self) -> None:
        if self._request is not None:  # of other nodes' coming nobody tells
            self._back_off.pause()
            return
        self._sleep()

    def rest(self) -> None:
        if self._request is not None:
            super().rest()
        else:
            self._sleep()

    def wake(self) -> None:
        self._bells.ring_own()

    def _sleep(self) -> None:
        self._bells.announce()
        waits_for = self._all if self._leaders is None else self._own
        if waits_for[self._turn % _BUFFERS].are_numbered(self._turn):
            self._bells.awake()
        else:
            self._bells.sleep(self._sleep_seconds)
            self._sleep_seconds = min(2 * self._sleep_seconds, SLEEP_SECONDS[1])

    def begin(self) -> None:
        self._back_off.reset()
        self._sleep_seconds = SLEEP_SECONDS[0]


def open_exchange(world: World, num_fields: int) -> Exchange:
    """The exchange that suits the ranks' nodes; collective.

    Where some node's ranks cannot share memory, all exchange by MPI alone, of which rank 0 warns.
    """
    node, memory, bells = world.node_group, None, None
    num_bytes = NodeExchange.memory_bytes(node.size, world.size, num_fields)
    path, error = node.once(lambda: make_shared(num_bytes))
    if not error:
        memory, error = open_shared(path, num_bytes)
    if memory is not None:
        bells, error = open_bells(memory, node.rank, node.size, Path(path).name)
    told = world.allgather((world.node, _cores(), error))  # all have opened what they could from here on
    if node.is_first and path:
        Path(path).unlink(missing_ok=True)
    others_fail = any(error for *_, error in told)
    if bells is not None and not others_fail and not all(map(bells.is_heard, range(node.size))):
        error = "its ranks are in network namespaces of their own"
    errors = [f"{hostname}: {error}" for hostname, error in world.allgather((world.hostname, error)) if error]
    if errors and world.rank == 0:
        logger.warning("a node's ranks share nothing (%s), so that to wait takes more of their cores", errors[0])
    counts = np.bincount([number for number, *_ in told]).tolist()
    comm = world.private_comm()
    found: Exchange
    if errors or max(counts) == 1 or memory is None or bells is None:
        found = FlatExchange(comm, num_fields)
    else:
        leaders = world.comm_of_first_ranks() if len(counts) > 1 else None
        order = np.argsort([number for number, *_ in told], kind="stable")
        found = NodeExchange(comm, memory, bells, node.rank, world.node, counts, order, num_fields, leaders)
    found.crowding = crowding_of([cores for number, cores, _ in told if number == world.node])
    return found


def crowding_of(cores: Sequence[int]) -> float:
    """Ranks for each core, at least 1, given the cores that each rank of a node may use as bits."""
    together = 0
    for own in cores:
        together |= own
    return max(1.0, len(cores) / together.bit_count())


def _cores() -> int:
    return sum(1 << core for core in os.sched_getaffinity(0))
