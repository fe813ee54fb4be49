"""Asks a second process what becomes of each system call of a rank: one fails, or all that change files are recorded.

The kernel stops the rank at each call of one kind and asks that process (seccomp's user notifications,
seccomp_unotify(2)). So calls are counted over all threads in one sequence, and by the file that they are about. A write
that is cut short is made by that process through the rank's own file: the first half of the bytes is there, the offset
has moved, and the caller learns the number, as on a disk that is full. A failed ``close`` closes, as Linux does. What
is recorded has every byte that is written, read from the rank's memory.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import pickle
import platform
import re
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
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
CHANGES = ("openat", "write", "fsync", "rename", "unlink", "mkdir", "truncate")
"""Kinds that may change files."""
WRITE, PWRITE, CLOSE, RENAME = 1, 18, 3, 82
PARTS = ("resume", "step", "checkpoint", "watch")
"""Start of the process to its first step; that step; all after it. The status file of the rank, whose calls depend on
the clock, is a part of its own."""
_STATUS = re.compile(r"/status/rank-\d+(\.stacks)?$")
NOT_RECORDED = re.compile(r"/status/rank-\d+(\.stacks)?$|/shared-\w+$")
"""What says that a rank is alive, and the probe of a shared folder: of no use to a later start."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_SECCOMP, _PIDFD_GETFD = 317, 438
_RECEIVE, _SEND, _ADD_FILE = 0xC0502100, 0xC0182101, 0x40182103
_SET_NUMBER = 1
_GO_ON = 0, 0, 1
"""The kernel makes the call."""
_CURRENT_FOLDER = -100


@dataclass(frozen=True)
class CallFault:
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

    def __init__(self, kinds: Sequence[str], roots: Sequence[str], report: Path) -> None:
        self.numbers = {number: (kind, how) for kind in kinds for number, how in CALLS[kind].items()}
        """Of the calls that are intercepted."""
        self._roots, self._report = tuple(roots), report
        self._asked = self._rank = 0

    def answer_all(self, asked: int, rank: int) -> None:
        """Until no thread is left that could ask.

        Args:
            asked: the file that ``intercept`` has returned in the process ``rank``.
        """
        self._asked, self._rank = asked, rank
        poll = select.poll()
        poll.register(asked, select.POLLIN)
        self._tell()
        while not poll.poll()[0][1] & select.POLLHUP:
            question = bytearray(80)
            with suppress(FileNotFoundError):  # the thread was killed, or woken by a signal, and asks again
                fcntl.ioctl(asked, _RECEIVE, question)
                key, thread, _, number, _, _, *arguments = struct.unpack("QIIiIQ6Q", question)
                value, error, flags = self._answer(Call(key, thread, number, tuple(arguments)))
                fcntl.ioctl(asked, _SEND, struct.pack("QqiI", key, value, -error, flags))
        self._tell()

    def _answer(self, call: Call) -> tuple[int, int, int]:
        kind, how = self.numbers[call.number]
        path = call.path(how)
        if path.startswith(self._roots) and Path(f"/proc/{self._rank}/task/{call.thread}").exists():
            return self._decide(call, kind, path)
        return _GO_ON

    def _decide(self, call: Call, kind: str, path: str) -> tuple[int, int, int]:
        """What a call of the rank on a file below the roots returns, its errno, and flags."""
        raise NotImplementedError

    def _tell(self) -> None:
        """Write the report."""


class Failing(Interceptor):
    """Has a call fail, and counts them."""

    def __init__(self, fault: CallFault, part: mmap.mmap, roots: Sequence[str], report: Path) -> None:
        super().__init__([fault.call] if fault.call else [*CALLS], roots, report)
        self._fault, self._part, self.report = fault, part, Report()

    def _tell(self) -> None:
        part = self._report.with_suffix(".part")  # the launcher may kill this process at any moment
        part.write_text(json.dumps(asdict(self.report)))
        part.replace(self._report)

    def _decide(self, call: Call, kind: str, path: str) -> tuple[int, int, int]:
        fault, part = self._fault, "watch" if _STATUS.search(path) else PARTS[self._part[0]]
        seen = self.report.files.setdefault(f"{part} {kind}", [])
        seen.append(path)
        is_first = (part, kind, len(seen)) == (fault.part, fault.call, fault.number)
        if not is_first and not (fault.stays and self.report.struck):
            return _GO_ON
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


