"""How a rank waits: it sleeps between tests of a request, and a thread makes MPI progress during a long call.

Treats what is waited for as opaque.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tlt_hpc.cluster.watch.beat import BEAT
from tlt_hpc.mpi.library import MPI

FIRST_PAUSE_SECONDS = 50e-6
MAX_PAUSE_SECONDS = 4e-3
"""A test of a request and the wake-up before it take about 50 us, so that a waiting rank uses 1 to 2 % of its core."""
PROGRESS_SECONDS = 2e-3
"""From one call of the progress thread to the next."""


class BackOff:
    """Pauses that double from 50 microseconds up to 4 milliseconds, so that a waiting rank does not spin."""

    def __init__(self) -> None:
        self._seconds = FIRST_PAUSE_SECONDS

    def pause(self) -> None:
        """Sleep once; the next pause is twice as long, up to the maximum."""
        time.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, MAX_PAUSE_SECONDS)

    def reset(self) -> None:
        """Start again with the shortest pause."""
        self._seconds = FIRST_PAUSE_SECONDS


def wait(request: MPI.Request, name: str, scope: str = "world") -> None:
    """Wait for a nonblocking operation without spinning; the caller holds its buffers until this returns.

    The watch identifies it by its ``name`` and a running number within its ``scope``, whose ranks all wait for it.
    """
    back_off = BackOff()
    BEAT.wait_in(name, scope)
    while not request.Test():
        back_off.pause()
    BEAT.go_on()


def broadcast_item(comm: MPI.Comm, item: Any, root: int, block_bytes: int, name: str, scope: str = "world") -> Any:
    """The picklable ``item`` of rank ``root`` on all ranks of ``comm``, in blocks of at most ``block_bytes``."""
    payload = bytearray(pickle.dumps(item, pickle.HIGHEST_PROTOCOL)) if comm.rank == root else bytearray()
    length = np.array([len(payload)], np.int64)
    wait(comm.Ibcast(length, root), name, scope)
    payload = payload or bytearray(int(length[0]))
    buffer = np.frombuffer(payload, np.uint8)
    for start in range(0, buffer.size, block_bytes):
        wait(comm.Ibcast(buffer[start : start + block_bytes], root), name, scope)
    return item if comm.rank == root else pickle.loads(payload)


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
        # Daemon: a rank that raises must reach MPI_Abort at exit even though nobody closed its thread.
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
        self.check()

    def check(self) -> None:
        """Raise the error that ended the thread, if there is one.

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

    def _run(self) -> None:
        try:
            while self._active.wait() and not self._closing:
                time.sleep(PROGRESS_SECONDS)  # first: most calls are short
                with self._lock:
                    if self._active.is_set() and not self._closing:
                        self._advance()
        except BaseException as error:  # noqa: BLE001 (a thread's error must reach the rank's main thread, whatever it is)
            self._error = error
