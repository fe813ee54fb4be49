"""Process 1 of a sandbox: builds the walls, then runs programs one by one and reports what they wrote.

Forked for every answer from a template, which was started by exec with an empty environment. It knows what programs
are given and nothing that they are judged by, so a program that took it over would have gained nothing. Frames from
outside are requests (``do``: run, call, serve, check), frames to outside are outcomes; the first one says whether the
walls stand.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from tlt_hpc.rewards.frames import read_frame, write_frame
from tlt_hpc.rewards.sandbox import namespaces
from tlt_hpc.rewards.sandbox.program import Descriptors, body_of, confine, run_to_the_end

_AWAKE_SHARE = 0.01
"""Of a core: with less, a process waits for something, however loaded the machine is."""
_LOOK_SECONDS = 0.25
_COMMON = ("array", "bisect", "cmath", "collections", "copy", "ctypes", "dataclasses", "datetime", "decimal", "enum",
           "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "math", "operator", "queue",
           "random", "re", "statistics", "string", "struct", "threading", "typing", "bz2", "lzma", "zlib",
           "uuid")  # fmt: skip
"""Imported while the host's libraries can be reached: a program finds them loaded, and pays no CPU time for them."""


class Programs:
    """The programs that run, or serve, under this process."""

    def __init__(self, requests: BinaryIO, outcomes: BinaryIO) -> None:
        self._requests, self._outcomes = requests, outcomes
        self._base_bytes = _mapped_bytes()
        self._nothing = os.open(os.devnull, os.O_RDWR)
        while os.dup(self._nothing) <= 4:
            pass  # 0 to 4 must be taken: programs get theirs under these numbers
        self._server: int | None = None
        self._checker_end: socket.socket | None = None

    def say(self, outcome: dict[str, Any]) -> None:
        """Tell outside."""
        write_frame(self._outcomes, outcome)

    def next_program(self) -> Callable[[], object] | None:
        """Take requests; returns in every child, with what it is to do, and in this process at the end of them."""
        while (request := read_frame(self._requests)) is not None:
            body = self._serve(request) if request["do"] == "serve" else self._attempt(request)
            if body is not None:
                return body
        return None

    def _serve(self, request: dict[str, Any]) -> Callable[[], object] | None:
        """Start a program that answers calls; the checker, which comes later, gets the other end."""
        self._checker_end, programs_end = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            nothing = self._nothing
            confine(request, Descriptors(nothing, nothing, nothing, programs_end.fileno()), self._base_bytes)
            return body_of(request)
        programs_end.close()
        self._server = pid
        self.say({})
        return None

    def _attempt(self, request: dict[str, Any]) -> Callable[[], object] | None:
        """Run a program to its end."""
        ours, theirs = os.pipe()
        stdin = _file_with(request.get("stdin", ""))
        calls = self._checker_end.fileno() if self._checker_end is not None else None
        pid = os.fork()
        if pid == 0:
            confine(request, Descriptors(stdin, theirs, self._nothing, calls), self._base_bytes)
            return body_of(request)
        os.close(theirs)
        os.close(stdin)
        pids = [pid] if self._server is None else [pid, self._server]
        output, failure = _watch(ours, self._requests.fileno(), pids, request)
        os.close(ours)
        outcome = _end(pids, failure)
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # everything in this namespace but this process
        self.say({**outcome, "output": output.decode("utf-8", "replace")})
        return None


def _watch(ours: int, requests: int, pids: list[int], request: dict[str, Any]) -> tuple[bytes, str | None]:
    """What the first process wrote until it ended, or why it was not waited for; ends all where outside is gone.

    The limits are of CPU time, of all processes together; the clock serves only to see one that hangs.
    """
    output, is_open = bytearray(), True
    looked_at, used = time.monotonic(), 0.0
    pause = 0.001
    while True:
        ready, _, _ = select.select(
            [ours, requests] if is_open else [requests], [], [], _LOOK_SECONDS if is_open else pause
        )
        if requests in ready:  # nothing is asked while something runs
            os._exit(0)
        if ours in ready:
            received = os.read(ours, 65536)
            output += received
            is_open = bool(received)
        elif not is_open and os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return bytes(output), None
        pause = pause if is_open else min(2 * pause, _LOOK_SECONDS)
        if len(output) > request["output_bytes"]:
            return b"", "output"
        seconds = sum(map(_cpu_seconds, pids))
        if seconds > request["cpu_seconds"]:
            return b"", "cpu"
        now = time.monotonic()
        if now - looked_at > request["asleep_seconds"]:
            if seconds - used < _AWAKE_SHARE * (now - looked_at):
                return b"", "asleep"
            looked_at, used = now, seconds


def _cpu_seconds(pid: int) -> float:
    """CPU seconds of another process, all its threads, also of one that has ended; there is no /proc here."""
    return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED of a process: see clock_getcpuclockid(3)


def _end(pids: list[int], failure: str | None) -> dict[str, Any]:
    """Kill and reap; how the first one ended, and the CPU seconds of all."""
    status, seconds = 0, 0.0
    for pid in pids:
        if failure or pid != pids[0]:
            os.kill(pid, signal.SIGKILL)
        _, ended, usage = os.wait4(pid, 0)
        seconds += usage.ru_utime + usage.ru_stime
        status = ended if pid == pids[0] else status
    return {"status": os.waitstatus_to_exitcode(status), "cpu_seconds": seconds, "failure": failure}


def _file_with(text: str) -> int:
    """A descriptor to read the text from: a file that has no name any more."""
    path = Path(namespaces.SCRATCH, ".input")
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")
    fd = os.open(path, os.O_RDONLY)
    path.unlink()
    return fd


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


def _import_common() -> None:
    for name in _COMMON:
        with contextlib.suppress(ImportError):  # an interpreter may have been built without some
            __import__(name)


def _add_site_builtins() -> None:
    """``exit`` and ``quit``, which interpreters have but for ``-S``."""
    import _sitebuiltins
    import builtins

    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D")  # type: ignore[assignment]
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D")  # type: ignore[assignment]


def main(project: str, channel_fd: int) -> None:
    """Be the template that sandboxes are forked from; in a program's process, the program.

    The template has everything imported and knows no answer. It takes the two ends of the pipes to a judge with each
    message, and ends with the server.
    """
    sys.path.remove(project)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 hears nothing from inside that it has no handler for
    namespaces.die_with_parent()
    _import_common()
    _add_site_builtins()
    gc.collect()
    gc.freeze()  # whatever is forked shares these pages
    channel = socket.socket(fileno=channel_fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a sandbox but its judge
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1, 2)
        if not message:
            return
        if os.fork() == 0:
            channel.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            break
        for fd in fds:
            os.close(fd)
    _sandbox(os.fdopen(fds[0], "rb"), os.fdopen(fds[1], "wb"))


def _sandbox(requests: BinaryIO, outcomes: BinaryIO) -> None:
    """Build the walls, then run what is asked for; in a child, the program itself."""
    programs = Programs(requests, outcomes)
    try:
        is_root = namespaces.unshare()
        namespaces.die_with_parent()
        pid = os.fork()
        if pid:
            requests.close()
            os.waitpid(pid, 0)  # then all inside has ended, and with this process the stream that outside reads
            os._exit(0)
        namespaces.change_root(namespaces.library_folders())
        namespaces.drop_privileges(is_root)
        namespaces.die_with_parent()
    except OSError as error:
        programs.say({"trouble": error.strerror})
        os._exit(1)
    programs.say({})
    body = programs.next_program()
    if body is None:
        os._exit(0)  # and with process 1 everything in its namespace
    run_to_the_end(body)
