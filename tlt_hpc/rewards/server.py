"""The processes that judge a rank's answers: ``python -m tlt_hpc.rewards.server FD``, FD a socket to the rank.

It was started by exec, does not use MPI, and imports what the judges need once; each answer is judged in a fork. It
takes no signal that is meant for the job, and ends, with all its children, when the rank does.

Frames from the rank: its settings first, then ``{"number", "answer"}``, or ``{"forget": true}``. Frames to it:
``{"ready": true, "sandbox"}`` or ``{"error": ...}`` first, then ``{"number", "verdict"}``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tlt_hpc.common.source import load_extra
from tlt_hpc.config import RewardSection
from tlt_hpc.rewards.answer import (
    MAX_CHARACTERS,
    MEMORY_BYTES,
    RECEIVED_BYTES,
    Answer,
    Failure,
    FrameBuffer,
    JudgeError,
    Verdict,
    encode_frame,
)
from tlt_hpc.rewards.functions import (
    RewardFunction,
    config_key_of_function,
    find_function_being_loaded,
    format_error_location,
    load_functions,
    raised_in_user_function,
)
from tlt_hpc.rewards.judge import CODE, judge, lacks_parts

_MAX_DETAIL = 300
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Worker:
    """A child that judges one answer."""

    number: int
    answer: Answer
    failed: Verdict | None
    """The verdict of an answer that failed before: only its other parts are found."""
    pid: int
    verdict_fd: int
    started: float
    """By the monotonic clock."""
    settings: RewardSection
    is_late: bool = False

    @property
    def deadline(self) -> float:
        """The wall-clock limit, in seconds of the monotonic clock."""
        return self.started + self.settings.wall_seconds

    def kill(self) -> None:
        """End it and all that it started; its process id stays taken until ``wait_and_read_verdict``."""
        os.killpg(self.pid, signal.SIGKILL)

    def has_ended(self) -> bool:
        """True if the process has ended, so that only ``wait_and_read_verdict`` is left to do."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait_and_read_verdict(self) -> Verdict:
        """Wait for its end and leave nothing behind; returns the verdict."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self.kill()  # what it started and left; before its id, which is the group's, can be another's
        _, status = os.waitpid(self.pid, 0)
        try:
            written = os.read(self.verdict_fd, RECEIVED_BYTES)  # a verdict fits the pipe
        except BlockingIOError:  # a grandchild still has it open
            written = b""
        os.close(self.verdict_fd)
        if self.is_late:
            return Verdict(0.0, Failure.WALL, f"no verdict in {self.settings.wall_seconds} s of the clock")
        if written:
            return Verdict.from_json(json.loads(written))
        if not os.WIFSIGNALED(status):
            return Verdict(0.0, Failure.CRASH, f"its process ended with status {os.waitstatus_to_exitcode(status)}")
        if os.WTERMSIG(status) == signal.SIGXCPU:
            return _cpu_limit_verdict(self.settings)
        name = signal.Signals(os.WTERMSIG(status)).name
        return Verdict(0.0, Failure.CRASH, f"its process was killed by {name}")


def set_parent_death_signal() -> None:
    """Have this process killed when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _limit_child_process(parent: int, settings: RewardSection) -> None:
    """Become a process that can be ended with all that it starts, that ends with the server, and has the limits."""
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    set_parent_death_signal()
    if os.getppid() != parent:
        os._exit(1)
    seconds = math.ceil(settings.cpu_seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    size = num_pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _write_verdict(fd: int, verdict: Verdict) -> None:
    cut = {"detail": verdict.detail[:_MAX_DETAIL], "read": verdict.read[:_MAX_DETAIL]}
    os.write(fd, json.dumps({**asdict(verdict), **cut}).encode())


def _cpu_limit_verdict(settings: RewardSection) -> Verdict:
    return Verdict(0.0, Failure.CPU, f"more than {settings.cpu_seconds} s of CPU time")


def _length_limit_verdict(answer: Answer) -> Verdict | None:
    length = len(answer.text)
    return Verdict(0.0, Failure.SIZE, f"a response of {length} characters") if length > MAX_CHARACTERS else None


def _format_error_line(error: BaseException) -> str:
    return " ".join("".join(traceback.format_exception_only(error)).split())


_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm and terminals send these to every process of a job; the rank decides what they mean."""


class Server:
    """The queue of answers and the children at work on some of them."""

    def __init__(
        self,
        channel: socket.socket,
        settings: RewardSection,
        functions: Mapping[str, RewardFunction],
        template: Any | None,
    ) -> None:
        self._channel, self._settings, self._functions, self._template = channel, settings, functions, template
        self._waiting: deque[tuple[int, Answer, Verdict | None]] = deque()
        self._workers: dict[int, Worker] = {}
        self._woken, wakes = os.pipe()
        self._own_fds = (channel.fileno(), self._woken, wakes)
        for fd in self._own_fds[1:]:
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that it arrives at all
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)

    def serve(self, frames: FrameBuffer) -> None:
        """Judge the answers that arrive, until the rank has ended."""
        self._queue_received_answers(frames, b"")
        while True:
            self._start_waiting_answers()
            ready, _, _ = select.select([self._channel.fileno(), self._woken], [], [], self._seconds_to_next_deadline())
            if self._woken in ready:
                os.read(self._woken, 4096)
            if self._channel.fileno() in ready and not self._receive(frames):
                return
            self._kill_late()
            self._reap_workers_send_verdicts()

    def kill_all(self) -> None:
        """End every child and drop waiting answers."""
        self._waiting.clear()
        for worker in self._workers.values():
            worker.kill()
            worker.wait_and_read_verdict()
        self._workers.clear()

    def _receive(self, frames: FrameBuffer) -> bool:
        received = self._channel.recv(RECEIVED_BYTES)
        self._queue_received_answers(frames, received)
        return bool(received)

    def _queue_received_answers(self, frames: FrameBuffer, received: bytes) -> None:
        for frame in frames.feed(received):
            if "forget" in frame:
                self.kill_all()
            else:
                answer = Answer(**frame["answer"])
                self._waiting.append((frame["number"], answer, _length_limit_verdict(answer)))

    def _start_waiting_answers(self) -> None:
        while self._waiting and len(self._workers) < self._settings.workers:
            worker = self._start_worker(*self._waiting.popleft())
            self._workers[worker.pid] = worker

    def _start_worker(self, number: int, answer: Answer, failed: Verdict | None) -> Worker:
        """Fork a child that judges an answer, or only its other parts if it has failed; without the server's files."""
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        parent, settings = os.getpid(), self._settings
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _limit_child_process(parent, settings)
                for fd in self._own_fds:
                    os.close(fd)
                verdict = judge(answer, settings, self._functions, self._template, failed)
                is_late = time.process_time() > settings.cpu_seconds
                _write_verdict(theirs, _cpu_limit_verdict(settings) if is_late else verdict)
                status = 0
            finally:  # nothing of the server's may run in the child, whatever was raised
                if (error := sys.exc_info()[1]) is not None:
                    failure = Failure.ERROR if raised_in_user_function(error) else Failure.CRASH
                    failure = Failure.MEMORY if isinstance(error, MemoryError) else failure
                    _write_verdict(
                        theirs, Verdict(0.0, failure, _format_error_line(error) + format_error_location(error))
                    )
                os._exit(status)
        os.close(theirs)
        os.setpgid(pid, pid)  # here and in the child: whichever comes first
        return Worker(number, answer, failed, pid, ours, time.monotonic(), settings)

    def _reap_workers_send_verdicts(self) -> None:
        if self._template and not self._template.is_alive:
            raise RuntimeError("the template of sandboxes has died")  # a new server brings a new one
        for worker in list(self._workers.values()):
            if worker.has_ended():
                del self._workers[worker.pid]
                verdict = worker.wait_and_read_verdict()
                seconds = verdict.seconds or time.monotonic() - worker.started  # its process may have been killed
                verdict = replace(verdict, seconds=seconds)
                if worker.failed is None and lacks_parts(verdict, worker.answer, self._settings):
                    self._waiting.appendleft((worker.number, worker.answer, verdict))
                else:
                    self._channel.sendall(encode_frame({"number": worker.number, "verdict": asdict(verdict)}))

    def _kill_late(self) -> None:
        now = time.monotonic()
        for worker in self._workers.values():
            if now > worker.deadline and not worker.is_late:
                worker.is_late = True
                worker.kill()

    def _seconds_to_next_deadline(self) -> float | None:
        deadlines = [worker.deadline for worker in self._workers.values() if not worker.is_late]
        return max(0.0, min(deadlines) - time.monotonic() + 0.01) if deadlines else None


def load_reward_kinds(settings: RewardSection) -> tuple[dict[str, RewardFunction], Any | None]:
    """Import all that the kinds need, and try the sandbox; returns the user's functions and the sandboxes' template.

    Raises:
        SandboxError: this machine has none, and the kind ``code`` is asked for.
        Exception: whatever the user's file raises.
    """
    if "math" in settings.kinds:
        from tlt_hpc.rewards import mathematics

        mathematics.warm_up_caches()
    functions = load_functions(settings.functions)
    return functions, load_extra(CODE).start_working_template() if "code" in settings.kinds else None


def send_error(channel: socket.socket, settings: RewardSection, error: BaseException) -> None:
    """Send the rank one line about why the server could not start."""
    told = str(error) if isinstance(error, JudgeError) else _format_error_line(error)
    if spec := find_function_being_loaded(error):
        told = f"{config_key_of_function(spec, settings)} {spec!r} cannot be loaded: {told}; fix the file"
    channel.sendall(encode_frame({"error": told}))


def main() -> None:
    """Serve the rank at the other end of the socket."""
    set_parent_death_signal()
    channel = socket.socket(fileno=int(sys.argv[1]))
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.dup2(2, 1)  # what a user's function prints is no output of the rank's
    frames = FrameBuffer()
    settings = RewardSection.model_validate_json(_receive_first_document(channel, frames))
    sys.excepthook = lambda _kind, error, _trace: send_error(channel, settings, error)
    functions, template = load_reward_kinds(settings)
    sys.excepthook = sys.__excepthook__
    channel.sendall(encode_frame({"ready": True, "sandbox": template.kind if template else ""}))
    gc.collect()
    gc.freeze()  # children share these pages: none of them is to touch them only to count
    server = Server(channel, settings, functions, template)
    try:
        server.serve(frames)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the rank is gone
    finally:
        server.kill_all()


def _receive_first_document(channel: socket.socket, frames: FrameBuffer) -> Any:
    while received := channel.recv(RECEIVED_BYTES):
        for frame in frames.feed(received):
            return frame
    sys.exit(0)


if __name__ == "__main__":
    main()
