"""Owns the one thread of a watch that touches the run's folder: where the folder hangs, it alone hangs with it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Scribe:
    """Does one thing at a time, given by one thread, which asks ``is_idle`` first and never waits."""

    def __init__(self) -> None:
        self._box: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        # Daemon: a folder that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="watch-files", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether all that was given is done."""
        return self._idle.is_set()

    def give(self, task: Callable[[], None]) -> None:
        """Have ``task`` done, which raises nothing; only while idle."""
        assert self.is_idle, "the scribe is busy"
        self._idle.clear()
        self._box.put(task)

    def wait(self, seconds: float) -> bool:
        """Wait until it is idle, so long at most; whether it is."""
        return self._idle.wait(seconds)

    def close(self) -> None:
        """Let the thread end after what it is at."""
        self._box.put(None)

    def _work(self) -> None:
        while (task := self._box.get()) is not None:
            task()
            self._idle.set()
