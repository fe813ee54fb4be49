"""A process beside the ranks of a host that names the rank that died first, and of what.

A launcher ends the other ranks within milliseconds of a death, before any of them could report it. So the first rank of
each host starts this program, before it has MPI, and every rank of the host keeps a Unix socket to it open. The system
closes the socket of a process that dies, epoll returns sockets in the order in which they were closed, and what the
ranks have reported (finished, failed) tells a death from an ordinary end. The launcher ends the other ranks.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tlt_hpc.cluster.watch.beat import Member
from tlt_hpc.cluster.watch.process import cause_of, count_memory_kills, look_at
from tlt_hpc.cluster.watch.record import FINISHED, DamagedRecordError, Record, claim_verdict, read_record

_HIGH_DESCRIPTOR = 1000
"""Linux closes a dying process's files from the highest number down: before the pipes that its launcher watches."""
_MAX_REPORT_BYTES = 8192
_MAX_ENDING = 200
"""Characters of an ending that are reported: a compiler's error may be as long as its log."""
DEATH_SECONDS = 5.0
"""How long a process may take from closing its files to its end."""


@dataclass(frozen=True)
class RankReport:
    """What a rank tells its host's monitor of itself."""

    start: str
    rank: int
    host: str
    pid: int
    size: int
    """Ranks on all hosts."""
    num_local: int
    """Ranks on this host."""
    folder: str | None
    """Of the status files, once the run's folder is claimed."""
    ending: str
    """How the rank is about to end, once it knows; the rank has then told the user itself."""


def address_of(start: str, host: str) -> bytes:
    """Where the monitor of a host listens: a socket name without a file."""
    return b"\0tlt-" + hashlib.sha256(f"{start} {host}".encode()).hexdigest()[:32].encode()


class Liveness:
    """A rank's connection to its host's monitor, which the first rank of the host starts.

    Only the end of the process closes the connection: a rank that has finished may still be killed.
    """

    def __init__(self, starts_monitor: bool) -> None:
        self._reported: RankReport | None = None
        self.descriptor: int | None = None
        self._monitor: subprocess.Popen[bytes] | None = None
        if starts_monitor:
            paths = os.pathsep.join(path for path in sys.path if path)
            self._monitor = subprocess.Popen(
                [sys.executable, "-m", "tlt_hpc.cluster.watch.monitor"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,  # launchers kill a rank's process group
            )

    def report(self, member: Member, folder: Path | None, ending: str) -> None:
        """RankReport what is new; connects first, if the monitor listens already. Never waits."""
        if not member.neighbours:
            return
        where = None if folder is None else str(folder.absolute())
        report = RankReport(
            member.start,
            member.rank,
            member.host,
            os.getpid(),
            member.size,
            len(member.neighbours),
            where,
            ending[:_MAX_ENDING],
        )
        address = address_of(member.start, member.host)
        if self._reported is None:
            self._tell_monitor(address, member.rank == min(member.neighbours))
        if self.descriptor is None:
            self._connect(address)
        if self.descriptor is not None and report != self._reported:
            with suppress(OSError):  # the monitor was killed: the watch of each rank continues without it
                os.write(self.descriptor, json.dumps(asdict(report)).encode())
            self._reported = report

    def close(self) -> None:
        """Let the monitor end once all its ranks have ended."""
        if self._monitor is not None and self._monitor.stdin is not None:
            with suppress(BrokenPipeError):  # it was killed before it had read its address
                self._monitor.stdin.close()
        self._monitor = None

    def _tell_monitor(self, address: bytes, is_first: bool) -> None:
        """Tell the monitor that this rank has started where to listen, or that another rank's is in charge."""
        if self._monitor is None or self._monitor.stdin is None or self._monitor.stdin.closed:
            return
        if not is_first:
            self.close()
            return
        with suppress(BrokenPipeError):  # it was killed
            self._monitor.stdin.write(address.hex().encode() + b"\n")
            self._monitor.stdin.flush()

    def _connect(self, address: bytes) -> None:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            end.setblocking(False)
            end.connect(address)
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            number = _HIGH_DESCRIPTOR if limit == resource.RLIM_INFINITY else min(_HIGH_DESCRIPTOR, limit - 1)
            self.descriptor = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, number)


