"""Owns how a rank waits: sleeping between tests of a request, and a thread that lets others progress meanwhile.

Knows neither what is waited for nor what the records say.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tlt_hpc.cluster.watch.beat import BEAT
from tlt_hpc.mpi.library import MPI

FIRST_PAUSE_SECONDS = 50e-6
LONGEST_PAUSE_SECONDS = 2e-3
LARGEST_CPU_SHARE = 0.01
DEAREST_POLL_SECONDS = 1e-3
"""CPU time that a poll and a wake-up never take together."""
LONGEST_STRETCH = 4
"""How many times the cap a pause may be where polls are dear, unless the caller says otherwise."""
IPROBE_EVERY_SECONDS = 2e-3


class BackOff:
    """Pauses that double from 50 microseconds up to a cap, so that a waiting rank leaves its core to others.

    Where a poll and its wake-up are dear, as on a slow or crowded node, the cap stretches until waiting takes no more
    than ``share`` of the core, to ``stretched_seconds`` at most.
    """

    def __init__(
        self,
        cap_seconds: float = LONGEST_PAUSE_SECONDS,
        share: float = LARGEST_CPU_SHARE,
        stretched_seconds: float = LONGEST_STRETCH * LONGEST_PAUSE_SECONDS,
    ) -> None:
        self._cap_seconds, self._share, self._stretched_seconds = cap_seconds, share, stretched_seconds
        self._pause_seconds = min(FIRST_PAUSE_SECONDS, cap_seconds)
        self._cpu_at = time.thread_time()
        self._poll_cpu_seconds = 0.0

    def pause(self) -> None:
        """Sleep once; the next pause is twice as long, up to the cap."""
        cpu_now = time.thread_time()
        spent = cpu_now - self._cpu_at
        if spent < DEAREST_POLL_SECONDS:  # more is work of the rank's own, done since the last pause
            # the mean of a few, since only some polls find a round complete
            self._poll_cpu_seconds += (spent - self._poll_cpu_seconds) / 4
        self._cpu_at = cpu_now
        worth = self._poll_cpu_seconds / self._share
        longest = max(self._cap_seconds, min(worth, self._stretched_seconds))
        time.sleep(min(self._pause_seconds, longest))
        self._pause_seconds = min(2 * self._pause_seconds, longest)

    def reset(self) -> None:
        """Begin again with the shortest pause."""
        self._pause_seconds = min(FIRST_PAUSE_SECONDS, self._cap_seconds)


def wait(request: MPI.Request, name: str, scope: str = "world") -> None:
    """Wait for a nonblocking operation without spinning; the caller holds its buffers until this returns.

    The watch knows it by its ``name`` and a running number among those of its ``scope``, whose ranks all wait for it.
    """
    back_off = BackOff()
    BEAT.wait_in(name, scope)
    while not request.Test():
        back_off.pause()
    BEAT.go_on()


def rest_shortly() -> None:
    """Between two calls of a thread that lets others progress."""
    time.sleep(IPROBE_EVERY_SECONDS)


class ProgressThread:
    """A helper thread that calls ``advance``, which enters the MPI library, every few ms of a rank's long call.

    Most MPI libraries advance a nonblocking collective only while the process is inside some MPI call; without this
    every other rank's round would wait for the call to return. Needs MPI_THREAD_MULTIPLE. ``advance`` never runs
    outside ``running``.

    Args:
        rest: sleeps between two calls; every 2 ms unless it says otherwise.
        wake: ends a rest under way, which ``running`` waits for at its end.
    """

    def __init__(
        self,
        advance: Callable[[], None],
        rest: Callable[[], None] = rest_shortly,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._advance, self._rest, self._wake = advance, rest, wake
        self._lock = threading.Lock()
        self._active = threading.Event()
        self._closing = False
        self._error: BaseException | None = None
        # Daemon: a rank that raises must reach MPI_Abort at exit even though nobody closed its thread.
        self._thread = threading.Thread(target=self._probe, name="mpi-progress", daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Probe while inside; not to be nested.

        Raises:
            RuntimeError: the thread has failed.
        """
        assert not self._active.is_set() and not self._closing, "progress is already running, or closed"
        if self._thread.ident is None:
            self._thread.start()
        self._active.set()
        try:
            yield
        finally:
            self._active.clear()
            self._wake()
            with self._lock:  # the thread may be in the middle of a call
                pass
        self.check()

    def check(self) -> None:
        """Raise what ended the thread, if anything did.

        Raises:
            RuntimeError: the thread has failed; its cause is the MPI error.
        """
        ended = self._thread.ident is not None and not self._thread.is_alive()
        if ended and not self._closing:
            raise RuntimeError(f"the MPI progress thread has failed: {self._error}") from self._error

    def close(self) -> None:
        """End the thread and wait for it; to be called before MPI finalises. May be called again."""
        self._closing = True
        self._active.set()
        if self._thread.is_alive():
            self._thread.join()

    def _probe(self) -> None:
        try:
            while self._active.wait() and not self._closing:
                with self._lock:
                    if self._active.is_set():
                        self._rest()  # first: most calls are short
                    if self._active.is_set() and not self._closing:
                        self._advance()
        except BaseException as error:  # noqa: BLE001 (a thread's error must reach the rank's main thread, whatever it is)
            self._error = error
