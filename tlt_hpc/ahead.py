"""Draft-ahead: a rank that waits for the others generates the next step's responses, whose texts are drafts there.

The prompts and the noise of the next step are known, and an update changes the weights little: most of such a text is
what the next step generates, so there it is verified in a few wide passes instead of being decoded token by token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import Request, SampleKey
from tlt_hpc.mpi.roster import Roster, State, Status
from tlt_hpc.rl.draws import StepDraws
from tlt_hpc.rollout.chooser import ahead_worth
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
    """One rank's generation ahead during one step's rollout and its refills: beside its own work, then alone."""

    def __init__(self, job: Job, requests: Sequence[Request]) -> None:
        """``requests``: all ranks' of the next step; none: there is nothing to do."""
        self._job, self._requests = job, requests
        self._is_idle = self._has_others = False
        self.spans: list[tuple[float, float]] = []
        """When nothing else was decoded, in seconds since the epoch."""
        self._worth = ahead_worth(job.replica.count)
        job.engine.submit_ahead(job.shard(requests), self._worth)

    @property
    def is_left(self) -> bool:
        """Whether there is anything to do for a rank that waits; the same on all ranks of a replica."""
        may_help = bool(self._requests) and self._job.replica.size == 1 and not self._has_others
        return self._job.engine.has_ahead or may_help

    def work(self, roster: Roster, status: Status, is_over: Callable[[], bool]) -> None:
        """One slice; collective over the replica, whose ranks take one step in each."""
        engine, now = self._job.engine, time.time()
        if not self._is_idle:
            self._is_idle = True
            self.spans.append((now, now))
        if not self._has_others:
            self._has_others = True
            engine.submit_ahead(self._of_busy_ranks(roster), self._worth)
        end = time.perf_counter() + _SLICE_SECONDS
        with self._job.pulse.progressing(status):
            engine.step()
            while self._job.replica.size == 1 and time.perf_counter() < end and engine.has_ahead and not is_over():
                engine.step()
        self.spans[-1] = self.spans[-1][0], time.time()

    def pause(self) -> None:
        """The rollout is over: a refill may follow, for which the engine has put this work aside."""
        self._is_idle = False

    def _of_busy_ranks(self, roster: Roster) -> list[Request]:
        """Requests of ranks that still generate, those of the next rank first.

        Where ranks decode together they know of their own alone: each may have seen another roster.
        """
        job, count = self._job, self._job.replica.count
        if job.replica.size > 1:
            return []
        busy = {rank for rank, status in enumerate(roster.statuses) if status.state is State.BUSY} - {job.world.rank}

        def distance(request: Request) -> int:
            return (unit_of(job.config, request.key) % count - job.world.rank) % count

        others = [one for one in self._requests if unit_of(job.config, one.key) % count in busy]
        return sorted(others, key=distance)
