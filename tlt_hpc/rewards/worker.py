"""The judgement of an answer in a process of its own: forked from the server, limited, gone when it is done.

A fork of the server has everything imported, has used no CPU time, and leaves nothing behind that the next answer could
see: a verdict depends on the answer alone. Answers of mathematics may share a fork, since most take less time than it
does; whichever takes more than a small part of what it may is left, and then judged alone.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.config import RewardSection
from tlt_hpc.rewards.answer import Answer, Failure, Verdict
from tlt_hpc.rewards.frames import FrameBuffer, pack
from tlt_hpc.rewards.judge import judge

MAX_DETAIL = 300
_PR_SET_PDEATHSIG = 1
_RECEIVED_BYTES = 65536
MAX_TOGETHER = 16
_CLEARLY = 0.1
"""Of a limit: an answer that has taken less beside others would not meet it alone."""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Worker:
    """A child that judges one answer, or several of mathematics."""

    answers: Sequence[tuple[int, Answer]]
    """With their numbers."""
    pid: int
    verdict_fd: int
    deadline: float
    """By the monotonic clock: the far limit."""
    settings: RewardSection
    is_late: bool = False

    def kill(self) -> None:
        """End it and all that it started; its process id stays taken until ``finish``."""
        os.killpg(self.pid, signal.SIGKILL)

    def has_ended(self) -> bool:
        """Whether only ``finish`` is left to do."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def finish(self) -> dict[int, Verdict]:
        """Wait for its end, leave nothing behind, and say what came of it: of an answer by itself always a verdict."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self.kill()  # what it started and left; before its id, which is the group's, can be another's
        _, status = os.waitpid(self.pid, 0)
        frames = list(FrameBuffer().feed(_read_all(self.verdict_fd)))
        os.close(self.verdict_fd)
        verdicts = [Verdict.from_json(frame) for frame in frames]
        if len(self.answers) == 1:
            verdicts = [self._verdict_alone(verdicts, status)]
        return {number: verdict for (number, _), verdict in zip(self.answers, verdicts, strict=False)}

    def _verdict_alone(self, verdicts: Sequence[Verdict], status: int) -> Verdict:
        if self.is_late:
            return Verdict.failed(Failure.WALL, f"no verdict in {self.settings.wall_seconds} s of the clock")
        if verdicts:
            return verdicts[0]
        if os.WIFSIGNALED(status):
            return _killed(os.WTERMSIG(status), self.settings)
        return Verdict.failed(Failure.CRASH, f"its process ended with status {os.waitstatus_to_exitcode(status)}")


def start_worker(
    answers: Sequence[tuple[int, Answer]],
    settings: RewardSection,
    judge_alone: Callable[[Answer], Verdict],
    own_fds: Sequence[int],
) -> Worker:
    """Fork a child that judges answers, without the descriptors that are the server's own.

    ``judge_alone`` judges the answer of a child that has no other.
    """
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _enter(parent, settings)
            for fd in own_fds:
                os.close(fd)
            if len(answers) == 1:
                verdict = judge_alone(answers[0][1])
                is_late = time.process_time() > settings.cpu_seconds  # of this process, hence of this answer, alone
                _report(theirs, _too_slow(settings) if is_late else verdict)
            else:
                _judge_together(theirs, [answer for _, answer in answers], settings)
            status = 0
        finally:  # nothing of the server's may run in the child, whatever was raised
            if len(answers) == 1:
                _report_error(theirs, answers[0][1].kind, sys.exc_info()[1])
            os._exit(status)
    os.close(theirs)
    os.setpgid(pid, pid)  # here and in the child: whichever comes first
    return Worker(answers, pid, ours, time.monotonic() + settings.wall_seconds, settings)


def end_with_parent() -> None:
    """Have this process killed when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _enter(parent: int, settings: RewardSection) -> None:
    """Become a process that can be ended with all that it starts, and that ends with the server."""
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    seconds = math.ceil(settings.cpu_seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    size = _address_space() + settings.memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _address_space() -> int:
    """Bytes that this process has mapped."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


def _judge_together(fd: int, answers: Sequence[Answer], settings: RewardSection) -> None:
    """Judge one after the other, up to the first that is not clearly within its limits."""
    size_at_start, memory = _address_space(), settings.memory_mb * 2**20
    for answer in answers:
        start = time.process_time()
        verdict = judge(answer, settings)
        grown = _address_space() - size_at_start
        if time.process_time() - start > _CLEARLY * settings.cpu_seconds or grown > _CLEARLY * memory:
            return
        _report(fd, verdict)


def _report(fd: int, verdict: Verdict) -> None:
    detail = verdict.detail[:MAX_DETAIL]
    os.write(fd, pack(Verdict(verdict.reward, verdict.failure, detail).to_json()))


def _report_error(fd: int, kind: str, error: BaseException | None) -> None:
    if error is None:
        return
    failure = Failure.ERROR if kind == "function" else Failure.CRASH
    if isinstance(error, MemoryError):
        failure = Failure.MEMORY
    _report(fd, Verdict.failed(failure, " ".join("".join(traceback.format_exception_only(error)).split())))


def _killed(number: int, settings: RewardSection) -> Verdict:
    if number == signal.SIGXCPU:
        return _too_slow(settings)
    return Verdict.failed(Failure.CRASH, f"its process was killed by {signal.Signals(number).name}")


def _too_slow(settings: RewardSection) -> Verdict:
    return Verdict.failed(Failure.CPU, f"more than {settings.cpu_seconds} s of CPU time")


def _read_all(fd: int) -> bytes:
    """What is in the pipe; a verdict fits it, so nobody had to wait for a reader."""
    try:
        return os.read(fd, _RECEIVED_BYTES)
    except BlockingIOError:  # a grandchild has it open still
        return b""
