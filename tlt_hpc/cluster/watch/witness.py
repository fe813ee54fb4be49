"""A process beside the ranks of a host that sees one die, says so, and ends the ones left behind.

Where a rank is killed, launchers end the others within milliseconds, before any of them could tell which went first,
and often before this process is given a core: it asks epoll, whose events come in the order in which they happened, and
takes ranks in the order in which their ties broke. So the first rank of each host starts this, before it has MPI. It
sleeps until a rank's process ends, reads of what, writes the one line and, where the launcher does not, ends what is
left. As a program it reads lines of JSON: which ranks there are, and where their status files.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tlt_hpc.cluster.watch.process import cause_of, count_memory_kills, look_at, open_end
from tlt_hpc.cluster.watch.record import FINISHED, DamagedRecordError, Record, claim_verdict, read_record, read_verdict
from tlt_hpc.cluster.watch.tie import Knot, address_of

_LOCAL_RANK_VARIABLES = ("SLURM_LOCALID", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK")
LOOK_SECONDS = 5.0
"""How often it asks whether another host has ended the job."""
GRACE_SECONDS = 10.0
"""How long the launcher has to end the other ranks."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of one host, and where they leave their status."""

    start: str
    host: str
    size: int
    """Ranks on all hosts."""
    pids: dict[int, int]
    folder: str | None

    @property
    def address(self) -> bytes:
        """Where their witness listens for ties."""
        return address_of(self.start, self.host, self.pids[min(self.pids)])


