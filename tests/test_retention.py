"""What a step keeps within so many rows: the longest responses, their prompts once, and no row in two hands."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_hpc.storage.retention import Retention, StoredResponse
from tlt_hpc.storage.row_space import Extent, RowSpace


def rows(count):
    return np.zeros((count, 1, 1), np.uint16)


def tokens(count, seed=0):
    return np.full(count, seed, np.int32)


def add(retention, length, prompt_length=1, group=0, first=0):
    """Whether the response was kept."""
    features = rows(prompt_length - 1 + length - first)
    return len(retention.add(tokens(prompt_length + length, group), prompt_length, features, first)) > 0


def lengths(retention):
    return [response.num_rows for response in retention.responses]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=200))
def test_rows_are_in_one_hand_and_the_array_no_longer_than_the_most_held(steps):
    space, held, most = RowSpace(200), [], 0
    for takes, count in steps:
        if takes and count <= space.num_free:
            held.append((count, space.take(count)))
        elif held:
            space.give_back(held.pop(count % len(held))[1])
        used = [row for _, extents in held for e in extents for row in range(e.first, e.end)]
        assert len(used) == len(set(used)) == space.num_held == 200 - space.num_free
        assert all(sum(e.count for e in extents) == count for count, extents in held)
        most = max(most, len(used))
        assert space.high_water == most > max(used, default=-1)


def test_holes_are_used_first_and_join():
    space = RowSpace(10)
    parts = [space.take(2) for _ in range(4)]
    space.give_back(parts[0])
    space.give_back(parts[2])
    assert space.take(5) == (Extent(0, 2), Extent(4, 2), Extent(8, 1))
    space.give_back(parts[1])
    space.give_back(parts[3])
    assert space.take(5) == (Extent(2, 2), Extent(6, 2), Extent(9, 1))


def test_the_shortest_give_way_as_many_as_it_takes():
    retention = Retention(100)
    for length in (30, 10, 40, 20):
        assert add(retention, length)
    assert add(retention, 25)
    assert lengths(retention) == [30, 40, 25] and retention.num_evicted == 2
    assert not add(retention, 24), "only longer ones could make room"
    assert not add(retention, 101)
    assert add(retention, 5) and lengths(retention) == [30, 40, 25, 5], "there is room"
    assert add(retention, 100) and lengths(retention) == [100]
    assert retention.num_evicted == 8


def test_nobody_gives_way_where_that_would_not_do():
    retention = Retention(100)
    for length in (10, 20, 70):
        add(retention, length)
    assert not add(retention, 60)
    assert lengths(retention) == [10, 20, 70]


def test_a_prompt_is_held_once_and_waits_for_a_longer_response():
    retention = Retention(100)
    assert add(retention, 20, prompt_length=11, group=1) and add(retention, 30, prompt_length=11, group=1)
    assert retention.space.num_held == 60
    assert add(retention, 60, prompt_length=1, group=2)
    assert lengths(retention) == [30, 60] and len(retention.prompts) == 2
    assert add(retention, 80, prompt_length=1, group=2), "both of the others go, the first prompt's rows stay"
    assert lengths(retention) == [80] and len(retention.prompts) == 1 and retention.space.num_held == 90
    assert add(retention, 85, prompt_length=11, group=1, first=10), "its prompt came with an earlier one"
    assert retention.space.num_held == 95 and [len(prompt.tokens) for prompt in retention.prompts] == [11]


def test_prompts_without_responses_go_when_nothing_shorter_is_left():
    retention = Retention(100)
    add(retention, 20, prompt_length=31, group=1)
    assert add(retention, 90, prompt_length=1, group=2)
    assert retention.space.num_held == 90 and retention.prompt(tokens(31, 1)) is None


def test_a_late_response_outlives_its_prompt():
    """The group's tail comes without the prompt's rows, which gave way when its short responses did."""
    retention = Retention(100)
    add(retention, 5, prompt_length=21, group=1)
    assert add(retention, 90, prompt_length=1, group=2) and retention.prompt(tokens(21, 1)) is None
    assert add(retention, 95, prompt_length=21, group=1, first=20)
    assert lengths(retention) == [95] and [prompt.tokens.tolist() for prompt in retention.prompts] == [[1]]
    assert not add(retention, 95, prompt_length=21, group=1, first=20) and retention.num_evicted == 3


def test_a_new_prompt_takes_the_rows_of_old_ones_before_responses():
    retention = Retention(100)
    add(retention, 10, prompt_length=31, group=1)
    add(retention, 65, prompt_length=1, group=2)
    assert lengths(retention) == [65] and retention.space.num_held == 95
    assert add(retention, 5, prompt_length=26, group=3) and not retention.prompt(tokens(31, 1))
    assert lengths(retention) == [65, 5]


def test_a_short_response_with_a_new_prompt_takes_nothing_from_longer_ones():
    retention = Retention(100)
    add(retention, 79, prompt_length=5, group=1)
    assert not add(retention, 5, prompt_length=51, group=2)
    assert not add(retention, 79, prompt_length=2, group=2), "as long is not longer"
    assert lengths(retention) == [79] and retention.num_evicted == 2 and retention.prompt(tokens(51, 2)) is None
    assert add(retention, 10, prompt_length=51, group=2, first=50), "without the prompt there is room"
    assert not add(retention, 80, prompt_length=31, group=3) and lengths(retention) == [79, 10]
    assert add(retention, 80, prompt_length=21, group=3) and lengths(retention) == [80]


@pytest.mark.parametrize("seed", range(20))
def test_against_a_plain_model(seed):
    """Responses alone, at random: a sorted list says who is kept."""
    source, retention, kept = random.Random(seed), Retention(300), list[StoredResponse]()
    kept = []
    for number in range(120):
        length = source.choice([3, 5, 8, 13, 21, 34, 55, 89])
        shorter = sorted(other for other in kept if other[0] < length)
        room, victims = 300 - sum(n for n, _ in kept), []
        while room < length and shorter:
            victims.append(shorter.pop(0))
            room += victims[-1][0]
        if room >= length:
            kept = [other for other in kept if other not in victims] + [(length, number)]
        assert add(retention, length) == (room >= length)
        assert lengths(retention) == [n for n, _ in kept]
        assert retention.num_evicted == number + 1 - len(kept)
