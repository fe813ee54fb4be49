"""Names the rank that was killed: a process of each node that sees which of its ranks ends first.

Once a rank is killed, the launcher kills all others within milliseconds, so no rank can tell. This process is forked
from the node's first rank before that has threads, MPI or much memory, and leaves its process group. Each rank of the
node has a connection to it, which the system closes in the order in which they end. It ends itself with the first.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from contextlib import suppress
from pathlib import Path

from tlt_hpc.cluster.watch.beat import Member
from tlt_hpc.cluster.watch.record import DamagedRecordError, claim_verdict, read_record

_LONGEST_WORD = 1 << 16
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)


class Witness:
    """A rank's connection to its node's witness.

    Args:
        pipe: to the process, on the rank that has forked it; None on the others.
    """

    def __init__(self, pipe: int | None = None) -> None:
        self._pipe = pipe
        self._folder: Path | None = None
        self._connection: socket.socket | None = None

    @classmethod
    def fork(cls) -> Witness:
        """Start the process; to be called before this one has threads, and before MPI is initialised."""
        reading, writing = os.pipe()
        if os.fork():
            os.close(reading)
            return cls(writing)
        try:
            _detach(reading)
            _watch(reading)
        finally:
            os._exit(0)

    def tell(self, member: Member, folder: Path) -> None:
        """Have this rank watched, whose start writes its status to ``folder``; cheap once that is so.

        A witness that is not there yet, or not any more, is asked again at the next call.
        """
        if self._pipe is not None and folder != self._folder:
            self._folder = folder
            with suppress(BrokenPipeError):
                os.write(self._pipe, json.dumps([member.start, str(folder.absolute())]).encode())
        if self._connection is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(_address(member.start))
                connection.send(str(member.rank).encode())
                self._connection = connection
            except OSError:  # of a node that cannot have one
                connection.close()


def _address(start: str) -> str:
    """In the kernel's own name space: no file is left."""
    return f"\0tlt-{start}"


def _detach(pipe: int) -> None:
    """Leave the rank's group, and close all that it has open but its errors: a launcher waits for the end of these."""
    os.setsid()
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nowhere, descriptor)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))


def _watch(pipe: int) -> None:
    """Wait for the first rank to end, and say so if it has not said how."""
    start, folder, listener = "", Path(), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ranks: dict[int, tuple[int, socket.socket]] = {}
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while True:
        events = dict(poll.poll())
        if ended := [rank for number, (rank, _) in ranks.items() if number in events]:
            _testify(start, folder, ended)
            return
        if pipe in events:
            word = os.read(pipe, _LONGEST_WORD)
            if not word and not ranks:  # the first rank has ended before any could be watched
                return
            if not word:
                poll.unregister(pipe)
                continue
            given, place = json.loads(word)
            if not start:
                listener.bind(_address(given))
                listener.listen(1024)
                poll.register(listener, select.POLLIN)
            start, folder = given, Path(place)
        if listener.fileno() in events:
            connection, _ = listener.accept()
            rank = connection.recv(16)
            if rank:
                ranks[connection.fileno()] = int(rank), connection
                poll.register(connection, select.POLLIN)


def _testify(start: str, folder: Path, ended: list[int]) -> None:
    """Leave the verdict on ranks that have ended, unless these or others have said why: then the launcher ends all."""
    try:
        records = [read_record(folder, rank) for rank in sorted(ended)]
    except (OSError, DamagedRecordError):
        return
    if any(record.start != start or record.ending for record in records):
        return
    names = ", ".join(record.name for record in records)
    names = names if len(records) == 1 else f"one of {names}"
    line = f"{names} was killed or crashed, last seen in {records[0].place}"
    with suppress(OSError):  # no room for it: the next start names no rank
        if claim_verdict(folder, start, line):
            os.write(2, f"tlt: {line}; the same command resumes\n".encode())