class Witness:
    """A rank's hand on its host's witness; only the first rank of a host keeps one."""

    def __init__(self) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-m", "tlt_hpc.cluster.watch.witness"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,  # launchers kill a rank's process group
        )

    def tell(self, ranks: Ranks) -> None:
        """Say whom to watch; where another rank is the host's first, give way to its witness."""
        if self._process is None or self._process.stdin is None:
            return
        if ranks.pids[min(ranks.pids)] != os.getpid():
            self.close()
            return
        try:
            self._process.stdin.write(json.dumps(asdict(ranks)).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # killed; the watch of each rank goes on without it
            self._process = None

    def close(self) -> None:
        """Let it go once all its ranks have ended."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None


def may_be_first(environment: Mapping[str, str]) -> bool:
    """Whether this may be the first rank of its host, by its launcher's variables."""
    told = [environment[name] for name in _LOCAL_RANK_VARIABLES if name in environment]
    return not told or "0" in told


class Ear:
    """What the first rank writes, a line at a time."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self._rest = descriptor, b""

    def lines(self) -> list[bytes] | None:
        """The lines that are whole; None once there is nobody to write any."""
        data = os.read(self.descriptor, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines if data else None


def as_ranks(line: bytes) -> Ranks:
    """What ``Witness.tell`` wrote."""
    told = json.loads(line)
    return Ranks(**{**told, "pids": {int(rank): pid for rank, pid in told["pids"].items()}})


class Vigil:
    """What the witness knows: the ranks that are left, and whether the job's end has been told."""

    def __init__(self, ear: Ear | None = None) -> None:
        self.ranks: Ranks | None = None
        self._ear = ear
        self._epoll = select.epoll()
        if ear is not None:
            self._epoll.register(ear.descriptor, select.EPOLLIN)
        self.descriptors: dict[int, int] = {}
        """What tells of the end of a process -> rank, of those that are left."""
        self._knot: Knot | None = None
        self._order: list[int] = []
        """Ranks that have ended or begun to, in that order, of which nothing has been made yet."""
        self._said: dict[int, str] = {}
        """Rank -> how it has said that it ends, of this host's."""
        self._said_before: dict[int, dict[int, str]] = {}
        """The same of all hosts, by the time that each has begun to end: who fails for want of it says so later."""
        self._codes: dict[int, int | None] = {}
        """Of those of them that have ended, how; None where nobody knows."""
        self._is_told = False
        self._ends_in: float | None = None
        """Seconds after which what is left is killed."""
        self._memory_kills = count_memory_kills()

    @property
    def is_over(self) -> bool:
        """Whether there is nobody left to watch or to listen to."""
        return self._ear is None and not self.descriptors

    @property
    def timeout(self) -> float:
        """Seconds to sleep for, unless a rank ends before."""
        return LOOK_SECONDS if self._ends_in is None else min(LOOK_SECONDS, self._ends_in)

    def look(self) -> None:
        """Sleep until something happens, and take all that has, in the order in which it did."""
        events = self._epoll.poll(self.timeout)
        for descriptor, _ in events:
            if self._ear is not None and descriptor == self._ear.descriptor:
                self._listen(self._ear)
            elif self._knot is not None and descriptor == self._knot.descriptor:
                self._tie(self._knot)
            elif self._knot is not None and descriptor in self._knot.ties:
                self._hear_tie(self._knot, descriptor)
            elif descriptor in self.descriptors:  # no tie that has been let go a moment ago
                self.ended(descriptor)
        if not events:
            self.slept()

    def _listen(self, ear: Ear) -> None:
        lines = ear.lines()
        if lines is None:
            self._epoll.unregister(ear.descriptor)
            self._ear = None
        for line in lines or []:
            self.hear(as_ranks(line))

    def hear(self, ranks: Ranks) -> None:
        """Take what the first rank tells."""
        if self.ranks is None:
            with suppress(OSError):  # somebody else has the name: ends count when they are over, then
                self._knot = Knot(ranks.address)
                self._epoll.register(self._knot.descriptor, select.EPOLLIN)
            for rank, pid in ranks.pids.items():
                try:
                    descriptor = open_end(pid)
                except ProcessLookupError:
                    self._explain(ranks, rank, None)
                    continue
                self.descriptors[descriptor] = rank
                self._epoll.register(descriptor, select.EPOLLIN)
        self.ranks = ranks

    def _tie(self, knot: Knot) -> bool:
        """Tie whoever asks for it; False where nobody does."""
        descriptor = knot.accept()
        if descriptor is not None:
            self._epoll.register(descriptor, select.EPOLLIN)
        return descriptor is not None

    def _hear_tie(self, knot: Knot, descriptor: int) -> None:
        """A rank says how it will end, or has begun to end."""
        pid, said = knot.hear(descriptor)
        rank = next((rank for rank, own in self.ranks.pids.items() if own == pid), None) if self.ranks else None
        if self.ranks is None or rank is None:
            return
        if said is not None:
            self._said[rank] = said
            return
        if rank in self.descriptors.values():
            self._order.append(rank)  # closed, which epoll knows
        elsewhere = dict[int, str]()
        if not self._said_before and rank not in self._said and self.ranks.folder is not None:
            endings = _endings(_records(self.ranks, Path(self.ranks.folder)))
            elsewhere = {other: ending for other, ending in endings.items() if other not in self.ranks.pids}
        self._said_before[rank] = elsewhere | self._said

    def slept(self) -> None:
        """``timeout`` has passed: end what is left where it is time, or ask whether another host has ended the job."""
        if self._codes:  # the end of one that began to end before them does not come
            self._order = [rank for rank in self._order if rank in self._codes]
            self._take_ends()
        if self._ends_in is not None:
            self._ends_in -= self.timeout
            if self._ends_in <= 0:
                self._kill()
        elif self.ranks is not None and self.ranks.folder is not None and _is_ended(self.ranks):
            self._is_told, self._ends_in = True, GRACE_SECONDS

    def ended(self, descriptor: int) -> None:
        """A rank's process has ended: say so, unless it or the job has ended with a word."""
        assert self.ranks is not None
        rank = self.descriptors[descriptor]
        self._hear_out(self.ranks.pids[rank])
        del self.descriptors[descriptor]
        process = look_at(self.ranks.pids[rank])
        self._epoll.unregister(descriptor)
        os.close(descriptor)
        self._codes[rank] = process.exit_code if process is not None and process.state == "Z" else None
        if rank not in self._order:  # it was not tied
            self._order.append(rank)
        self._take_ends()

    def _hear_out(self, pid: int) -> None:
        """What a process that has ended had said before, of which the news may come later than of its end."""
        if self._knot is None:
            return
        while self._tie(self._knot):
            continue
        for tie in [tie for tie, (_, own) in self._knot.ties.items() if own == pid]:
            while tie in self._knot.ties:
                self._hear_tie(self._knot, tie)

    def _take_ends(self) -> None:
        """Make what is to be made of the ends that no other's began before."""
        while self._order and self._order[0] in self._codes:
            rank = self._order.pop(0)
            code = self._codes.pop(rank)
            if not self._is_told and code != 0:
                assert self.ranks is not None
                self._explain(self.ranks, rank, code)

    def _explain(self, ranks: Ranks, rank: int, code: int | None) -> None:
        if ranks.folder is None:  # a mistake of the user's is told by the rank itself
            self._is_told = True
            if code is not None and code & 0x7F:
                self._end(f"rank {rank} on {ranks.host} {cause_of(code)} before the run began{self._memory()}")
            return
        records = _records(ranks, Path(ranks.folder))
        said = self._said_before.get(rank, self._said | _endings(records))  # without an entry it was not tied
        has_finished = said.get(rank) == FINISHED
        if has_finished and code is None:
            return  # the launcher knows the status, which is 0 unless it says otherwise
        self._is_told = True
        # launchers end the other ranks for any end but this one
        if endings := [ending for ending in said.values() if ending != FINISHED]:
            if any(ending.startswith(("failed", "stalled")) for ending in endings):
                self._ends_in = GRACE_SECONDS
            return
        place = f", last seen in {records[rank].place}" if rank in records else ""
        place = ", after it had finished" if has_finished else place
        line = f"rank {rank} on {ranks.host} {cause_of(code)}{place}{self._memory()}"
        try:
            is_first = claim_verdict(Path(ranks.folder), ranks.start, line)
        except OSError:  # full, or gone: then this is the only place where it stands
            is_first = True
        self._end(line if is_first else "")

    def _end(self, line: str) -> None:
        if line:
            with suppress(OSError):  # the launcher has gone, and what is left is to be ended all the same
                os.write(2, f"tlt: {line}; the same command goes on from the last committed step\n".encode())
        self._ends_in = GRACE_SECONDS

    def _memory(self) -> str:
        kills = count_memory_kills() - self._memory_kills
        return f"; the system has killed {kills} for want of memory on this host since the start" if kills else ""

    def _kill(self) -> None:
        assert self.ranks is not None
        for rank in self.descriptors.values():
            with suppress(ProcessLookupError):
                os.kill(self.ranks.pids[rank], signal.SIGKILL)
        self._ends_in = None


def _records(ranks: Ranks, folder: Path) -> dict[int, Record]:
    """What can be read of all ranks of this start."""
    found = {}
    for rank in range(ranks.size):
        try:
            record = read_record(folder, rank)
        except (OSError, DamagedRecordError):
            continue
        if record.start == ranks.start:
            found[rank] = record
    return found


def _endings(records: Mapping[int, Record]) -> dict[int, str]:
    """How those have ended that have said so in their records."""
    return {rank: record.ending for rank, record in records.items() if record.ending}


def _is_ended(ranks: Ranks) -> bool:
    """Whether another host has told why this start ends."""
    assert ranks.folder is not None
    try:
        told = read_verdict(Path(ranks.folder))
    except OSError:
        return False
    return told is not None and told[0] == ranks.start


def main() -> None:
    """Be the witness of a host until all of its ranks have ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the ranks
    vigil = Vigil(Ear(0))
    while not vigil.is_over:
        vigil.look()


if __name__ == "__main__":
    main()
