"""The garbage collector's full rounds, which would stop a rank in the middle of a rollout."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from tlt_hpc.common.heap import settle_heap


class Cycle:
    """Only the collector frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_stands_is_out_of_the_collectors_rounds(thawed: None) -> None:
    settle_heap()
    assert gc.get_freeze_count() > 10_000 and len(gc.get_objects()) < 1_000


def test_an_earlier_runs_garbage_is_freed_by_the_next(thawed: None) -> None:
    """Also what stood, and was in use, when that run settled the heap."""
    cycle = Cycle()
    gone = weakref.ref(cycle)
    settle_heap()
    del cycle
    gc.collect()
    assert gone() is not None, "frozen: this is what a run leaves behind"
    settle_heap()
    assert gone() is None
