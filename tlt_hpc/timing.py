"""Wall-clock seconds by phase of a step. Knows nothing of what the phases do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Sums the seconds of named phases until they are taken."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a block as ``phase``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call, with their sum under ``step``; starts new ones."""
        taken, self._seconds = self._seconds, {}
        return {**taken, "step": sum(taken.values())}
