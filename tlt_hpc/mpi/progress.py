"""How a rank waits: it sleeps between tests of a request, and a thread makes MPI progress during a long call.

With the broadcasts that waiting like this makes possible; what is sent is opaque here.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.cluster.watch.beat import BEAT
from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import told
from tlt_hpc.mpi.library import MPI

T = TypeVar("T")

FIRST_PAUSE_SECONDS = 50e-6
MAX_PAUSE_SECONDS = 4e-3
"""A test of a request and the wake-up before it take about 50 us, so that a waiting rank uses 1 to 2 % of its core."""
PROGRESS_SECONDS = 2e-3
"""From one call of the progress thread to the next."""
BLOCK_BYTES = 2**26
"""Size of one broadcast, so that the MPI library's own buffers stay small."""


def pauses() -> Iterator[float]:
    """Seconds to sleep between tests of a request: they double up to 4 ms, so that a waiting rank does not spin."""
    seconds = FIRST_PAUSE_SECONDS
    while True:
        yield seconds
        seconds = min(2 * seconds, MAX_PAUSE_SECONDS)


def wait(request: MPI.Request, name: str, scope: str = "world") -> None:
    """Wait for a nonblocking operation without spinning; the caller holds its buffers until this returns.

    The watch identifies it by its ``name`` and a running number within its ``scope``, whose ranks all wait for it.
    """
    BEAT.wait_in(name, scope)
    for seconds in pauses():
        if request.Test():
            break
        time.sleep(seconds)
    BEAT.go_on()


def broadcast_item(comm: MPI.Comm, item: T, root: int, name: str, scope: str = "world") -> T:
    """The picklable ``item`` of rank ``root`` on all ranks of ``comm``."""
    payload = bytearray(pickle.dumps(item, pickle.HIGHEST_PROTOCOL)) if comm.rank == root else bytearray()
    length = np.array([len(payload)], np.int64)
    wait(comm.Ibcast(length, root), name, scope)
    payload = payload or bytearray(int(length[0]))
    broadcast_bytes(comm, np.frombuffer(payload, np.uint8), root, name, scope)
    return item if comm.rank == root else pickle.loads(payload)  # type: ignore[no-any-return]


def broadcast_bytes(comm: MPI.Comm, values: NDArray[np.uint8], root: int, name: str, scope: str) -> None:
    """Write rank ``root``'s bytes [N] into the others' of the same size, a block at a time."""
    for start in range(0, values.size, BLOCK_BYTES):
        wait(comm.Ibcast(values[start : start + BLOCK_BYTES], root), name, scope)


def to_send(error: ValueError | OSError) -> UserError:
    """An error as it is raised on the other ranks: of its own class if it is a UserError."""
    if isinstance(error, UserError):
        return type(error)(str(error))
    return UserError(told(error) if isinstance(error, OSError) else str(error))


def run_once(is_first: bool, work: Callable[[], T], broadcast: Callable[[Any], Any]) -> T:
    """The picklable result of ``work``, run on the first rank and given to all by ``broadcast``; its failure too.

    Raises:
        UserError: on all ranks, if the first raised a UserError (of its class) or an OSError; if it raised another
            ValueError, on the others.
    """
    outcome: tuple[UserError | None, Any] = None, None
    if is_first:
        try:
            outcome = None, work()
        except (ValueError, OSError) as error:
            broadcast((to_send(error), None))
            if isinstance(error, OSError):
                raise to_send(error) from error
            raise
    failed, result = broadcast(outcome)
    if failed is not None:
        raise failed
    return result  # type: ignore[no-any-return]


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
