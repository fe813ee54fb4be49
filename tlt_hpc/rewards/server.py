"""The processes that judge a rank's answers: ``python -m tlt_hpc.rewards.server FD``, FD a socket to the rank.

It was started by exec, does not use MPI, and imports what the judges need once; each answer is judged in a fork. It
takes no signal that is meant for the job, and ends, with all its children, when the rank does.

Frames from the rank: its settings first, then ``{"number", "answer"}``, or ``{"forget": true}``. Frames to it:
``{"ready": true}`` or ``{"error": ...}`` first, then ``{"number", "verdict"}``.
"""

from __future__ import annotations

import gc
import math
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from typing import Any

from tlt_hpc.config import RewardSection
from tlt_hpc.rewards.answer import Answer, JudgeError, Verdict
from tlt_hpc.rewards.frames import FrameBuffer, pack
from tlt_hpc.rewards.functions import RewardFunction, load_function
from tlt_hpc.rewards.judge import MATH_KINDS, judge
from tlt_hpc.rewards.sandbox.outside import Template, working_template
from tlt_hpc.rewards.worker import MAX_TOGETHER, Worker, end_with_parent, start_worker

_RECEIVED_BYTES = 2**20
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm and terminals send these to every process of a job; the rank decides what they mean."""


class Server:
    """The queue of answers and the children at work on some of them."""

    def __init__(
        self,
        channel: socket.socket,
        settings: RewardSection,
        function: RewardFunction | None,
        template: Template | None,
    ) -> None:
        self._channel, self._settings, self._function, self._template = channel, settings, function, template
        self._waiting: deque[tuple[int, Answer]] = deque()
        self._alone: set[int] = set()
        """Answers that were not clearly within their limits."""
        self._workers: dict[int, Worker] = {}
        self._woken, wakes = os.pipe()
        self._own_fds = (channel.fileno(), self._woken, wakes)
        for fd in self._own_fds[1:]:
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that it arrives at all
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)

    def serve(self, frames: FrameBuffer) -> None:
        """Judge what comes, until the rank is gone."""
        self._take(frames, b"")
        while True:
            self._start()
            ready, _, _ = select.select([self._channel.fileno(), self._woken], [], [], self._seconds_left())
            if self._woken in ready:
                os.read(self._woken, 4096)
            if self._channel.fileno() in ready and not self._receive(frames):
                return
            self._kill_late()
            self._reap()

    def kill_all(self) -> None:
        """End every child and forget what waits."""
        self._waiting.clear()
        self._alone.clear()
        for worker in self._workers.values():
            worker.kill()
            worker.finish()
        self._workers.clear()

    def _receive(self, frames: FrameBuffer) -> bool:
        received = self._channel.recv(_RECEIVED_BYTES)
        self._take(frames, received)
        return bool(received)

    def _take(self, frames: FrameBuffer, received: bytes) -> None:
        for frame in frames.feed(received):
            if "forget" in frame:
                self.kill_all()
            else:
                self._waiting.append((frame["number"], Answer(**frame["answer"])))

    def _start(self) -> None:
        while self._waiting and len(self._workers) < self._settings.workers:
            worker = start_worker(self._next(), self._settings, self._judge, self._own_fds)
            self._workers[worker.pid] = worker

    def _judge(self, answer: Answer) -> Verdict:
        return judge(answer, self._settings, self._function, self._template)

    def _next(self) -> list[tuple[int, Answer]]:
        """The answers of the next worker: one, or as many of mathematics as leave the other workers theirs."""
        chosen = [self._waiting.popleft()]
        most = min(MAX_TOGETHER, math.ceil((1 + len(self._waiting)) / self._settings.workers))
        while self._waiting and len(chosen) < most and all(map(self._may_share, (chosen[-1], self._waiting[0]))):
            chosen.append(self._waiting.popleft())
        return chosen

    def _may_share(self, numbered: tuple[int, Answer]) -> bool:
        number, answer = numbered
        return answer.kind in MATH_KINDS and number not in self._alone

    def _reap(self) -> None:
        if self._template and not self._template.is_alive:
            raise RuntimeError("the template of sandboxes has died")  # a new server brings a new one
        for worker in list(self._workers.values()):
            if worker.has_ended():
                del self._workers[worker.pid]
                self._finish(worker)

    def _finish(self, worker: Worker) -> None:
        """Tell the verdicts; what was left without one comes again, the first of them alone."""
        verdicts = worker.finish()
        for number, verdict in verdicts.items():
            self._tell(number, verdict)
            self._alone.discard(number)
        left = [numbered for numbered in worker.answers if numbered[0] not in verdicts]
        self._alone.update(number for number, _ in left[:1])
        self._waiting.extendleft(reversed(left))

    def _kill_late(self) -> None:
        now = time.monotonic()
        for worker in self._workers.values():
            if now > worker.deadline and not worker.is_late:
                worker.is_late = True
                worker.kill()

    def _seconds_left(self) -> float | None:
        deadlines = [worker.deadline for worker in self._workers.values() if not worker.is_late]
        return max(0.0, min(deadlines) - time.monotonic() + 0.01) if deadlines else None

    def _tell(self, number: int, verdict: Verdict) -> None:
        self._channel.sendall(pack({"number": number, "verdict": verdict.to_json()}))


def load_kinds(settings: RewardSection) -> tuple[RewardFunction | None, Template | None]:
    """Import all that the kinds need, and try the sandbox; returns the user's function and the sandboxes' template.

    Raises:
        SandboxError: this machine has none, and the kind ``code`` is asked for.
        Exception: whatever the user's file raises.
    """
    if "math" in settings.kinds:
        from tlt_hpc.rewards import mathematics

        mathematics.warm_up()
    if "code" in settings.kinds:
        from tlt_hpc.rewards import code  # noqa: F401

    function = load_function(settings.function) if "function" in settings.kinds else None
    return function, working_template() if "code" in settings.kinds else None


def tell_error(channel: socket.socket, function: str, error: BaseException) -> None:
    """Tell the rank, in one line, what kept the server from starting."""
    told = " ".join("".join(traceback.format_exception_only(error)).split())
    if isinstance(error, JudgeError):
        told = str(error)
    elif function:
        told = f"reward.function = {function!r} cannot be loaded: {told}; fix the file"
    channel.sendall(pack({"error": told}))


def main() -> None:
    """Serve the rank at the other end of the socket."""
    end_with_parent()
    channel = socket.socket(fileno=int(sys.argv[1]))
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.dup2(2, 1)  # what a user's function prints is no output of the rank's
    frames = FrameBuffer()
    settings = RewardSection.model_validate_json(_first(channel, frames))
    sys.excepthook = lambda _kind, error, _trace: tell_error(channel, settings.function, error)
    function, template = load_kinds(settings)
    sys.excepthook = sys.__excepthook__
    channel.sendall(pack({"ready": True}))
    gc.collect()
    gc.freeze()  # children share these pages: none of them is to touch them only to count
    server = Server(channel, settings, function, template)
    try:
        server.serve(frames)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the rank is gone
    finally:
        server.kill_all()


def _first(channel: socket.socket, frames: FrameBuffer) -> Any:
    while received := channel.recv(_RECEIVED_BYTES):
        for frame in frames.feed(received):
            return frame
    sys.exit(0)


if __name__ == "__main__":
    main()
