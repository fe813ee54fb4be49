"""The order of draws: its function of seed and epoch, prompts that are dropped, and resumed runs."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from data_sets import gcd_rows, open_data, write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from tlt_hpc.data.prompts import Draws, shuffled
from tlt_hpc.data.rows import RowError


def by_hand(num_rows: int, seed: int, epoch: int) -> list[int]:
    """The same with Python's numbers: SplitMix64, as its authors print it, from a start that is a hash."""
    state = int.from_bytes(hashlib.sha256(f"epoch/{seed}/{epoch}".encode()).digest()[:8], "little")
    marks = []
    for _ in range(num_rows):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        marks.append(z ^ z >> 31)
    return sorted(range(num_rows), key=marks.__getitem__)


def test_the_order_is_the_same_on_every_machine_and_version():
    """Known answers: with another order a resumed run would draw other prompts."""
    assert shuffled(10, 0, 0).tolist() == by_hand(10, 0, 0) == [1, 0, 9, 7, 5, 8, 3, 2, 6, 4]
    assert shuffled(10, 0, 1).tolist() == by_hand(10, 0, 1) == [2, 6, 0, 7, 3, 5, 4, 8, 9, 1]
    assert shuffled(10, 2**63 - 1, 0).tolist() == by_hand(10, 2**63 - 1, 0) == [0, 2, 9, 7, 8, 1, 6, 3, 5, 4]


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(0, 90), st.integers(0, 20))
def test_draws_are_all_epochs_one_after_another_without_dropped_rows(is_kept, start, count):
    if not any(is_kept):
        return
    found, epoch = list[int](), 0
    while len(found) < start + count:
        found += [int(row) for row in shuffled(len(is_kept), 0, epoch) if is_kept[row]]
        epoch += 1
    assert Draws(np.array(is_kept), 0).rows(start, start + count) == found[start : start + count]


def test_rows_behind_those_that_are_checked_first(tmp_path, monkeypatch):
    """A huge file is not read through: a fault there is found at its draw, alike on all ranks."""
    monkeypatch.setattr("tlt_hpc.data.prompts.CHECKED_ROWS", 4)
    rows: list[Any] = gcd_rows(12)
    last = int(shuffled(12, 0, 0)[11])
    rows[last] = "{"
    source = open_data(write_jsonl(tmp_path / "a.jsonl", rows), count=6)
    source.batch(0)
    with pytest.raises(RowError, match=rf"a\.jsonl:{last + 1}: no JSON object"):
        source.batch(1)
