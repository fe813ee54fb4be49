"""Runs what touches the run's folder, one task at a time, in a thread: a file system that hangs stops only that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class StatusWriter:
    """Runs one task at a time. The watch's thread and, at the end, the main thread may call it at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the last task is done."""
        return self._thread is None or not self._thread.is_alive()

    def run_if_idle(self, task: Callable[[], None]) -> bool:
        """Run ``task``, which must not raise, unless the last one is still running; returns whether it will run."""
        return self._start(task)[0]

    def run_within(self, seconds: float, task: Callable[[], None]) -> bool:
        """Run ``task`` after the last one and wait for its end; False if either does not end within ``seconds``."""
        end = time.monotonic() + seconds
        while True:
            is_started, thread = self._start(task)
            thread.join(max(0.0, end - time.monotonic()))
            if is_started or thread.is_alive():
                return not thread.is_alive()

    def _start(self, task: Callable[[], None]) -> tuple[bool, threading.Thread]:
        """Whether ``task`` was started, and the thread of the task that runs now."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return False, self._thread
            # Daemon: a folder that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=task, name="watch-files", daemon=True)
            self._thread.start()
            return True, self._thread
