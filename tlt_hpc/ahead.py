"""Draft-ahead: a rank that waits for the others generates the next step's responses, whose texts are drafts there.

The prompts and the noise of the next step are known, and an update changes the weights little: most of such a text is
what the next step generates, so there it is verified in a few wide passes instead of being decoded token by token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import Request, SampleKey
from tlt_hpc.mpi.roster import Roster, State, Status
from tlt_hpc.rl.draws import StepDraws
from tlt_hpc.session import Job, unit_of

_SLICE_SECONDS = 0.02
"""Rounds between two looks at the other ranks."""

Texts = dict[SampleKey, NDArray[np.int32]]


def next_requests(job: Job, step: int) -> list[Request]:
    """All ranks' requests of the step after this one; collective over the node, as a shuffled order is read once."""
    if step + 1 >= job.config.run.num_steps:
        return []
    return StepDraws(job.config, job.prompts, step + 1).requests()


def receive(job: Job, texts: Texts) -> Texts:
    """Send texts to the ranks that generate these responses now, and receive this rank's; collective."""
    replica, size = job.replica, job.replica.size
    parts: list[Texts] = [{} for _ in range(job.world.size)]
    for key, text in texts.items():
        # every rank of a replica has the same texts: each one sends to its like
        parts[unit_of(job.config, key) % replica.count * size + replica.index][key] = text
    received: Texts = {}
    for part in job.world.alltoall(parts):
        for key, text in part.items():
            if len(text) > len(received.get(key, ())):
                received[key] = text
    return received


class AheadTail:
    """One rank's generation ahead in the tail of one step, in slices, with pauses for what comes first."""

    def __init__(self, job: Job, requests: Sequence[Request]) -> None:
        """``requests``: all ranks' of the next step; none: there is nothing to do."""
        self._job, self._requests = job, requests
        self._has_begun = False
        self.spans: list[tuple[float, float]] = []
        """When it ran, from the first slice to the pause, in seconds since the epoch."""

    @property
    def is_left(self) -> bool:
        """Whether there is anything to generate; the same on all ranks of a replica."""
        return self._job.engine.ahead.is_left if self._has_begun else bool(self._requests)

    def work(self, roster: Roster, status: Status, is_over: Callable[[], bool]) -> None:
        """One slice; collective over the replica, whose ranks take one step in each."""
        job, engine = self._job, self._job.engine
        if not self._has_begun:
            self._has_begun = True
            engine.submit_ahead(self._chosen(roster))
        if not engine.ahead.is_running:
            engine.run_ahead()
            self.spans.append((time.time(), 0.0))
        end = time.perf_counter() + _SLICE_SECONDS
        with job.pulse.progressing(status):
            engine.step()
            while job.replica.size == 1 and time.perf_counter() < end and engine.has_ahead and not is_over():
                engine.step()
        if not engine.has_ahead:
            self.pause()

    def pause(self) -> None:
        """Leave the engine to the step's own requests; ``work`` continues."""
        if self._job.engine.ahead.is_running:
            self._job.engine.pause_ahead()
            self.spans[-1] = self.spans[-1][0], time.time()

    def _chosen(self, roster: Roster) -> list[Request]:
        """Which requests: this rank's own, and in between those of ranks that still generate, the next ones first.

        The ranks of a replica, which choose alike, know of their own alone.
        """
        job, count = self._job, self._job.replica.count
        own = job.shard(self._requests)
        if job.replica.size > 1:
            return own
        busy = {rank for rank, status in enumerate(roster.statuses) if status.state is State.BUSY} - {job.world.rank}

        def distance(request: Request) -> int:
            return (unit_of(job.config, request.key) % count - job.world.rank) % count

        others = [one for one in self._requests if unit_of(job.config, one.key) % count in busy]
        others.sort(key=distance)
        return [one for one in chain.from_iterable(zip_longest(own, others)) if one is not None]
