"""The garbage collector's full rounds, which would stop a rank in the middle of a rollout."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from tlt_hpc.common.heap import importing


@pytest.fixture
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_is_imported_is_out_of_the_collectors_rounds(thawed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with importing():
        assert not gc.isenabled()
        import colorsys  # noqa: F401
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000 and len(gc.get_objects()) < 1_000


def test_where_nothing_is_imported_all_remains_collectable(thawed: None) -> None:
    """A later call, when there is an engine, must not exclude it."""
    with importing():
        import sys as again  # noqa: F401
    assert gc.get_freeze_count() == 0
