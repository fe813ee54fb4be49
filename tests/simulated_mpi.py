"""MPI between simulated processes: communicators with those methods of mpi4py that the package uses.

A collective completes on each rank at a time of its own, and never before what it needs has been entered by the others.
What a program may not do is an error: collectives that do not match, a send buffer that is changed too early, a
communicator that is used before it is there, a call after MPI was finalised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from simulated_processes import RUNNING, Cluster, Process, ScheduleError


class Group:
    """What the handles of one communicator share; its nonblocking collectives match by their order on each rank."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.processes = list(processes)
        self.size = len(self.processes)
        self.counts = [0] * self.size
        self.operations: dict[int, Operation] = {}


class Operation:
    """One collective. ``kind``, alike on all ranks: its name, then root or sizes."""

    def __init__(self, group: Group, kind: tuple[Any, ...]) -> None:
        self.group, self.kind = group, kind
        self.requests: dict[int, Request] = {}

    def has_started(self) -> bool:
        return self.kind[1] in self.requests if self.kind[0] == "bcast" else len(self.requests) == self.group.size

    @cached_property
    def result(self) -> Any:
        """What each rank receives, as bytes; or the new group, or the new groups by colour."""
        name, ordered = self.kind[0], [self.requests[rank] for rank in sorted(self.requests)]
        if name == "bcast":
            return np.frombuffer(self.requests[self.kind[1]].given, np.uint8)
        if name == "allreduce":
            return np.sum([np.frombuffer(r.given, r.sent.dtype) for r in ordered], 0).view(np.uint8)
        if name == "idup":
            return Group(self.group.processes)
        if name == "split":
            by_key = sorted(ordered, key=lambda r: r.key)
            return {c: Group([r.process for r in by_key if r.colour == c]) for c in {r.colour for r in ordered}}
        return np.frombuffer(b"".join(request.given for request in ordered), np.uint8)


class Request:
    """One rank's part of a collective.

    A library with a progress thread of its own completes it a while after all have entered. One without (``weak``)
    takes and sends messages only inside of calls: here by dissemination, and of broadcasts along a binomial tree.
    """

    colour = key = 0

    def __init__(self, operation: Operation, rank: int, sent: Any, received: Any, process: Process) -> None:
        self.operation, self.rank, self.process = operation, rank, process
        self.sent, self.received = sent, received
        self.given: bytes = b"" if sent is None else sent.tobytes()
        self.stage, self.due, self.is_done = 0, -1.0, False

    def Test(self) -> bool:  # noqa: N802
        progress(self.process)
        return self.is_done

    def advance(self) -> bool:
        operation, cluster = self.operation, self.process.cluster
        if cluster.weak:
            return self._advance_weakly(operation, cluster)
        if not operation.has_started():
            return False
        if self.due < 0:
            self.due = cluster.now
            if cluster.random.random() < cluster.late:
                self.due += cluster.random.random() ** 6 * 0.1
        return self.due <= cluster.now

    def _advance_weakly(self, operation: Operation, cluster: Cluster) -> bool:
        size, requests = operation.group.size, operation.requests
        if operation.kind[0] == "bcast":
            place = (self.rank - operation.kind[1]) % size
            if place and not self.stage:
                parent = requests.get((place - (1 << (place.bit_length() - 1)) + operation.kind[1]) % size)
                self.stage = int(parent is not None and (parent.stage > 0 or parent.rank == operation.kind[1]))
            return not place or self.stage > 0
        while 1 << self.stage < size:
            before = requests.get((self.rank - (1 << self.stage)) % size)
            if before is None or before.stage < self.stage:
                return False
            if self.due < 0 and cluster.random.random() < cluster.late:
                self.due = cluster.now + cluster.random.random() ** 6 * 0.1
            if self.due > cluster.now:
                return False
            self.stage, self.due = self.stage + 1, -1.0
        return True

    def complete(self) -> None:
        self.is_done = True
        operation = self.operation
        if operation.kind[:2] == ("bcast", self.rank) or self.sent is None:
            return
        if operation.kind[0] != "bcast" and self.sent.tobytes() != self.given:
            raise ScheduleError(f"rank {self.rank} has changed what it sends while {operation.kind} was pending")
        if self.received is not None:
            self.received.reshape(-1).view(np.uint8)[:] = operation.result


