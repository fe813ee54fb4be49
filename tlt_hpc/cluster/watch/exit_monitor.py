"""Names the rank that was killed: a monitor process on each node sees which of its ranks exits first.

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
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from tlt_hpc.cluster.watch.rank_progress import BEAT, Member
from tlt_hpc.cluster.watch.record import Record, read_records, write_verdict_if_first

_MAX_MESSAGE_BYTES = 1 << 16
_OF_ANOTHER = re.compile(r"[Cc]onnection (closed|reset|refused)|Broken pipe|Socket closed|remote process exited")
"""In the error of a rank that has lost another, of gloo or NCCL."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
_OTHER_NODES_SECONDS = 2.0
"""Until a shared file system shows what a rank of another node has said of its end."""
_LAST_SECONDS = 10
"""For the last word: a launcher waits for this process, and the run's folder may not answer."""
_POLL_SECONDS = 0.1
_LONGEST_ENDING = 400


class ExitMonitor:
    """A rank's connection to its node's monitor process.

    Args:
        pipe: to the process, on the rank that has forked it; None on the others.
    """

    def __init__(self, pipe: int | None = None) -> None:
        self._pipe = pipe
        self._sent: tuple[str, Path | None] | None = None
        self._connection: socket.socket | None = None

    @classmethod
    def fork(cls) -> ExitMonitor:
        """Start the process, if the system allows another; before this one has threads, and before MPI."""
        BEAT.monitor = uuid4().hex
        reading, writing = os.pipe()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(_address(BEAT.monitor))
            listener.listen(1024)  # ranks connect once they have met, whenever the process looks
            child = os.fork()
        except OSError:  # a limit on processes: nobody is named then
            os.close(reading)
            os.close(writing)
            listener.close()
            return cls()
        if child:
            os.close(reading)
            listener.close()
            return cls(writing)
        try:
            _detach({reading, listener.fileno()})
            _await_exit(reading, listener)
        except Exception as error:  # noqa: BLE001  nobody else would say it
            os.write(2, f"tlt: a rank that is killed will not be named: {error!r}\n".encode())
        finally:
            os._exit(0)

    def connect_rank(self, member: Member) -> None:
        """Have this rank watched, once the ranks have met."""
        self.send_folder(member, None)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(_address(member.monitor))
            connection.send(str(member.rank).encode())
        except OSError:  # a node that cannot have one
            connection.close()
        else:
            self._connection = connection

    def send_folder(self, member: Member, folder: Path | None) -> None:
        """Send where the start writes its status, once that is known; cheap once sent."""
        if self._pipe is not None and (member.start, folder) != self._sent:
            self._sent = member.start, folder
            is_whole = len(member.neighbours) == member.size
            place = "" if folder is None else str(folder.absolute())
            with suppress(BrokenPipeError):  # it has ended
                os.write(self._pipe, json.dumps([member.start, is_whole, place]).encode() + b"\n")

    def send_ending(self, ending: str) -> None:
        """Send how this rank is about to end; safe in a signal handler."""
        if self._connection is not None:
            with suppress(OSError):  # the monitor has ended
                self._connection.send(ending.encode()[:_LONGEST_ENDING], socket.MSG_DONTWAIT)


def _address(word: str) -> str:
    """In the kernel's own name space: no file is left."""
    return f"\0tlt-{word}"


def _detach(own: Set[int]) -> None:
    """Leave the rank's group, and close what it has open but its errors and ``own``: a launcher waits for the end."""
    os.setsid()
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nowhere, descriptor)
    for path in list(Path("/proc/self/fd").iterdir()):  # some limits allow a billion
        if int(path.name) not in {0, 1, 2, *own}:
            with suppress(OSError):  # the list's own
                os.close(int(path.name))


