"""Owns the repeated exchange of every rank's status during a rollout; knows neither the engine nor the drafter.

One exchange of a small fixed record per rank is under way at any time of a rollout. A rank posts the next
round only on having seen the last one, and none after a roster that is `over`; all ranks see the same rosters, so all
leave on the same round with nothing pending, and rounds of two rollouts cannot meet.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tlt_hpc.cluster.watch.beat import BEAT
from tlt_hpc.mpi.exchange import Exchange
from tlt_hpc.mpi.progress import IPROBE_EVERY_SECONDS, LONGEST_STRETCH, ProgressThread
from tlt_hpc.mpi.roster import Heard, Roster, State, Status
from tlt_hpc.mpi.shared import Records

BUSY_SECONDS = 50e-3
"""From one look of a rank that decodes to its next, in a run, where it has a core: rounds of a small model take a few
milliseconds. What changes in its own state it tells at once, so nobody is released the later for it."""
_BUSY = State.BUSY
RECORD_FIELDS = ("epoch", "round", "state", "sequences_left", "tokens", "drafter_steps", "stop")


class Pulse:
    """Tells every rank, without ever blocking, what all the others are doing.

    ``exchange`` is private to the pulse. A BUSY rank looks at it once in ``busy_seconds``, and the more seldom the more
    ranks share a core.

    Counters, over all rollouts: ``num_polls``, ``num_rounds``; ``last_round_seconds`` runs from this rank's posting of
    the last round to its seeing the result. ``released_at`` is when this rank came to know that the last rollout was
    over, by ``time.perf_counter``.
    """

    def __init__(self, exchange: Exchange, busy_seconds: float = 0.0) -> None:
        self.num_polls = 0
        self.num_rounds = 0
        self.last_round_seconds = 0.0
        self.released_at = 0.0
        self._exchange = exchange
        self._busy_seconds = busy_seconds * exchange.crowding
        self._next_look = 0.0
        self._progress = ProgressThread(self._advance, self._rest, self._wake)
        self._standing: Status | None = None
        self._told_over = True
        self._is_posted = False
        self._posted_at = 0.0
        self._roster: Roster | None = None

    def begin(self, epoch: int) -> None:
        """Start the rollout ``epoch`` (its step); nothing of an earlier one may be pending."""
        assert not self._is_posted, "a round of an earlier rollout is pending: poll until its roster is over"
        self._roster = Roster.before_first_round(epoch, self._exchange.num_ranks)
        self._told_over = False
        self._next_look = 0.0
        self._exchange.begin()
        BEAT.begin_pulse()

    def poll(self, status: Status) -> Roster:
        """The newest roster, without blocking; at most one new one a call.

        Where a round has completed, the next is posted with ``status``, unless the roster is over; after one that is
        over, ``begin`` comes next. Before the first round completes all ranks are taken to be BUSY.

        Raises:
            RuntimeError: the thread behind ``progressing`` has failed.
        """
        self.num_polls += 1
        if time.perf_counter() < self._next_look and status.state is _BUSY and not status.stop:
            BEAT.tick()  # most polls end here, between two rounds of decoding that have turned the caches over
            assert self._roster is not None
            return self._roster
        return self.look(status)

    def look(self, status: Status) -> Roster:
        """As ``poll``, however recently this rank has looked."""
        assert self._roster is not None and not self._told_over, "poll outside a rollout: call begin first"
        self._progress.check()
        self._move_on(self._roster, status)
        self._told_over = self._roster.over
        if not self._told_over:
            self._next_look = time.perf_counter() + self._busy_seconds
        BEAT.polled(self.num_rounds, status.sequences_left, self._told_over)
        return self._roster

    @property
    def over(self) -> bool:
        """Whether the rollout is known to be over; cheap, and true as soon as the helper thread has seen it."""
        return self._roster is not None and self._roster.over

    def back_off(self) -> None:
        """Sleep for a while, or until another roster may be there."""
        BEAT.stand_by()
        self._exchange.pause()

    @contextmanager
    def progressing(self, status: Status | None = None) -> Iterator[None]:
        """Let the others' rounds complete while this rank is inside one long call that releases the GIL.

        With a ``status`` the helper thread also takes rosters and posts the next rounds with it, so that rounds do not
        wait for the call's end; the next ``poll`` returns the newest of them. Without, it only enters the library.

        Raises:
            RuntimeError: the helper thread has failed.
        """
        self._standing = status
        BEAT.go_on()
        with self._progress.running():
            yield
        BEAT.go_on()

    def close(self) -> None:
        """End the helper thread; to be called before MPI finalises."""
        self._progress.close()

    def _advance(self) -> None:
        """One call of the helper thread, while the main thread is away."""
        self._exchange.comm.Iprobe()  # whatever else is under way, such as a merge, goes on as well
        if self._standing is None or self._roster is None:
            self._exchange.advance()
        elif not self._roster.over:
            self._move_on(self._roster, self._standing)

    def _rest(self) -> None:
        """Between two such calls: with a status nothing else is under way, and a new roster wakes the thread."""
        if self._standing is None:
            time.sleep(IPROBE_EVERY_SECONDS * min(self._exchange.crowding, LONGEST_STRETCH))
        else:
            self._exchange.rest()

    def _wake(self) -> None:
        if self._standing is not None:
            self._exchange.wake()

    def _move_on(self, roster: Roster, status: Status) -> None:
        """Take the round's roster if it is there, and post the next round unless all is over."""
        if roster.over:
            return
        if self._is_posted:
            records = self._exchange.take()
            if records is None:
                return
            roster = self._take_roster(roster, records)
        if not roster.over:
            self._post(roster, status)

    def _post(self, roster: Roster, status: Status) -> None:
        self._posted_at = time.perf_counter()
        self._is_posted = True
        self._exchange.post(
            (
                roster.epoch,
                roster.round + 1,
                status.state,
                status.sequences_left,
                status.tokens,
                status.drafter_steps,
                status.stop,
            )
        )

    def _take_roster(self, previous: Roster, records: Records) -> Roster:
        self._is_posted = False
        self.num_rounds += 1
        self.last_round_seconds = time.perf_counter() - self._posted_at
        expected = (previous.epoch, previous.round + 1)
        assert not np.count_nonzero(records[:, :2] - expected), (
            f"records of epoch and round {expected}: {records[:, :2]}"
        )
        self._roster = Roster(*expected, Heard(records[:, 2:]))
        if self._roster.over:
            self._next_look = 0.0
            self.released_at = time.perf_counter()
        return self._roster
