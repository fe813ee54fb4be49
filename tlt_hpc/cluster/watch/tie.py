"""A rank's tie to its host's witness: a socket that breaks as a process begins to end.

That a process has ended is seen late, when its last thread is gone; by then the launcher may have learned of the end
from a socket of its own, and have killed other ranks, which are gone sooner where cores are scarce. Linux closes
the files of a dying process from the highest number down, so the tie, with a high one, breaks before anything that a
launcher holds. Who breaks which tie is told by the system, not by the rank. What a rank has to say of its own end goes
the same way, for its folder may be what it ends for.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import resource
import socket
import struct
from contextlib import suppress

_HIGHEST = 1000
"""The file number that a tie has at least, where the process may have so many: more than what a launcher hands down."""


_LONGEST = 1000
"""Bytes of an ending."""


def address_of(start: str, host: str, witnessed_by: int) -> bytes:
    """Where the witness of a host listens: a name without a file.

    Args:
        start: of the job.
        witnessed_by: process id of the rank that keeps the witness.
    """
    return b"\0tlt-" + hashlib.sha256(f"{start} {host} {witnessed_by}".encode()).hexdigest()[:32].encode()


class Tie:
    """A rank's end of it; there is none until ``fasten`` has found the witness listening.

    Nothing but the end of the process closes it: a rank that has finished may still be killed.
    """

    def __init__(self) -> None:
        self.descriptor: int | None = None

    def fasten(self, address: bytes) -> None:
        """Connect, or leave it for the next time; never waits."""
        if self.descriptor is not None:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end, suppress(OSError):
            end.setblocking(False)
            end.connect(address)
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            number = _HIGHEST if most == resource.RLIM_INFINITY else min(_HIGHEST, most - 1)
            self.descriptor = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, number)

    def say(self, ending: str) -> None:
        """How this rank is about to end, of which it has told the user itself."""
        if self.descriptor is not None:
            with suppress(OSError):  # the witness is gone, or hears nothing
                os.write(self.descriptor, ending.encode()[:_LONGEST])


class Knot:
    """The witness's end of all ties of its host."""

    def __init__(self, address: bytes) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind(address)
        self._socket.listen(1024)
        self.descriptor = self._socket.fileno()
        """Readable where somebody wants to be tied."""
        self.ties: dict[int, tuple[socket.socket, int]] = {}
        """Descriptor -> tie and the process id at its other end; readable where it has broken, or somebody speaks."""

    def accept(self) -> int | None:
        """The descriptor of a new tie; None where whoever wanted it has gone."""
        try:
            end, _ = self._socket.accept()
        except OSError:
            return None
        pid, _, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        self.ties[end.fileno()] = end, pid
        return end.fileno()

    def hear(self, descriptor: int) -> tuple[int, str | None]:
        """The process id at the other end of a tie, and what it says; None where the tie has broken, and is let go."""
        end, pid = self.ties[descriptor]
        try:
            said = end.recv(_LONGEST)
        except OSError:
            said = b""
        if said:
            return pid, said.decode(errors="replace")
        end.close()
        del self.ties[descriptor]
        return pid, None
