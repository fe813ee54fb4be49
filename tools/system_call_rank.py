"""A rank of ``tlt`` one of whose system calls fails, or writes less than it was asked to, as ``TLT_SYSTEM_CALL`` says.

The kernel stops the rank at each call of one kind and asks a second process what becomes of it (seccomp's user
notifications, seccomp_unotify(2)). So calls are counted over all threads in one sequence, and by the file that they are
about. A write that is cut short is made by that process through the rank's own file: the first half of the bytes is
there, the offset has moved, and the caller learns the number, as on a disk that is full. A failed ``close`` closes, as
Linux does. Started by ``system_call_faults.py`` as ``python -m mpi4py tools/system_call_rank.py train ...``.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import re
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CALLS = {
    "openat": {257: "at", 2: "path"},
    "write": {1: "file", 18: "file", 20: "file"},
    "fsync": {74: "file", 75: "file"},
    "rename": {82: "path", 264: "at", 316: "at"},
    "unlink": {87: "path", 263: "at", 84: "path"},
    "close": {3: "file"},
    "mmap": {9: "mapped"},
    "read": {0: "file", 17: "file", 217: "file"},
    "mkdir": {83: "path", 258: "at"},
    "chmod": {90: "path", 91: "file", 268: "at"},
    "truncate": {77: "file"},
}
"""Kind -> numbers of its system calls on x86-64, each with how it names its file; rmdir counts as unlink, getdents as
read."""
WRITE, PWRITE, CLOSE = 1, 18, 3
PARTS = ("resume", "step", "checkpoint", "watch")
"""Start of the process to its first step; that step; all after it. The status file of the rank, whose calls depend on
the clock, is a part of its own."""
_STATUS = re.compile(r"/status/rank-\d+(\.stacks)?$")
_LIBC = ctypes.CDLL(None, use_errno=True)
_SECCOMP, _PIDFD_OPEN, _PIDFD_GETFD = 317, 434, 438
_RECEIVE, _SEND, _ADD_FILE = 0xC0502100, 0xC0182101, 0x40182103
_CONTINUE, _SET_NUMBER = 1, 1
_CURRENT_FOLDER = -100


@dataclass(frozen=True)
class Fault:
    """Which call of a rank fails, and how."""

    part: str
    call: str = ""
    """Of ``CALLS``; empty: none fails, and all are counted."""
    number: int = 0
    """From 1 in its part."""
    error: str = "EIO"
    """A name of errno; ``short``: a write is cut short."""
    stays: bool = False
    """Whether all later calls of this kind fail as well; after a short write with ENOSPC."""
    rank: int = 0

    @property
    def kinds(self) -> list[str]:
        """The calls that are intercepted."""
        return [self.call] if self.call else [*CALLS]


@dataclass
class Report:
    """What the second process has seen."""

    files: dict[str, list[str]] = field(default_factory=dict)
    """Part and kind of call -> the file of each, in order."""
    struck: str = ""
    """The file of the first call that failed; empty: it was never made."""


def unavailable() -> str:
    """Why system calls cannot be intercepted here; empty if they can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"written for Linux on x86-64, not for {sys.platform} on {platform.machine()}"
    actions = Path("/proc/sys/kernel/seccomp/actions_avail")
    if not actions.exists() or "user_notif" not in actions.read_text():
        return "the kernel has no user notifications of seccomp"
    child = os.fork()
    if not child:
        try:
            intercept([*CALLS["mkdir"]])  # none that the end of a process makes
        except OSError:
            os._exit(1)
        os._exit(0)
    return "this process may not set a filter of system calls" if os.waitpid(child, 0)[1] else ""


def intercept(numbers: Sequence[int]) -> int:
    """From here on this thread, and all that it starts, asks the file that is returned before each of these calls.

    Raises:
        OSError: the kernel refuses.
    """
    steps = [(0x20, 0, 0, 0), *((0x15, len(numbers) - place, 0, each) for place, each in enumerate(numbers))]
    code = b"".join(struct.pack("HBBI", *step) for step in (*steps, (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x7FC00000)))
    held = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held))
    if _LIBC.prctl(38, 1, 0, 0, 0) or (file := _LIBC.syscall(_SECCOMP, 1, 1 << 3, program)) < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return int(file)


@dataclass(frozen=True)
class Call:
    """A call that the kernel has stopped."""

    key: int
    thread: int
    number: int
    arguments: tuple[int, ...]

    @property
    def file(self) -> int:
        """The first argument, as a number of a file."""
        return ctypes.c_int(self.arguments[0]).value

    def path(self, how: str) -> str:
        """The file that it is about; empty where there is none."""
        if how in ("file", "mapped"):
            file = ctypes.c_int(self.arguments[4]).value if how == "mapped" else self.file
            return self._link(f"fd/{file}") if file >= 0 else ""
        folder, place = (self.file, self.arguments[1]) if how == "at" else (_CURRENT_FOLDER, self.arguments[0])
        name = os.fsdecode(self.memory(place, 4096).partition(b"\0")[0])
        if name.startswith("/"):
            return name
        return f"{self._link('cwd' if folder == _CURRENT_FOLDER else f'fd/{folder}')}/{name}"

    def memory(self, place: int, size: int) -> bytes:
        """What the thread has in its memory there."""
        with Path(f"/proc/{self.thread}/mem").open("rb", buffering=0) as memory:
            memory.seek(place)
            try:
                return memory.read(size)
            except OSError:  # the last page ends before
                memory.seek(place)
                return memory.read(min(size, mmap.PAGESIZE - place % mmap.PAGESIZE))

    def _link(self, name: str) -> str:
        try:
            return os.readlink(f"/proc/{self.thread}/{name}")  # noqa: PTH115
        except OSError:
            return ""


