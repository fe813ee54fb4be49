"""What a step keeps within so many rows: the longest responses, their prompts once, and no row used twice."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tlt_hpc.storage.feature_file import runs_of
from tlt_hpc.storage.retention import Retention, RowSpace


def tokens(count, seed=0):
    return np.full(count, seed, np.int32)


def add(retention, length, prompt_length=1, group=0, first=0):
    """Whether the response was kept."""
    features = np.zeros((prompt_length - 1 + length - first, 1, 1), np.uint16)
    return len(retention.add(tokens(prompt_length + length, group), prompt_length, features, first)) > 0


def lengths(retention):
    return [len(response.rows) for response in retention.responses]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=200))
def test_a_row_is_taken_once_and_the_file_no_longer_than_the_most_held(steps):
    space, held, most = RowSpace(200), [], 0
    for takes, count in steps:
        if takes and count <= space.num_free:
            held.append(space.take(count))
            assert len(held[-1]) == count and (np.diff(held[-1]) > 0).all()
        elif held:
            space.give_back(held.pop(count % len(held)))
        used = [row for rows in held for row in rows.tolist()]
        assert len(used) == len(set(used)) == 200 - space.num_free
        most = max(most, len(used))
        assert space.high_water == most > max(used, default=-1)


def test_the_lowest_free_rows_are_taken_first():
    space = RowSpace(10)
    parts = [space.take(2) for _ in range(4)]
    space.give_back(parts[2])
    space.give_back(parts[0])
    rows = space.take(5)
    assert rows.tolist() == [0, 1, 4, 5, 8]
    assert [rows[run].tolist() for run in runs_of(rows)] == [[0, 1], [4, 5], [8]]
    assert not list(runs_of(rows[:0]))


def test_the_shortest_are_evicted_as_many_as_it_takes():
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


def test_a_prompt_is_stored_once_and_goes_with_its_last_response():
    retention = Retention(100)
    assert add(retention, 20, prompt_length=11, group=1) and add(retention, 30, prompt_length=11, group=1)
    assert retention.space.num_free == 40
    assert add(retention, 55, group=2)
    assert lengths(retention) == [30, 55] and [len(prompt.tokens) for prompt in retention.prompts] == [11, 1]
    assert add(retention, 33, prompt_length=11, group=1, first=10), "its own prompt stays while its responses go"
    assert lengths(retention) == [55, 33] and retention.space.num_free == 2
    assert add(retention, 100, group=2) and [len(prompt.tokens) for prompt in retention.prompts] == [1]


def test_a_late_response_outlives_its_prompt():
    """The group's tail comes without the prompt's rows, which were freed when its short response was evicted."""
    retention = Retention(100)
    add(retention, 5, prompt_length=21, group=1)
    assert add(retention, 90, group=2) and len(retention.prompts) == 1
    assert add(retention, 95, prompt_length=21, group=1, first=20)
    assert lengths(retention) == [95] and [prompt.tokens.tolist() for prompt in retention.prompts] == [[1]]
    assert not add(retention, 95, prompt_length=21, group=1, first=20) and retention.num_evicted == 3


def test_a_short_response_with_a_long_prompt_takes_nothing_from_longer_ones():
    retention = Retention(100)
    add(retention, 79, prompt_length=5, group=1)
    assert not add(retention, 5, prompt_length=51, group=2)
    assert not add(retention, 79, prompt_length=2, group=2), "as long is not longer"
    assert lengths(retention) == [79] and retention.num_evicted == 2 and len(retention.prompts) == 1
    assert add(retention, 80, prompt_length=21, group=3) and lengths(retention) == [80]


@given(st.lists(st.tuples(st.sampled_from([3, 5, 8, 13, 21, 34, 55, 89]), st.integers(0, 5)), max_size=120))
def test_against_a_plain_model(responses):
    """A list of (length, number, group) says who is kept; group g has a prompt of 3 g rows."""
    retention, kept = Retention(300), list[tuple[int, int, int]]()

    def used(entries):
        return sum(length for length, _, _ in entries) + sum(3 * group for group in {group for _, _, group in entries})

    for number, (length, group) in enumerate(responses):
        entry = (length, number, group)
        shorter, victims = sorted(other for other in kept if other[0] < length), list[tuple[int, int, int]]()
        left = kept
        while shorter and used([*left, entry]) > 300:
            victims.append(shorter.pop(0))
            left = [other for other in kept if other not in victims]
        fits = used([*left, entry]) <= 300
        kept = [*left, entry] if fits else kept
        assert add(retention, length, 3 * group + 1, group) == fits
        assert lengths(retention) == [length for length, _, _ in kept]
        assert 300 - retention.space.num_free == used(kept)
        assert Counter(len(response.prompt.tokens) for response in retention.responses) == Counter(
            3 * group + 1 for _, _, group in kept
        )
        assert retention.num_evicted == number + 1 - len(kept)
