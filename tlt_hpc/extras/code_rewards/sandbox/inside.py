"""The supervisor of a sandbox: builds its walls, then runs programs one by one and reports what they wrote.

Forked for every answer from a template, which was started by exec with an empty environment. It knows what programs
are given and nothing that they are judged by, so a program that took it over would have gained nothing. Frames from
outside are requests, frames to outside are outcomes; the first one says whether the sandbox was built.
"""

from __future__ import annotations

import contextlib
import fcntl
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

from tlt_hpc.extras.code_rewards.sandbox.isolation import KINDS, Walls
from tlt_hpc.extras.code_rewards.sandbox.prelude import prelude_names
from tlt_hpc.extras.code_rewards.sandbox.privileges import check_libc_result, die_with_parent, libc
from tlt_hpc.extras.code_rewards.sandbox.program import RESULT_FD, action_of_request, confine, run_to_the_end
from tlt_hpc.rewards.answer import read_frame, write_frame

_MFD_ALLOW_SEALING, _F_ADD_SEALS, _ALL_SEALS = 2, 1033, 15
_AWAKE_SHARE = 0.01
"""Share of a core: a process with less waits for something, however loaded the machine is."""
_LOOK_SECONDS = 0.25
_NUMPY = ("numpy", "numpy.char", "numpy.ctypeslib", "numpy.fft", "numpy.linalg", "numpy.ma", "numpy.polynomial",
          "numpy.random", "numpy.rec", "numpy.strings", "numpy.testing", "numpy.typing")  # fmt: skip
"""With the modules that numpy imports only when something of theirs is used, as ``unique`` does."""
NUMPY = b"n"
"""The message that asks for a sandbox with numpy."""
_COMMON = ("array", "bisect", "cmath", "collections", "copy", "ctypes", "dataclasses", "datetime", "decimal", "enum",
           "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "math", "operator", "queue",
           "random", "re", "statistics", "string", "struct", "threading", "typing", "bz2", "lzma", "zlib",
           "uuid")  # fmt: skip
"""Imported while the host's libraries can be reached: a program finds them loaded, and pays no CPU time for them."""


def supervise_programs(
    walls: Walls, requests: BinaryIO, outcomes: BinaryIO, partner: int | None, nothing: int, base_bytes: int
) -> Callable[[], object] | None:
    """Run the programs that are requested; returns in every child, with what it is to do, and after the last one.

    Args:
        partner: a socket to another sandbox, for the only program of this one.
        nothing: a descriptor of /dev/null.
        base_bytes: memory of a process without a program.
    """
    while (request := read_frame(requests)) is not None:
        ours, theirs = os.pipe()
        stdin = _create_memory_file(request.get("stdin", "")) if partner is None else partner
        pid = os.fork()
        if pid == 0:
            walls.isolate_program()
            confine(request, stdin, theirs, nothing, base_bytes)
            return action_of_request(request)
        os.close(theirs)
        os.close(stdin)
        output, failure = _watch_program(ours, requests.fileno(), pid, request)
        os.close(ours)
        if failure:
            os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        walls.kill_remaining_processes()
        outcome = {
            "output": output.decode("utf-8", "replace"),
            "status": os.waitstatus_to_exitcode(status),
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "failure": failure,
        }
        write_frame(outcomes, outcome)
    return None


def _watch_program(ours: int, requests: int, pid: int, request: dict[str, Any]) -> tuple[bytes, str | None]:
    """What a process wrote until it ended, or the limit that it exceeded; ends all if the judge is gone.

    The limits are of CPU time; the clock serves only to see a process that hangs.
    """
    output, is_open = bytearray(), True
    looked_at, used = time.monotonic(), 0.0
    pause = 0.001
    while True:
        ready, _, _ = select.select(
            [ours, requests] if is_open else [requests], [], [], _LOOK_SECONDS if is_open else pause
        )
        if requests in ready:  # no request comes while a program runs
            os._exit(0)
        if ours in ready:
            received = os.read(ours, 65536)
            output += received
            is_open = bool(received)
        elif not is_open and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return bytes(output), None
        pause = pause if is_open else min(2 * pause, _LOOK_SECONDS)
        if len(output) > request["output_bytes"]:
            return b"", "output"
        seconds = _cpu_seconds(pid)
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


