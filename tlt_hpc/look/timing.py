"""Measures the phases of a step in wall-clock and CPU seconds, and reports them to the watch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tlt_hpc.cluster.watch.beat import BEAT, Phase

WATCHED = {
    "gen": Phase.ROLLOUT,
    "reward": Phase.REWARD,
    "update_actor": Phase.UPDATE,
    "refresh": Phase.REFRESH,
}
"""Name of a phase in the metrics -> phase of the watch."""


class PhaseTimer:
    """Sums the seconds of named phases until they are taken.

    CPU seconds are user and system time of all threads of this process; processes that it started are not included.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._cpu_seconds: dict[str, float] = {}
        self._spans: list[tuple[str, float, float]] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a block as ``phase``, one of ``WATCHED``."""
        start, cpu_start = time.perf_counter(), time.process_time()
        try:
            with self.between_steps(phase), BEAT.within(WATCHED[phase]):
                yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start
            self._cpu_seconds[phase] = self._cpu_seconds.get(phase, 0.0) + time.process_time() - cpu_start

    @contextmanager
    def between_steps(self, phase: str) -> Iterator[None]:
        """Record a block that is not part of a step's seconds, such as a save."""
        start = time.time()
        try:
            yield
        finally:
            self._spans.append((phase, start, time.time()))

    def take_spans(self) -> list[tuple[str, float, float]]:
        """Name, start and end (seconds since the epoch) of all blocks since the last call, ordered by end."""
        taken, self._spans = self._spans, []
        return taken

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call, and their sum as ``step``; resets them."""
        taken, self._seconds = self._seconds, {}
        return {**taken, "step": sum(taken.values())}

    def take_cpu(self) -> dict[str, float]:
        """CPU seconds of the rollout and of the step since the last call, as metrics; resets them."""
        taken, self._cpu_seconds = self._cpu_seconds, {}
        return {"perf/rollout_cpu_seconds": taken["gen"], "perf/cpu_seconds": sum(taken.values())}