class Interceptor:
    """Answers for the kernel; all in the process beside the rank."""

    def __init__(
        self, fault: Fault, roots: Sequence[str], report: Path, asked: int, rank: int, part: mmap.mmap
    ) -> None:
        self._fault, self._roots, self._report = fault, tuple(roots), report
        self._asked, self._rank, self._part = asked, rank, part
        self._kinds = {number: (kind, how) for kind in fault.kinds for number, how in CALLS[kind].items()}
        self.report = Report()

    def answer_all(self) -> None:
        """Until no thread is left that could ask."""
        poll = select.poll()
        poll.register(self._asked, select.POLLIN)
        self._tell()
        while not poll.poll()[0][1] & select.POLLHUP:
            question = bytearray(80)
            with suppress(FileNotFoundError):  # the thread was killed, or woken by a signal, and asks again
                fcntl.ioctl(self._asked, _RECEIVE, question)
                key, thread, _, number, _, _, *arguments = struct.unpack("QIIiIQ6Q", question)
                value, error, flags = self._answer(Call(key, thread, number, tuple(arguments)))
                fcntl.ioctl(self._asked, _SEND, struct.pack("QqiI", key, value, -error, flags))

        self._tell()

    def _tell(self) -> None:
        part = self._report.with_suffix(".part")  # the launcher may kill this process at any moment
        part.write_text(json.dumps(asdict(self.report)))
        part.replace(self._report)

    def _answer(self, call: Call) -> tuple[int, int, int]:
        """What the call returns, its errno, and flags."""
        fault, go_on = self._fault, (0, 0, _CONTINUE)
        kind, how = self._kinds[call.number]
        path = call.path(how)
        if not path.startswith(self._roots) or not Path(f"/proc/{self._rank}/task/{call.thread}").exists():
            return go_on
        part = "watch" if _STATUS.search(path) else PARTS[self._part[0]]
        seen = self.report.files.setdefault(f"{part} {kind}", [])
        seen.append(path)
        is_first = (part, kind, len(seen)) == (fault.part, fault.call, fault.number)
        if not is_first and not (fault.stays and self.report.struck):
            return go_on
        if is_first:
            self.report.struck = path
            self._tell()  # now, for the launcher may end this process with the rank
        if fault.error == "short" and is_first:
            return self._write_half(call), 0, 0
        if call.number == CLOSE:
            self._close(call)
        return 0, errno.ENOSPC if fault.error == "short" else int(getattr(errno, fault.error)), 0

    def _write_half(self, call: Call) -> int:
        _, place, size, offset = call.arguments[:4]
        if call.number not in (WRITE, PWRITE):
            place, size = struct.unpack("QQ", call.memory(place, 16))  # of writev the first piece
        data = call.memory(place, max(1, size // 2))
        process = os.pidfd_open(self._rank)
        file = _LIBC.syscall(_PIDFD_GETFD, process, call.file, 0)
        written = os.pwrite(file, data, offset) if call.number == PWRITE else os.write(file, data)
        os.close(file)
        os.close(process)
        return written

    def _close(self, call: Call) -> None:
        """Have the rank's number stand for another file, and so close the one that it stood for."""
        other = os.open(os.devnull, os.O_RDONLY)
        fcntl.ioctl(self._asked, _ADD_FILE, struct.pack("QIIII", call.key, _SET_NUMBER, other, call.file, 0))
        os.close(other)


def split(fault: Fault, roots: Sequence[str], report: Path, interceptor: type[Interceptor] = Interceptor) -> mmap.mmap:
    """Continue as the rank in a process of its own, while this one answers for the kernel, and ends as the rank does.

    Returns the byte that tells which part the rank is in.
    """
    part, (ours, theirs) = mmap.mmap(-1, 1), socket.socketpair()
    rank = os.fork()
    if not rank:
        ours.close()
        _LIBC.prctl(1, signal.SIGKILL)  # with the other one
        asked = intercept([number for kind in fault.kinds for number in CALLS[kind]])
        socket.send_fds(theirs, [b"."], [asked])
        theirs.close()
        os.close(asked)
        return part
    theirs.close()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, lambda number, _: os.kill(rank, number))
    interceptor(fault, roots, report, socket.recv_fds(ours, 1, 1)[1][0], rank, part).answer_all()
    _, status = os.waitpid(rank, 0)
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def mark_parts(part: mmap.mmap) -> None:
    """Have the byte tell where the rank is: before its first step, in it, after it."""
    from tlt_hpc import train

    true = train.take_step

    def take_step(*arguments: Any, **named: Any) -> bool:
        part[0] = PARTS.index("step")
        try:
            return true(*arguments, **named)
        finally:
            part[0] = PARTS.index("checkpoint")

    set_call: Callable[[Any, str, Any], None] = setattr
    set_call(train, "take_step", take_step)


def described() -> Iterator[Any]:
    """The fault, the folders whose files count, and where to report; from the environment."""
    told = json.loads(os.environ["TLT_SYSTEM_CALL"])
    yield from (Fault(**told["fault"]), told["roots"], Path(told["report"]))


if __name__ == "__main__":
    from tlt_hpc.cli.main import main
    from tlt_hpc.cluster.local import launched_rank

    wanted, folders, place = described()
    if (launched_rank(os.environ) or 0) == wanted.rank:
        mark_parts(split(wanted, folders, place))
    sys.exit(main())
