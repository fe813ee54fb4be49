"""One function on a thread of its own, its result or its error asked for later. Knows nothing of what it does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Background(Generic[T]):
    """A call that began when this was made.

    The thread is a daemon: a rank that raises must reach MPI_Abort at exit without waiting for its disk.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether ``result`` would not wait."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait for the function, so long at most."""
        self._thread.join(seconds)

    def result(self) -> T:
        """Wait for the function and return what it did, or raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return cast(T, self._result)

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001 (whatever it is, it is raised where the result is asked for)
            self._error = error
