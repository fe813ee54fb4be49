"""Names the rank that was killed: a process of each node that sees which of its ranks ends first.

Once a rank is killed, the launcher kills all others within milliseconds, so no rank can tell. This process is forked
from the node's first rank before that has threads, MPI or much memory, and leaves its process group. Each rank of the
node has a connection to it, which the system closes in the order in which they end. It ends itself with the first.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

from tlt_hpc.cluster.watch.beat import Member
from tlt_hpc.cluster.watch.record import DamagedRecordError, Record, claim_verdict, read_record_at

_LONGEST_WORD = 1 << 16
_OF_ANOTHER = re.compile(r"[Cc]onnection (closed|reset|refused)|Broken pipe|Socket closed|remote process exited")
"""In the error of a rank that has lost another, of gloo or NCCL."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
_OTHER_NODES_SECONDS = 2.0
"""Until a shared file system shows what a rank of another node has said of its end."""
_LAST_SECONDS = 10
"""For the last word: a launcher waits for this process, and the run's folder may not answer."""
_POLL_SECONDS = 0.1


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
        """Start the process, if the system allows another; before this one has threads, and before MPI."""
        reading, writing = os.pipe()
        try:
            child = os.fork()
        except OSError:  # a limit on processes: nobody is named then
            os.close(reading)
            os.close(writing)
            return cls()
        if child:
            os.close(reading)
            return cls(writing)
        try:
            _detach(reading)
            _watch(reading)
        except (OSError, ValueError) as error:
            os.write(2, f"tlt: a rank that is killed will not be named: {error}\n".encode())
        finally:
            os._exit(0)

    def tell(self, member: Member, folder: Path) -> None:
        """Have this rank watched, whose start writes its status to ``folder``; cheap once that is so.

        A witness that is not there yet, or not any more, is asked again at the next call.
        """
        if self._pipe is not None and folder != self._folder:
            self._folder = folder
            with suppress(BrokenPipeError):
                os.write(self._pipe, json.dumps([member.start, str(folder.absolute())]).encode() + b"\n")
        if self._connection is None:
            with suppress(OSError):  # a node that cannot have one
                self._connection = _connect(member)


def _connect(member: Member) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(_address(member.start))
        connection.send(str(member.rank).encode())
    except OSError:
        connection.close()
        raise
    return connection


def _address(start: str) -> str:
    """In the kernel's own name space: no file is left."""
    return f"\0tlt-{start}"


def _detach(pipe: int) -> None:
    """Leave the rank's group, and close all that it has open but its errors: a launcher waits for the end of these."""
    os.setsid()
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nowhere, descriptor)
    for path in list(Path("/proc/self/fd").iterdir()):  # some limits allow a billion
        if int(path.name) not in (0, 1, 2, pipe):
            with suppress(OSError):  # the list's own
                os.close(int(path.name))


def _watch(pipe: int) -> None:
    """Wait for the first rank to end, and say so if it has not said how."""
    start, folder, listener = "", Path(), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ranks: dict[int, tuple[int, socket.socket]] = {}
    poll = select.epoll()  # gives events in the order in which they came, however late this process looks
    poll.register(pipe, select.EPOLLIN)
    while True:
        events = dict(poll.poll())
        if ended := [number for number in events if number in ranks]:
            signal.alarm(_LAST_SECONDS)
            _testify(start, folder, ranks[ended[0]][0])
            return
        if pipe in events:
            word = os.read(pipe, _LONGEST_WORD)
            if not word and not ranks:  # the first rank has ended before any could be watched
                return
            if not word:
                poll.unregister(pipe)
                continue
            given, place = json.loads(word.splitlines()[-1])
            if not start:
                listener.bind(_address(given))
                listener.listen(1024)
                poll.register(listener, select.EPOLLIN)
            start, folder = given, Path(place)
        if listener.fileno() in events and (accepted := _accept(listener)):
            ranks[accepted[1].fileno()] = accepted
            poll.register(accepted[1], select.EPOLLIN)


def _accept(listener: socket.socket) -> tuple[int, socket.socket] | None:
    """A rank and its connection; None if another user connects, or what connects says nothing."""
    connection, _ = listener.accept()
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    connection.settimeout(_POLL_SECONDS)
    with suppress(OSError, ValueError):
        if user == os.getuid():
            return int(connection.recv(16)), connection
    connection.close()
    return None


def _testify(start: str, folder: Path, ended: int) -> None:
    """Leave the verdict on the rank that has ended, unless one of the start has said why it ends: that is the cause."""
    records = _records(folder, start)
    if len({record.host for record in records}) > 1:  # ranks elsewhere may have ended before
        end = time.monotonic() + _OTHER_NODES_SECONDS
        while time.monotonic() < end and not any(map(_says_why, records)):
            time.sleep(_POLL_SECONDS)
            records = _records(folder, start)
    own = next((record for record in records if record.rank == ended), None)
    if own is None or own.ending or any(map(_says_why, records)):
        return
    also = "; the cause may also be a node that was lost" * (len({record.host for record in records}) > 1)
    line = f"{own.name} was killed or crashed, last seen in {own.place}{also}"
    with suppress(OSError):  # no room for it: the next start names no rank
        if claim_verdict(folder, start, line):
            os.write(2, f"tlt: {line}; the same command resumes\n".encode())


def _says_why(record: Record) -> bool:
    """Whether a rank has given a reason of its own for its end."""
    return bool(record.ending) and not _OF_ANOTHER.search(record.ending)


def _records(folder: Path, start: str) -> list[Record]:
    """What the ranks of a start have said, as far as it can be read."""
    found = []
    for path in folder.glob("rank-*"):
        with suppress(OSError, DamagedRecordError):
            found += [read_record_at(path)] if not path.suffix else []  # others are stacks
    return [record for record in found if record.start == start]