def _create_memory_file(text: str) -> int:
    """A descriptor to read the text from: of a file in memory that nobody can change any more."""
    # os.memfd_create is missing where Python was built with an older libc
    fd = check_libc_result(libc.memfd_create(b"input", _MFD_ALLOW_SEALING), "memfd_create")
    with open(fd, "w", encoding="utf-8", closefd=False) as stream:
        stream.write(text)
    fcntl.fcntl(fd, _F_ADD_SEALS, _ALL_SEALS)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _import_common() -> None:
    for name in _COMMON:
        with contextlib.suppress(ImportError):  # an interpreter may have been built without some
            __import__(name)
    prelude_names()


def _import_numpy(packages: str) -> None:
    sys.path.append(packages)
    for name in _NUMPY:
        with contextlib.suppress(ImportError):  # then programs have none
            __import__(name)
    sys.path.remove(packages)
    gc.freeze()


def _add_site_builtins() -> None:
    """``exit`` and ``quit``, which interpreters have but for ``-S``."""
    import _sitebuiltins
    import builtins

    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D")  # type: ignore[assignment]
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D")  # type: ignore[assignment]


def main(project: str, channel_fd: int, kind: str, packages: str) -> None:
    """Be the template that sandboxes are forked from; in a program's process, the program.

    The template has everything imported and knows no answer. It takes the two ends of the pipes to a judge with each
    message, and the socket to another sandbox if there is one, and ends with the server. Sandboxes with numpy, which
    are slower to fork, have a template of their own, forked from this one for the first of them.
    """
    sys.path.remove(project)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 hears nothing from inside that it has no handler for
    die_with_parent()
    sys.set_int_max_str_digits(0)  # numbers may have more digits than Python writes by itself
    _import_common()
    _add_site_builtins()
    gc.collect()
    gc.freeze()  # whatever is forked shares these pages
    channel = socket.socket(fileno=channel_fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a sandbox but its judge
    with_numpy: socket.socket | None = None
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1, 3)
        if not message:
            return
        if message == NUMPY and packages:
            if with_numpy is None:
                with_numpy, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:
                    die_with_parent()
                    with_numpy.close()
                    channel.close()
                    _close_all(fds)
                    _import_numpy(packages)
                    channel, packages, with_numpy = theirs, "", None
                    continue
                theirs.close()
            socket.send_fds(with_numpy, [NUMPY], fds)
        elif os.fork() == 0:
            break
        _close_all(fds)
    channel.close()
    if with_numpy is not None:
        with_numpy.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _run_sandbox(KINDS[kind](), os.fdopen(fds[0], "rb"), os.fdopen(fds[1], "wb"), fds[2] if len(fds) > 2 else None)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _library_folders() -> list[str]:
    """The folders of the standard library, of an interpreter that was started with ``-S -P``."""
    return [path for path in sys.path if os.path.isdir(path)]  # noqa: PTH112


def _run_sandbox(walls: Walls, requests: BinaryIO, outcomes: BinaryIO, partner: int | None) -> None:
    """Build the walls, then run what is requested; in a child, the program itself."""
    # while /proc and /dev can be reached
    base_bytes = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    nothing = os.open(os.devnull, os.O_RDWR)
    while os.dup(nothing) <= RESULT_FD:
        pass  # 0 to 3 must be taken: programs get theirs under these numbers
    try:
        # the other sandbox sees the end of this one's socket to it when the program ends
        walls.become_supervisor(_library_folders(), [requests.fileno(), *([] if partner is None else [partner])])
    except OSError as error:
        write_frame(outcomes, {"trouble": error.strerror})
        os._exit(1)
    write_frame(outcomes, {})
    body = supervise_programs(walls, requests, outcomes, partner, nothing, base_bytes)
    if body is None:
        os._exit(0)
    run_to_the_end(body)
