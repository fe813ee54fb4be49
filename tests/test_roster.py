"""The decisions that all ranks read from one roster."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tlt_hpc.mpi.roster import Roster, State, Status

COUNTS = st.integers(0, 10**9)
STATUSES = st.builds(Status, st.sampled_from(State), COUNTS, COUNTS, COUNTS, st.booleans())


def test_before_the_first_round_all_are_busy() -> None:
    first = Roster.before_first_round(epoch=4, num_ranks=3)
    assert (first.epoch, first.round, first.num_busy) == (4, 0, 3)
    assert not first.is_over and not first.has_stop_vote
    assert first.others_still_generate(rank=0), "this rank has finished, though no roster shows it yet"


@given(st.lists(STATUSES, min_size=1, max_size=12))
def test_decisions_follow_from_the_statuses(statuses: list[Status]) -> None:
    seen = Roster(5, 2, np.array(statuses, np.int64))
    assert seen.statuses == statuses
    busy = [s for s in statuses if s.state == State.BUSY]
    assert seen.num_busy == len(busy)
    assert seen.has_stop_vote == any(s.stop for s in statuses)
    assert seen.is_over == (not busy or seen.has_stop_vote)
    for rank, status in enumerate(statuses):
        others = len(busy) - (status.state == State.BUSY)
        assert seen.others_still_generate(rank) == (others > 0 and not seen.has_stop_vote)
