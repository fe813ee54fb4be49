"""Why and how urgently this process is asked to stop: the first of the four parts of a stop.

1. Signal. ``StopFlag`` records the request of a signal, or of the timer that knows the time limit:

       Ctrl-C                    ``Stop.ASKED``: a user waits; save, and end
       SIGUSR2, or the timer     ``Stop.TIME``: the allocation ends soon; save, end, and be queued again
       SIGTERM                   ``Stop.KILL``: killed within seconds; nothing that takes long

   The most urgent request wins: a run that is saving because of ``Stop.TIME`` gives that up if SIGTERM follows.
2. Vote. Ranks are not signalled at the same moment, so they agree: inside a rollout by the pulse (``Roster.stopping``
   in mpi/roster.py), between steps by ``World.exchange`` and ``World.agree_to_stop`` (mpi/world.py).
3. Save. ``should_continue`` (resume/saving.py) ends the loop of train.py; a rollout that was cut short has its finished
   responses written (``Keeper.keep`` in resume/kept.py), and ``save_at_end`` writes a checkpoint as far as
   ``StopFlag.is_late`` leaves time.
4. Requeue. ``queue_again`` (cluster/time_limit.py), called by ``stop`` of cli/main.py on rank 0, has Slurm queue the
   job again.

This module knows signals and clocks; neither MPI nor what is done before the end.
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
"""Within this time two SIGINT count as one Ctrl-C: the terminal sends one and the launcher forwards one."""
MAX_KILL_SECONDS = 10.0
ASKED_AHEAD_SECONDS = 120.0
"""How long before the time limit the batch scripts ask for SIGUSR2."""
PUT_OFF_SECONDS = 60.0
"""An end that is later than expected by this much was postponed by an operator; Slurm is exact to a minute."""
END_SECONDS = 15.0
"""Time reserved at the end of an allocation for leaving and queueing again; saving must be done before it."""


class Stop(IntEnum):
    """How urgently a run is to stop; the largest request wins."""

    NONE = 0
    ASKED = 1
    TIME = 2
    KILL = 3


class StopFlag:
    """Requests to stop this process, with their reasons and the time that is left.

    Before ``is_answered`` is set, Ctrl-C and SIGTERM end the process at once, since nothing has begun. Under Slurm only
    Ctrl-C does: a preempted job that leaves by itself is not queued again.
    """

    def __init__(self) -> None:
        self.is_answered = False
        self.is_left = False
        """Whether everything that a stop asks for has been done, except the end of the process."""
        self._asked: list[tuple[Stop, str, float]] = []
        """Urgency, reason and deadline of each request; only appended to, which is atomic."""
        self._kill_seconds = MAX_KILL_SECONDS
        self._ends_at: float | None = None
        self._interrupted_at: float | None = None
        self.timers: list[threading.Timer] = []

    @property
    def kind(self) -> Stop:
        """The most urgent request."""
        return self._most_urgent[0]

    @property
    def reason(self) -> str:
        """Reason of the most urgent request, of equal ones the first; empty without a request."""
        return self._most_urgent[1]

    @property
    def is_late(self) -> bool:
        """Whether the time for an orderly stop has run out; never without a deadline."""
        return time.monotonic() >= self._most_urgent[2]

    @property
    def seconds_left(self) -> float:
        """Seconds until this process is killed, as far as known; infinite without a deadline."""
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

    def set_kill_delay(self, seconds: float) -> None:
        """SIGKILL follows SIGTERM after this many seconds; one of them is for all ranks to learn of it."""
        self._kill_seconds = min(max(seconds - 1, 0.0), MAX_KILL_SECONDS)

    def set_time_limit(
        self,
        seconds: float,
        at_last: Callable[[], None],
        ask_again: Callable[[float], float | None] = lambda within: None,
    ) -> None:
        """The allocation ends in ``seconds``: request a stop two minutes before, or after three quarters of them.

        Measured with a monotonic clock, so a change of the wall clock has no effect.

        Args:
            at_last: called on a thread shortly before the end if ``is_left`` is not set by then, because the main
                thread is in work that does not look at the flag.
            ask_again: called on a thread when it is time to stop, with the seconds that it may take; returns the
                seconds left now, infinity without a limit, None if unknown.
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
                self.set_time_limit(later, at_last, ask_again)

        last = self._after(seconds - min(END_SECONDS, ahead) / 2, lambda: None if self.is_left else at_last())
        self._after(seconds - ahead, near_the_end)

    def _after(self, seconds: float, action: Callable[[], None]) -> threading.Timer:
        self.timers.append(threading.Timer(min(seconds, threading.TIMEOUT_MAX), action))
        self.timers[-1].daemon = True
        self.timers[-1].start()
        return self.timers[-1]

    def install(self) -> None:
        """Have SIGTERM, SIGINT and SIGUSR2 request a stop; a second Ctrl-C, at least a second later, interrupts.

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
