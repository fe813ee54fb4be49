"""Writes that happen one after another on a thread of their own, a bounded number of bytes behind.

The owner hands writes over and asks for failures; both from one thread. Python waits at exit for the thread to finish
what it was given, so it never outlives the program, and ``close`` ends it at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class WriteBehind:
    """A thread that writes. A caller that is ``max_bytes`` ahead of it waits; how often and how long is counted."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="write-behind")
        self._under_way: deque[tuple[Future[None], int]] = deque()
        self._num_bytes = 0
        self.num_waits = 0
        self.waited_seconds = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes handed over and not known to be written."""
        return self._num_bytes

    def put(self, write: Callable[[], None], num_bytes: int) -> None:
        """Hand over a write of so many bytes; waits while it would be too many, but for a first that alone is.

        Raises:
            whatever an earlier write raised: the first failure, at every call after it.
        """
        self.check()
        if self._under_way and self._num_bytes + num_bytes > self._max_bytes:
            self._wait_for_room(num_bytes)
        self._under_way.append((self._thread.submit(write), num_bytes))
        self._num_bytes += num_bytes

    def check(self) -> None:
        """Forget what was written.

        Raises:
            whatever a write raised.
        """
        while self._under_way and self._under_way[0][0].done():
            self._take_first()

    def drain(self) -> None:
        """Wait until all is written.

        Raises:
            whatever a write raised.
        """
        while self._under_way:
            self._take_first()

    def close(self) -> None:
        """End the thread after the write it is at; what has not begun is dropped. May be called again."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._under_way.clear()
        self._num_bytes = 0

    def _wait_for_room(self, num_bytes: int) -> None:
        start = time.perf_counter()
        while self._under_way and self._num_bytes + num_bytes > self._max_bytes:
            self._take_first()
        self.num_waits += 1
        self.waited_seconds += time.perf_counter() - start

    def _take_first(self) -> None:
        future, num_bytes = self._under_way[0]
        future.result()  # a failure stays first in line
        self._under_way.popleft()
        self._num_bytes -= num_bytes
