"""Draft-ahead: a rank that waits for the others generates the next step's responses, whose texts are drafts there.

The prompts and the noise of the next step are known, and an update changes the weights little: most of such a text is
what the next step generates, so there it is verified in a few wide passes instead of being decoded token by token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence, Set
from operator import itemgetter
from typing import TypeVar

from tlt_hpc.common.records import Request, SampleKey
from tlt_hpc.mpi.pulse import Pulse
from tlt_hpc.mpi.replica import Replica
from tlt_hpc.mpi.roster import Roster, State, Status
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.responses import Texts

T = TypeVar("T")

_SLICE_SECONDS = 0.02
"""Rounds between two looks at the other ranks."""
_AT_ONCE = 64
"""Requests that are submitted at once: all those of many ranks would take long."""


def longest_ahead_texts(ranks: Iterable[Texts], is_wanted: Callable[[SampleKey], bool]) -> Texts:
    """All ranks' texts for the responses that are wanted; where several ranks have one, the longest."""
    wanted = (one for texts in ranks for one in texts.items() if is_wanted(one[0]))
    return dict(sorted(wanted, key=lambda one: len(one[1])))


def order_to_generate_ahead(own: int, shards: Sequence[Sequence[T]], busy: Set[int]) -> list[T]:
    """Return the order in which rank ``own`` generates the next step's responses ahead.

    Args:
        shards: the responses of each rank.
        busy: ranks that still decode this step's.

    Those of busy ranks are mixed with its own, and each idle rank begins at another place of theirs. So all shards are
    covered alike if all ranks but one are idle: were a rank's own first, it alone would be faster in the next step,
    which waits for the others.
    """
    placed, count = list[tuple[int, T]](), len(shards)
    for rank in ((own + i) % count for i in range(count)):
        if rank in {own, *busy}:
            shard, share = shards[rank], 1 if rank == own else count - 1
            start = 0 if rank == own else len(shard) * ((own - rank) % count - 1) // share
            placed += [((i + 1) * share, one) for i, one in enumerate([*shard[start:], *shard[:start]])]
    return [one for _, one in sorted(placed, key=itemgetter(0))]


class AheadGeneration:
    """One rank's generation ahead during one step's rollout and its refills, while it waits for the others."""

    def __init__(
        self, engine: RolloutEngine, replica: Replica, pulse: Pulse, requests: Sequence[Sequence[Request]]
    ) -> None:
        """``requests``: those of the next step, by replica; none: there is nothing to do."""
        self._engine, self._replica, self._pulse, self._requests = engine, replica, pulse, requests
        self._left: list[Request] | None = None if any(requests) else []
        """Not submitted yet, once this rank was idle."""
        self._is_idle = False
        self.spans: list[tuple[float, float]] = []
        """When this rank did so, in seconds since the epoch."""

    @property
    def has_work(self) -> bool:
        """True if there is work for a rank that waits; the same on all ranks of a replica."""
        return self._engine.has_ahead_work or self._left is None or bool(self._left)

    def generate_ahead_slice(self, roster: Roster, status: Status, is_over: Callable[[], bool]) -> None:
        """Do one slice of the work; collective over the replica, whose ranks take one step in each."""
        now = time.time()
        if not self._is_idle:
            self._is_idle = True
            self.spans.append((now, now))
        end = time.perf_counter() + _SLICE_SECONDS
        with self._pulse.progressing(status):
            self._step(roster)
            while self._replica.size == 1 and time.perf_counter() < end and self.has_work and not is_over():
                self._step(roster)
        self.spans[-1] = self.spans[-1][0], time.time()

    def end_idle_span(self) -> None:
        """The rollout is over: a refill may follow, for which the engine has put this work aside."""
        self._is_idle = False

    def _step(self, roster: Roster) -> None:
        if self._left is None:
            self._left = order_to_generate_ahead(
                self._replica.number, self._requests, self._agree_on_busy_replicas(roster)
            )
        if not self._engine.ahead.waiting:
            self._engine.submit_ahead(self._left[:_AT_ONCE])
            del self._left[:_AT_ONCE]
        self._engine.step()

    def _agree_on_busy_replicas(self, roster: Roster) -> set[int]:
        """The replicas that generate. Each rank of this one may have seen another roster: the first one's counts."""
        replica, busy = self._replica, set[int]()
        for number, first in enumerate(roster.statuses[:: replica.size]):
            if replica.broadcast_from_first_rank(first.state is State.BUSY):
                busy.add(number)
        return busy
