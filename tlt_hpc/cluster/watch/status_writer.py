"""The one thread of a watch that touches the run's folder: if the file system hangs, only this thread hangs with it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


class StatusWriter:
    """Runs one task at a time, in a thread of its own."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        # Daemon: a folder that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="watch-files", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether the last task is done."""
        return self._idle.is_set()

    def run_if_idle(self, task: Callable[[], None]) -> bool:
        """Run ``task``, which must not raise, unless the last one is still running; returns whether it will run.

        The watch's thread and, at the end, the main thread may call this at the same time.
        """
        with self._lock:
            if not self._idle.is_set():
                return False
            self._idle.clear()
        self._tasks.put(task)
        return True

    def run_within(self, seconds: float, task: Callable[[], None]) -> bool:
        """Run ``task`` after the last one and wait for its end; False if either does not end within ``seconds``."""
        done = threading.Event()

        def work() -> None:
            task()
            done.set()

        end = time.monotonic() + seconds
        while not self.run_if_idle(work):
            if not self._idle.wait(max(0.0, end - time.monotonic())):
                return False
        return done.wait(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Let the thread end after its task."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            self._idle.set()
