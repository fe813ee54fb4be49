"""Owns why and how urgently this process is asked to stop. Knows signals and clocks; neither MPI nor what is done then.

    Ctrl-C                    ``Stop.ASKED``: somebody waits; save, and end
    SIGUSR2, or the timer     ``Stop.TIME``: the allocation ends soon; save, end, and be queued again
    SIGTERM                   ``Stop.KILL``: killed within seconds; nothing that takes long

The most urgent wins: a run that saves since its time is up gives that up where SIGTERM follows.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from types import FrameType

SAME_KEYSTROKE_SECONDS = 1.0
"""One Ctrl-C may reach a rank twice, from the terminal and from the launcher that forwards it."""
MOST_KILL_SECONDS = 10.0
ASKED_AHEAD_SECONDS = 120.0
"""How long before the time limit the batch scripts ask for SIGUSR2."""
PUT_OFF_SECONDS = 60.0
"""An end that is so much later than was thought has been put off by an operator; Slurm is exact to a minute."""
END_SECONDS = 15.0
"""Before the end of an allocation, by when everything is to be done: what is left is for leaving and queueing again."""


class Stop(IntEnum):
    """How urgently a run is to stop; a larger one outdoes a smaller."""

    NONE = 0
    ASKED = 1
    TIME = 2
    KILL = 3


class StopFlag:
    """This process's wish to stop, with its reason and the time that is left for it.

    Until ``is_answered`` Ctrl-C and SIGTERM end the process at once, for nothing has begun. Under Slurm Ctrl-C alone
    does: a job that is preempted must not leave by itself, or it is not queued again.
    """

    def __init__(self) -> None:
        self.is_answered = False
        self.is_left = False
        """Whether all that a stop asks for has been done, but for the end of the process."""
        self._asked: list[tuple[Stop, str, float]] = []
        """Urgency, reason, and by when all must be done; only appended to, which nothing can come between."""
        self._kill_seconds = MOST_KILL_SECONDS
        self._ends_at: float | None = None
        self._interrupted_at: float | None = None
        self.timers: list[threading.Timer] = []

    @property
    def kind(self) -> Stop:
        """The most urgent of what was asked for."""
        return self._most_urgent[0]

    @property
    def reason(self) -> str:
        """Why, of equally urgent requests the first one's; empty where there was none."""
        return self._most_urgent[1]

    @property
    def is_late(self) -> bool:
        """Whether the time for stopping in good order is over; never, where nobody set any."""
        return time.monotonic() >= self._most_urgent[2]

    @property
    def seconds_left(self) -> float:
        """Until this process is killed, as far as that is known; infinite where nobody set a time."""
        kind, _, until = self._most_urgent
        return until - time.monotonic() + (END_SECONDS if kind is Stop.TIME else 0.0)

    @property
    def _most_urgent(self) -> tuple[Stop, str, float]:
        return max(self._asked, key=lambda asked: asked[0], default=(Stop.NONE, "", math.inf))

    def request(self, kind: Stop, reason: str) -> None:
        """Ask to stop. Safe in a signal handler and from any thread."""
        now, until = time.monotonic(), math.inf
        if kind is Stop.KILL:
            until = now + self._kill_seconds
        elif kind is Stop.TIME:
            until = (now + ASKED_AHEAD_SECONDS if self._ends_at is None else self._ends_at) - END_SECONDS
        self._asked.append((kind, reason, until))

    def killed_after(self, seconds: float) -> None:
        """SIGKILL follows SIGTERM after so many seconds; one of them is for all ranks to hear of it."""
        self._kill_seconds = min(max(seconds - 1, 0.0), MOST_KILL_SECONDS)

    def end_in(
        self,
        seconds: float,
        at_last: Callable[[], None],
        ask_again: Callable[[float], float | None] = lambda within: None,
    ) -> None:
        """The allocation ends in so many seconds: ask to stop two minutes ahead, or after three quarters of them.

        The clock that counts is the process's own, so a jump of the wall clock moves nothing.

        Args:
            at_last: called, on a thread, where nothing has been left shortly before the end: the main thread is in
                work that asks nobody.
            ask_again: called, on a thread, when it is time to stop: how many seconds are left now, infinitely many
                where there is no end any more, None where nobody knows better within the seconds that it is given.
        """
        self._ends_at = time.monotonic() + seconds
        ahead = min(ASKED_AHEAD_SECONDS, seconds / 4)

        def near_the_end() -> None:
            later = ask_again(ahead / 8)
            if later is None or later < ahead + PUT_OFF_SECONDS:
                self.request(Stop.TIME, f"the time limit, in {ahead:.0f} s")
                return
            last.cancel()
            self._ends_at = None
            if later < math.inf:
                self.end_in(later, at_last, ask_again)

        last = self._after(seconds - min(END_SECONDS, ahead) / 2, lambda: None if self.is_left else at_last())
        self._after(seconds - ahead, near_the_end)

    def _after(self, seconds: float, action: Callable[[], None]) -> threading.Timer:
        self.timers.append(threading.Timer(min(seconds, threading.TIMEOUT_MAX), action))
        self.timers[-1].daemon = True
        self.timers[-1].start()
        return self.timers[-1]

    def install(self) -> None:
        """Have SIGTERM, SIGINT and SIGUSR2 ask; a second Ctrl-C, a second or more after the first, interrupts.

        Raises (later, in the main thread):
            KeyboardInterrupt: on that second Ctrl-C.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        ends = number == signal.SIGINT or (number == signal.SIGTERM and "SLURM_JOB_ID" not in os.environ)
        if ends and not self.is_answered:
            sys.stderr.flush()
            os._exit(128 + number)
        kinds = {signal.SIGTERM: Stop.KILL, signal.SIGINT: Stop.ASKED, signal.SIGUSR2: Stop.TIME}
        self.request(kinds[signal.Signals(number)], name)
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
        elif now - self._interrupted_at >= SAME_KEYSTROKE_SECONDS:
            raise KeyboardInterrupt
