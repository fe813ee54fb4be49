"""How a rank waits: it sleeps between tests of a request, and a thread makes MPI progress during a long call.

Treats what is waited for as opaque.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat

from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.mpi.library import MPI

FIRST_PAUSE_SECONDS = 50e-6
MAX_PAUSE_SECONDS = 4e-3
YIELDS = 50
"""Tests of a request, about 2 us each, before the first sleep: ranks of a replica are a few microseconds apart, and a
sleep takes a tenth of a millisecond."""
"""A test of a request and the wake-up before it take about 50 us, so that a waiting rank uses 1 to 2 % of its core."""
TESTS = 64
"""Tests in a row after a sleep: MPICH 4 moves 16 KB of a large message at a test, so that with one a model would be
sent at 4 MB/s. A test that finds nothing takes 0.3 us."""
PROGRESS_SECONDS = 2e-3
"""From one call of the progress thread to the next."""


def backoff_pauses() -> Iterator[float]:
    """Seconds to sleep between tests of a request: they double up to 4 ms, so that a waiting rank does not spin."""
    seconds = FIRST_PAUSE_SECONDS
    while True:
        yield seconds
        seconds = min(2 * seconds, MAX_PAUSE_SECONDS)


def wait_for_request(request: MPI.Request, name: str, scope: str = "world") -> None:
    """Wait for a nonblocking operation without spinning; the caller holds its buffers until this returns.

    The watch identifies it by its ``name`` and a running number within its ``scope``, whose ranks all wait for it.
    """
    BEAT.mark_waiting_in(name, scope)
    yields = repeat((1, 0.0), YIELDS)  # sleep(0) lets another rank have the core
    for num_tests, seconds in chain(yields, zip(repeat(TESTS), backoff_pauses(), strict=False)):
        if any(request.Test() for _ in range(num_tests)):
            break
        time.sleep(seconds)
    BEAT.mark_working()


class ProgressThread:
    """A helper thread that calls ``advance``, which enters the MPI library, every 2 ms during a rank's long call.

    Most MPI libraries advance a nonblocking collective only while the process is inside some MPI call; without this
    every other rank's round would wait for the call to return. Needs MPI_THREAD_MULTIPLE. ``advance`` is never called
    outside ``running``.
    """

    def __init__(self, advance: Callable[[], None]) -> None:
        self._advance = advance
        self._lock = threading.Lock()
        self._active = threading.Event()
        self._closing = False
        self._error: BaseException | None = None
        # Daemon: a rank that raises must reach MPI_Abort at exit even though its thread was not closed.
        self._thread = threading.Thread(target=self._run, name="mpi-progress", daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make progress while inside; must not be nested.

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
            with self._lock:  # the thread may be in the middle of a call
                pass
        self.check_thread_error()

    def check_thread_error(self) -> None:
        """Raise the error that ended the thread, if there is one.

        Raises:
            RuntimeError: the thread has failed; its cause is the MPI error.
        """
        if self._error is not None:
            raise RuntimeError(f"the MPI progress thread has failed: {self._error}") from self._error

    def close(self) -> None:
        """End the thread and wait for it; to be called before MPI finalises. May be called again."""
        self._closing = True
        self._active.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._active.wait() and not self._closing:
                time.sleep(PROGRESS_SECONDS)  # first: most calls are short
                with self._lock:
                    if self._active.is_set() and not self._closing:
                        self._advance()
        except BaseException as error:  # noqa: BLE001 (a thread's error must reach the rank's main thread, whatever it is)
            self._error = error
