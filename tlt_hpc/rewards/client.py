"""A rank's client of its reward server: sends answers and receives verdicts while the rank does other things.

Nothing but ``wait_for_verdicts`` and ``wait_until_ready`` ever waits. A server that dies is started again, and gets
again what it had not judged; an answer that it dies of twice has reward 0.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from tlt_hpc.cluster.launcher import PYTHON
from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.config import RewardSection, UserError
from tlt_hpc.rewards.answer import RECEIVED_BYTES, Answer, Failure, FrameBuffer, Verdict, encode_frame

_PASSED = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LD_PRELOAD",
    "PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE", "PYTHONUSERBASE", "VIRTUAL_ENV", "CONDA_PREFIX",
    "HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE",
})  # fmt: skip
"""Variables that the server inherits, with ``LC_*``: what Python and its packages need to start, and to stay
offline. Names that hold secrets are not known beforehand, so none is passed on unless it stands here."""
_AT_ONCE = 64
"""Answers a worker that the server may have: enough to keep it busy through one of the rank's micro-steps."""
_ENDING_SECONDS = 5.0
_STALLED_SECONDS = 60.0
"""Beyond the far limit of an answer: a server that is silent for so long is stopped or stuck."""


class RewardClient:
    """Hands answers to this rank's server and keeps the verdicts."""

    def __init__(self, settings: RewardSection) -> None:
        self._settings = settings
        self._number = 0
        self._waiting: deque[int] = deque()
        self._at_server: dict[int, None] = {}
        self._answers: dict[int, Answer] = {}
        """Those without a verdict, by number."""
        self._verdicts: dict[int, Verdict] = {}
        self._suspects: set[int] = set()
        """Answers that the server had when it died, until they have a verdict."""
        self.num_restarts = 0
        self.sandbox = ""
        """The kind of sandbox that programs run in, once the server is ready."""
        self._start()

    @property
    def num_judged(self) -> int:
        """Verdicts that have come and were not taken."""
        return len(self._verdicts)

    def wait_until_ready(self, limit_seconds: float = math.inf) -> None:
        """Wait until the server has imported what it needs.

        Raises:
            UserError: it cannot judge what it is asked to, or cannot start, or takes longer than the limit (then it is
                killed); one line with the remedy.
        """
        started = time.monotonic()
        while not self._is_ready:
            if time.monotonic() - started > limit_seconds:
                self._process.kill()
                raise UserError(
                    f"what judges responses was not ready after {limit_seconds:g} s; see what its "
                    "functions (reward.default, reward.weights) do when they are imported"
                )
            self._await_server(select.POLLIN)
            self.send_and_receive()

    def submit(self, answer: Answer) -> int:
        """Have an answer judged; the number that its verdict will have."""
        self._number += 1
        self._answers[self._number] = answer
        self._waiting.append(self._number)
        self.send_and_receive()
        return self._number

    def send_and_receive(self) -> None:
        """Send what the server has room for and take what it has sent; never waits.

        Raises:
            UserError: the server cannot be started (again).
        """
        if self._is_ready and not self._answers and not self._outgoing:
            return
        self._queue_answers_to_send()
        try:
            self._send()
            self._receive()
        except (BrokenPipeError, ConnectionResetError):
            self._restart()

    def wait_for_verdicts(self, numbers: Iterable[int]) -> dict[int, Verdict]:
        """The verdicts of these answers, waiting for those that are not there yet.

        Raises:
            UserError: as ``send_and_receive``.
        """
        numbers = list(numbers)
        while not all(number in self._verdicts for number in numbers):
            has_more = bool(self._outgoing) or self._server_has_room()
            self._await_server(select.POLLIN | (select.POLLOUT if has_more else 0))
            self.send_and_receive()
            self._kill_server_if_stalled()
            if self._is_ready:  # one that hangs is replaced, and one that does not start is for the watch
                BEAT.tick()
        return {number: self._verdicts.pop(number) for number in numbers}

    def take_ready_verdicts(self) -> dict[int, Verdict]:
        """The verdicts that have come, by number; never waits.

        Raises:
            UserError: as ``send_and_receive``.
        """
        self.send_and_receive()
        self._kill_server_if_stalled()
        ready, self._verdicts = self._verdicts, {}
        return ready

    def drop_all_answers(self) -> None:
        """Drop all answers and verdicts; the server ends its workers."""
        if self._answers:
            self._outgoing += encode_frame({"forget": True})
        for kept in (self._waiting, self._at_server, self._answers, self._verdicts, self._suspects):
            kept.clear()

    def close(self) -> None:
        """End the server."""
        self._socket.close()
        self._process.wait()

    def _start(self) -> None:
        """Start the server: by exec, in a session of its own, without a descriptor of the launcher's."""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        command = [*PYTHON, "tlt_hpc.rewards.server", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=server_environment(os.environ),
                start_new_session=True,
            )
        self._is_ready = False
        self._heard_at = time.monotonic()
        self._incoming = FrameBuffer()
        self._outgoing = bytearray(encode_frame(self._settings.model_dump_json()))

    def _await_server(self, events: int) -> None:
        """Wait for one of these events of ``select``, for a second at most."""
        poll = select.poll()  # not ``select``, which takes no descriptor above 1023, as one of a later start may be
        poll.register(self._socket, events)
        poll.poll(1000)

    def _restart(self) -> None:
        """Start the server again and resend its answers; an answer that it died of twice, alone, is not tried again."""
        self._socket.close()
        status = self._wait_for_server_end()
        if not self._is_ready:
            raise UserError(
                f"the server of rewards ended with status {status} before it was ready; what it said is above: "
                "fix that, or try `python -m tlt_hpc.rewards.server 0` by hand"
            )
        self.num_restarts += 1
        lost = list(self._at_server)
        if len(lost) == 1 and lost[0] in self._suspects:
            self._record_verdict(lost.pop(), Verdict(0.0, Failure.SERVER, f"the server ended with status {status}"))
        self._suspects.update(lost)
        self._at_server.clear()
        self._waiting.extendleft(reversed(lost))
        self._start()

    def _wait_for_server_end(self) -> int:
        """The exit status of a server that has closed its socket."""
        try:
            return self._process.wait(timeout=_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _server_has_room(self) -> bool:
        """True if the server may have one more answer: one at a time while it may die of them."""
        if not self._waiting or not self._is_ready:
            return False
        if self._suspects:
            return not self._at_server
        return len(self._at_server) < _AT_ONCE * self._settings.workers

    def _queue_answers_to_send(self) -> None:
        while len(self._outgoing) < RECEIVED_BYTES and self._server_has_room():
            number = self._waiting.popleft()
            if not self._at_server:  # it was silent because it had nothing to judge, for minutes in an update
                self._heard_at = time.monotonic()
            self._at_server[number] = None
            self._outgoing += encode_frame({"number": number, "answer": vars(self._answers[number])})

    def _send(self) -> None:
        while self._outgoing:
            try:
                del self._outgoing[: self._socket.send(self._outgoing)]
            except BlockingIOError:
                return

    def _receive(self) -> None:
        while True:
            try:
                received = self._socket.recv(RECEIVED_BYTES)
            except BlockingIOError:
                return
            if not received:
                raise ConnectionResetError
            self._heard_at = time.monotonic()
            for frame in self._incoming.feed(received):
                self._process_frame(frame)

    def _process_frame(self, frame: Mapping[str, Any]) -> None:
        if "error" in frame:
            raise UserError(frame["error"])
        if "ready" in frame:
            self._is_ready = True
            self.sandbox = frame["sandbox"]
        elif frame["number"] in self._answers:  # another has been forgotten
            self._record_verdict(frame["number"], Verdict.from_json(frame["verdict"]))

    def _record_verdict(self, number: int, verdict: Verdict) -> None:
        self._verdicts[number] = verdict
        del self._answers[number]
        self._at_server.pop(number, None)
        self._suspects.discard(number)

    def _kill_server_if_stalled(self) -> None:
        silent_seconds = time.monotonic() - self._heard_at
        if self._at_server and silent_seconds > self._settings.wall_seconds + _STALLED_SECONDS:
            self._process.send_signal(signal.SIGKILL)


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the server and its workers: no variable of the launcher's, no token, no password.

    One thread to a process, and one order of sets, so that a verdict is the same everywhere.
    """
    kept = {name: value for name, value in environment.items() if name in _PASSED or name.startswith("LC_")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}
