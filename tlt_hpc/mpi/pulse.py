"""The pulse: a repeated nonblocking exchange of every rank's status during a rollout.

One allgather of a small fixed record per rank is pending at any time of a rollout. A rank posts the next round only
after it has seen the result of the last one, and none after a roster that is over. So all ranks see the same
rosters, leave the rollout in the same round with nothing pending, and rounds of two rollouts cannot mix.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.mpi.library import MPI
from tlt_hpc.mpi.progress import ProgressThread, backoff_pauses
from tlt_hpc.mpi.roster import Roster, State, Status

BUSY_SECONDS = 50e-3
"""From one look of a rank that decodes to its next, in a run: rounds of a small model take a few milliseconds. A rank
reports a change of its own state at once, so this delays no release."""
RECORD_FIELDS = ("epoch", "round", *Status._fields)


class Pulse:
    """Exchanges the status of every rank without blocking.

    Args:
        comm: a communicator of all ranks that nothing else uses.
        busy_seconds: a BUSY rank looks at the pulse no more often than this.

    ``num_rounds`` counts over all rollouts; ``released_at`` is when this rank learned that the last rollout was over,
    by ``time.perf_counter``.
    """

    def __init__(self, comm: MPI.Comm, busy_seconds: float = 0.0) -> None:
        self.num_rounds = 0
        self.released_at = 0.0
        self._comm = comm
        self._num_ranks: int = comm.size
        # mpi4py does not keep the buffers of a nonblocking collective alive: they live as long as the pulse
        self._sent = np.zeros(len(RECORD_FIELDS), np.int64)
        self._received = np.zeros((comm.size, len(RECORD_FIELDS)), np.int64)
        self._request: MPI.Request | None = None
        self._busy_seconds = busy_seconds
        self._next_look = 0.0
        self._pauses = backoff_pauses()
        self._progress = ProgressThread(self._advance)
        self._thread_status: Status | None = None
        self._reported_over = True
        self._roster: Roster | None = None

    def begin_rollout(self, epoch: int) -> None:
        """Start the rollout ``epoch`` (its step); nothing of an earlier one may be pending."""
        assert self._request is None, "a round of an earlier rollout is pending: poll until its roster is over"
        self._roster = Roster.before_first_round(epoch, self._num_ranks)
        self._reported_over = False
        self._next_look = 0.0
        self._pauses = backoff_pauses()
        BEAT.begin_pulse()

    def poll(self, status: Status) -> Roster:
        """The newest roster, without blocking; at most one new one per call.

        When a round has completed, the next is posted with ``status``, unless the roster is over; after one that is
        over, ``begin_rollout`` comes next. Before the first round completes all ranks are assumed to be BUSY.

        Raises:
            RuntimeError: the thread behind ``progressing`` has failed.
        """
        if time.perf_counter() < self._next_look and status.state is State.BUSY and not status.stop:
            BEAT.tick()
            assert self._roster is not None
            return self._roster
        return self.poll_now(status)

    def poll_now(self, status: Status) -> Roster:
        """As ``poll``, however recently this rank has looked."""
        assert self._roster is not None and not self._reported_over, "poll outside a rollout: call begin_rollout first"
        self._progress.check_thread_error()
        self._take_and_post_round(self._roster, status)
        self._reported_over = self._roster.is_over
        if not self._reported_over:
            self._next_look = time.perf_counter() + self._busy_seconds
        BEAT.record_pulse_poll(self.num_rounds, status.sequences_left, self._reported_over)
        return self._roster

    @property
    def is_over(self) -> bool:
        """True if the rollout is known to be over; cheap, and true as soon as the helper thread has seen it."""
        return self._roster is not None and self._roster.is_over

    def back_off(self) -> None:
        """Sleep for a while, at most 4 ms, before the next poll of a rank that has nothing to do."""
        BEAT.mark_waiting_for_pulse()
        time.sleep(next(self._pauses))

    @contextmanager
    def progressing(self, status: Status | None = None) -> Iterator[None]:
        """Let the others' rounds complete while this rank is inside one long call that releases the GIL.

        With a ``status`` the helper thread also takes rosters and posts the next rounds with it, so that rounds do not
        wait for the call's end; the next ``poll`` returns the newest roster. Without, it only enters the MPI library.

        Raises:
            RuntimeError: the helper thread has failed.
        """
        self._thread_status = status
        BEAT.mark_working()
        with self._progress.running():
            yield
        BEAT.mark_working()

    def close(self) -> None:
        """End the helper thread; to be called before MPI finalises."""
        self._progress.close()

    def _advance(self) -> None:
        """One call of the helper thread, while the main thread is in its long call."""
        self._comm.Iprobe()  # lets all pending operations progress, also those of others, such as a merge
        if self._thread_status is not None and self._roster is not None:
            self._take_and_post_round(self._roster, self._thread_status)

    def _take_and_post_round(self, roster: Roster, status: Status) -> None:
        """Take the pending round's roster if it is complete, and post the next round unless the rollout is over."""
        if self._request is not None:
            if not self._request.Test():
                return
            self._request = None
            self.num_rounds += 1
            records, expected = self._received.copy(), (roster.epoch, roster.round + 1)
            assert (records[:, :2] == expected).all(), f"records of epoch and round {expected}: {records[:, :2]}"
            roster = self._roster = Roster(*expected, records[:, 2:])
            if roster.is_over:
                self._next_look, self.released_at = 0.0, time.perf_counter()
        if not roster.is_over:
            self._post(roster, status)

    def _post(self, roster: Roster, status: Status) -> None:
        self._sent[:] = (roster.epoch, roster.round + 1, *status)
        self._request = self._comm.Iallgather(self._sent, self._received)
