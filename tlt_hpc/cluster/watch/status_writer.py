"""The one thread of a watch that touches the run's folder: if the file system hangs, only this thread hangs with it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class StatusWriter:
    """Runs one task at a time, in a thread of its own; the caller asks ``is_idle`` first."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        # Daemon: a folder that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="watch-files", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether the last task is done."""
        return self._idle.is_set()

    def run(self, task: Callable[[], None]) -> None:
        """Run ``task``, which must not raise; only while idle."""
        assert self.is_idle, "the writer is busy"
        self._idle.clear()
        self._tasks.put(task)

    def wait(self, seconds: float) -> bool:
        """Wait until it is idle, for ``seconds`` at most; returns whether it is."""
        return self._idle.wait(seconds)

    def close(self) -> None:
        """Let the thread end after its task."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            self._idle.set()