def progress(process: Process) -> None:
    """What every call into the library does: take what has arrived, and pass it on."""
    if process.pending:
        for request in process.pending[:]:
            if not request.is_done and request.advance():
                request.complete()
                process.pending.remove(request)


class Comm:
    """One rank's handle of a communicator, with the methods of mpi4py that the package uses."""

    def __init__(self, group: Group | None, rank: int, duplication: Request | None = None) -> None:
        self._group, self.rank, self._duplication = group, rank, duplication

    @property
    def group(self) -> Group:
        if self._group is None:
            assert self._duplication is not None
            if not self._duplication.is_done:
                raise ScheduleError("a communicator is used before its duplication is complete")
            self._group = self._duplication.operation.result
        return self._group

    @property
    def size(self) -> int:
        return self.group.size

    def _enter(self, *kind: Any, sent: Any = None, received: Any = None, colour: int = 0, key: int = 0) -> Request:
        group, rank = self.group, self.rank
        process = group.processes[rank]
        if process.finalized:
            raise ScheduleError(f"rank {rank} calls {kind} after MPI was finalised")
        number = group.counts[rank]
        group.counts[rank] += 1
        operation = group.operations.get(number)
        if operation is None:
            operation = group.operations[number] = Operation(group, kind)
        if operation.kind != kind:
            raise ScheduleError(f"collective {number}: rank {rank} is in {kind}, rank "
                                f"{next(iter(operation.requests))} in {operation.kind}")  # fmt: skip
        request = operation.requests[rank] = Request(operation, rank, sent, received, process)
        request.colour, request.key = colour, key
        if len(operation.requests) == group.size:
            del group.operations[number]
        process.pending.append(request)
        progress(process)
        return request

    def Iallgather(self, sent: Any, received: Any) -> Request:  # noqa: N802
        return self._enter("allgather", sent.nbytes, sent=sent, received=received)

    def Iallgatherv(self, sent: Any, received: Any) -> Request:  # noqa: N802
        array, lengths = received
        if len(sent) != lengths[self.rank]:
            raise ScheduleError(f"rank {self.rank} sends {len(sent)} bytes and has told {lengths[self.rank]}")
        return self._enter("allgatherv", tuple(lengths), sent=sent, received=array)

    def Iallreduce(self, sent: Any, received: Any, operation: Any) -> Request:  # noqa: N802
        return self._enter("allreduce", sent.size, sent.dtype, sent=sent, received=received)

    def Ibcast(self, values: Any, root: int) -> Request:  # noqa: N802
        return self._enter("bcast", root, values.nbytes, sent=values, received=values)

    def Ibarrier(self) -> Request:  # noqa: N802
        return self._enter("barrier")

    def Iprobe(self) -> bool:  # noqa: N802
        progress(self.group.processes[self.rank])
        return False

    def Idup(self) -> tuple[Comm, Request]:  # noqa: N802
        request = self._enter("idup")
        return Comm(None, self.rank, request), request

    def Split(self, colour: int, key: int) -> Comm:  # noqa: N802
        request = self._enter("split", colour=colour, key=key)
        while not request.Test():
            RUNNING[-1].sleep(4e-3)
        group = request.operation.result[colour]
        return Comm(group, group.processes.index(request.process))

    def Free(self) -> None: ...  # noqa: N802


class Library:
    """Stands for the module ``MPI``."""

    SUM = "sum"

    @property
    def COMM_WORLD(self) -> Comm:  # noqa: N802
        comm = RUNNING[-1].process.comm
        assert comm is not None
        return comm

    def Is_initialized(self) -> bool:  # noqa: N802
        return True

    def Is_finalized(self) -> bool:  # noqa: N802
        return RUNNING[-1].process.finalized

    def Finalize(self) -> None:  # noqa: N802
        process = RUNNING[-1].process
        if process.pending:
            raise ScheduleError(f"MPI is finalised while {process.pending[0].operation.kind} is pending")
        process.finalized = True


def start_ranks(
    processes: Sequence[Process],
    work: Callable[[Process], int],
    ended: Callable[[Process], None] = lambda process: None,
) -> None:
    """Run ``work`` on processes that form one world; ``ended`` is called as each of them ends."""
    group = Group(processes)
    for rank, process in enumerate(processes):
        process.comm, process.ended = Comm(group, rank), ended
        process.start(partial(work, process))