@dataclass(frozen=True)
class Change:
    """A call that may change files; one that fails changes nothing when it is repeated either."""

    time: float
    thread: int
    kind: str
    """Of ``CHANGES``."""
    path: str
    target: str = ""
    """Of a rename."""
    flags: int = 0
    """Of an openat."""
    offset: int | None = None
    """Of a write or truncate; None: the end of the file."""
    data: bytes = b""


class Recorder(Interceptor):
    """Adds each change to the report, and lets the kernel make it."""

    def _decide(self, call: Call, kind: str, path: str) -> tuple[int, int, int]:
        if not NOT_RECORDED.search(path):
            with self._report.with_suffix(f".{self._rank}").open("ab") as file:
                facts = {"kind": kind, "path": path, **self._more(call, kind)}
                pickle.dump({"time": time.monotonic(), "thread": call.thread, **facts}, file)
        return _GO_ON

    def _more(self, call: Call, kind: str) -> dict[str, Any]:
        if kind == "openat":
            return {"flags": call.arguments[2]}
        if kind == "rename":
            at = call.number != RENAME  # the two others name the folders as well
            second = Call(call.key, call.thread, call.number, call.arguments[2:] if at else call.arguments[1:])
            return {"target": second.path("at" if at else "path")}
        if kind == "truncate":
            return {"offset": call.arguments[1]}
        return self._written(call) if kind == "write" else {}

    def _written(self, call: Call) -> dict[str, Any]:
        facts = dict(
            line.split(":") for line in Path(f"/proc/{call.thread}/fdinfo/{call.file}").read_text().splitlines()[:2]
        )
        offset = None if int(facts["flags"], 8) & os.O_APPEND else int(facts["pos"])
        _, place, size, given = call.arguments[:4]
        pieces = [(place, size)]
        if call.number == PWRITE:
            offset = given
        elif call.number != WRITE:
            pieces = list(struct.iter_unpack("QQ", call.memory(place, 16 * size)))
        data = b"".join(call.memory(*piece) for piece in pieces)
        assert len(data) == sum(length for _, length in pieces), "all that is written is in the rank's memory"
        return {"offset": offset, "data": data}


def read_changes(report: Path) -> list[Change]:
    """The changes of all ranks that have recorded for this report, in their order."""
    found = list[Change]()
    for path in report.parent.glob(f"{report.stem}.*[0-9]"):
        with path.open("rb") as file:
            size = path.stat().st_size
            while file.tell() < size:
                found.append(Change(**pickle.load(file)))
    return sorted(found, key=lambda change: change.time)


def split(fault: CallFault | None, roots: Sequence[str], report: Path) -> mmap.mmap:
    """Continue as the rank in a process of its own, while this one answers for the kernel, and ends as the rank does.

    Args:
        fault: None: all changes of files are recorded.

    Returns:
        the byte that tells which part the rank is in.
    """
    part, (ours, theirs) = mmap.mmap(-1, 1), socket.socketpair()
    beside = Failing(fault, part, roots, report) if fault else Recorder(CHANGES, roots, report)
    rank = os.fork()
    if not rank:
        ours.close()
        _LIBC.prctl(1, signal.SIGKILL)  # with the other one
        asked = intercept([*beside.numbers])
        socket.send_fds(theirs, [b"."], [asked])
        theirs.close()
        os.close(asked)
        return part
    theirs.close()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, lambda number, _: os.kill(rank, number))
    beside.answer_all(socket.recv_fds(ours, 1, 1)[1][0], rank)
    _, status = os.waitpid(rank, 0)
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def described(fault: CallFault | None, roots: Sequence[Path], report: Path) -> dict[str, str]:
    """The variable that ``begin`` reads in a rank."""
    told = {"fault": fault and asdict(fault), "roots": list(map(str, roots)), "report": str(report)}
    return {"TLT_SYSTEM_CALL": json.dumps(told)}


def begin(rank: int) -> None:
    """Continue as rank ``rank``, intercepted as ``TLT_SYSTEM_CALL`` says, with a byte that tells its part."""
    told = json.loads(os.environ["TLT_SYSTEM_CALL"])
    fault = CallFault(**told["fault"]) if told["fault"] else None
    if fault and fault.rank != rank:
        return
    from tlt_hpc import train

    part, true = split(fault, told["roots"], Path(told["report"])), train.take_step

    def take_step(*arguments: Any, **named: Any) -> bool:
        part[0] = PARTS.index("step")
        try:
            return true(*arguments, **named)
        finally:
            part[0] = PARTS.index("checkpoint")

    set_call: Callable[[Any, str, Any], None] = setattr
    set_call(train, "take_step", take_step)