class ProcessMonitor:
    """Listens to the ranks of a host, until all have ended; ``control`` is read until it ends, too."""

    def __init__(self, address: bytes, control: int) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(address)
        self._listener.listen(1024)
        self._connections: dict[int, socket.socket] = {}
        self._reports: dict[int, RankReport] = {}
        """By rank, the newest of each."""
        self._ranks: dict[int, int] = {}
        """Descriptor of a connection -> rank."""
        self._control: int | None = control
        self._is_explained = False
        self._memory_kills = count_memory_kills()
        self._epoll = select.epoll()
        for descriptor in (control, self._listener.fileno()):
            self._epoll.register(descriptor, select.EPOLLIN)

    @property
    def is_over(self) -> bool:
        """Whether nobody is left to listen to."""
        return self._control is None and not self._connections

    def look(self, seconds: float | None = None) -> None:
        """Wait for the next event, for so long at most, and handle it: the order of events matters."""
        for descriptor, _ in self._epoll.poll(seconds, 1):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor == self._control:
                if not os.read(descriptor, 1):
                    self._epoll.unregister(descriptor)
                    self._control = None
            else:
                self._read(descriptor)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._connections[connection.fileno()] = connection
        self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _read(self, descriptor: int) -> None:
        """Take all that a rank has reported, and its end if it has ended by now."""
        try:
            while data := self._connections[descriptor].recv(_MAX_REPORT_BYTES):
                report = RankReport(**json.loads(data))
                self._reports[report.rank] = report
                self._ranks[descriptor] = report.rank
        except BlockingIOError:
            return
        except ConnectionError:  # it has ended
            pass
        self._epoll.unregister(descriptor)
        self._connections.pop(descriptor).close()
        if descriptor in self._ranks:
            self._closed(self._reports[self._ranks.pop(descriptor)])

    def _closed(self, report: RankReport) -> None:
        """Explain the end of a rank's process, unless a rank has said already why the job ends."""
        if self._is_explained or len(self._reports) < report.num_local:  # one that never connected may have been first
            return
        has_finished = report.ending == FINISHED
        # read before the wait: a rank of another host that fails because of this end says so later
        records = {} if report.ending else _records(report)
        endings = {record.ending for rank, record in records.items() if rank not in self._reports}
        endings |= {other.ending for other in self._reports.values()}
        code = _exit_code(report.pid)
        if code == 0 or (has_finished and code is None):  # only the launcher knows the status, which is 0 as a rule
            return
        self._is_explained = True
        if endings - {"", FINISHED}:
            return
        line = f"rank {report.rank} on {report.host} {cause_of(code)}{_place(report, records)}{self._memory()}"
        if _is_first(report, line):
            with suppress(OSError):  # nobody reads any more
                os.write(2, f"tlt: {line}; the same command goes on from the last committed step\n".encode())

    def _memory(self) -> str:
        kills = count_memory_kills() - self._memory_kills
        return f"; the system has killed {kills} for want of memory on this host since the start" if kills else ""


def _place(report: RankReport, records: Mapping[int, Record]) -> str:
    if report.ending == FINISHED:
        return ", after it had finished"
    if report.rank in records:
        return f", last seen in {records[report.rank].place}"
    return " before the run began" if report.folder is None else ""


def _exit_code(pid: int) -> int | None:
    """How a process that has closed its files ends, as ``wait`` gives it; None if its parent has asked already."""
    end = time.monotonic() + DEATH_SECONDS
    while (process := look_at(pid)) is not None and process.state not in ("Z", "X"):
        if time.monotonic() >= end:
            return None
        time.sleep(2e-4)
    return None if process is None else process.exit_code


def _is_first(report: RankReport, line: str) -> bool:
    """Leave the line in the run's folder; False if another host has left one already."""
    if report.folder is None:
        return True
    try:
        return claim_verdict(Path(report.folder), report.start, line)
    except OSError:  # full, or gone: then standard error is the only place
        return True


def _records(report: RankReport) -> dict[int, Record]:
    """What can be read of all ranks of this start."""
    found: dict[int, Record] = {}
    for rank in range(report.size if report.folder is not None else 0):
        with suppress(OSError, DamagedRecordError):
            record = read_record(Path(str(report.folder)), rank)
            if record.start == report.start:
                found[rank] = record
    return found


def main() -> None:
    """Monitor the ranks of a host until all have ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the ranks
    address = sys.stdin.readline().strip()
    if not address:  # another rank is the first of this host
        return
    monitor = ProcessMonitor(bytes.fromhex(address), sys.stdin.fileno())
    while not monitor.is_over:
        monitor.look()


if __name__ == "__main__":
    main()