def _await_exit(pipe: int, listener: socket.socket) -> None:
    """Wait for the first rank to exit, and report it if no rank has sent how it ends."""
    start, is_whole, folder = "", False, None
    listener.setblocking(False)
    ranks: dict[int, tuple[int, socket.socket]] = {}
    poll = select.epoll()  # gives events in the order in which they came, however late this process looks
    poll.register(pipe, select.EPOLLIN)
    poll.register(listener, select.EPOLLIN)
    while True:
        events = dict(poll.poll())
        while accepted := _accept_rank(listener):
            ranks[accepted[1].fileno()] = accepted
            poll.register(accepted[1], select.EPOLLIN)
        for number in [number for number in dict.fromkeys((*events, *ranks)) if number in ranks]:
            rank, connection = ranks[number]
            ending = _read_ending(connection)
            if ending is None:
                continue
            if is_whole and _OF_ANOTHER.search(ending):  # of one here, whose own connection is not closed yet
                poll.unregister(connection)
                del ranks[number]
                continue
            if not ending:
                signal.alarm(_LAST_SECONDS)
                _report_exit(start, socket.gethostname(), folder, rank, {other for other, _ in ranks.values()})
            return  # after a message, this rank is the cause, or has lost one that may be on another node
        if pipe in events:
            sent = os.read(pipe, _MAX_MESSAGE_BYTES)
            if not sent and not ranks:  # the first rank has ended before any could be watched
                return
            if not sent:
                poll.unregister(pipe)
                continue
            start, is_whole, place = json.loads(sent.splitlines()[-1])
            folder = Path(place) if place else None


def _read_ending(connection: socket.socket) -> str | None:
    """How a rank has sent that it ends; empty if it has exited without a message; None while it lives."""
    try:
        return connection.recv(_LONGEST_ENDING).decode(errors="replace")
    except BlockingIOError:
        return None
    except OSError:  # the connection was reset
        return ""


def _accept_rank(listener: socket.socket) -> tuple[int, socket.socket] | None:
    """A rank that waits to be accepted, and its connection; None if there is none, of this user and saying which."""
    try:
        connection, _ = listener.accept()
    except BlockingIOError:
        return None
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    connection.settimeout(_POLL_SECONDS)
    with suppress(OSError, ValueError):
        if user == os.getuid():
            rank = int(connection.recv(16))
            connection.setblocking(False)
            return rank, connection
    connection.close()
    return None


def _report_exit(start: str, host: str, folder: Path | None, ended: int, watched: Set[int]) -> None:
    """Write the verdict on the rank that has exited, unless one elsewhere has said why it ends: that is the cause.

    Args:
        folder: of the status files; None: not claimed yet.
        watched: ranks whose exit this process would have seen first.
    """
    if folder is None:
        _print_to_stderr(f"rank {ended} on {host} was killed or crashed before the run's folder was claimed")
        return
    records = _read_start_records(folder, start)
    if len({record.host for record in records}) > 1:  # ranks elsewhere may have ended before
        end = time.monotonic() + _OTHER_NODES_SECONDS
        while time.monotonic() < end and not any(
            _has_own_reason(record) for record in records if record.rank not in watched
        ):
            time.sleep(_POLL_SECONDS)
            records = _read_start_records(folder, start)
    own = next((record for record in records if record.rank == ended), None)
    if (own and own.ending) or any(_has_own_reason(record) for record in records if record.rank not in watched):
        return
    # a busy rank may not have written its status yet
    name, place = (
        own.name if own else f"rank {ended} on {host}",
        f"last seen in {own.phase_and_step_text}" if own else "not seen yet",
    )
    also = "; the cause may also be a node that was lost" * (len({record.host for record in records}) > 1)
    line = f"{name} was killed or crashed, {place}{also}"
    with suppress(OSError):  # no room for it: the next start names no rank
        if write_verdict_if_first(folder, start, line):
            _print_to_stderr(line)


def _print_to_stderr(line: str) -> None:
    os.write(2, f"tlt: {line}; the same command resumes\n".encode())


def _has_own_reason(record: Record) -> bool:
    """Whether a rank has given a reason of its own for its end."""
    return bool(record.ending) and not _OF_ANOTHER.search(record.ending)


def _read_start_records(folder: Path, start: str) -> list[Record]:
    """What the ranks of a start have said, as far as it can be read."""
    return [record for record in read_records(folder, OSError) if record.start == start]
