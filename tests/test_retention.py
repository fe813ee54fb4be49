"""What a step keeps within so many rows: the longest responses, their prompts once, and no row used twice."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tlt_hpc.storage.feature_writer import Retention, RowSpace


def tokens(count, seed=0):
    return np.full(count, seed, np.int32)


def add(retention, length, prompt_length=1, group=0, first=0):
    """Whether the response was kept."""
    features = np.zeros((prompt_length - 1 + length - first, 1, 1), np.uint16)
    return len(retention.store_response(tokens(prompt_length + length, group), prompt_length, features, first)) > 0


def lengths(retention):
    return [len(response.rows) for response in retention.responses]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=200))
def test_a_row_is_taken_once_and_the_file_no_longer_than_the_most_held(steps):
    space, held, most = RowSpace(200), [], 0
    for takes, count in steps:
        if takes and count <= space.num_free:
            held.append(space.allocate_rows(count))
            assert len(held[-1]) == count and (np.diff(held[-1]) > 0).all()
        elif held:
            space.free_rows(held.pop(count % len(held)))
        used = [row for rows in held for row in rows.tolist()]
        assert len(used) == len(set(used)) == 200 - space.num_free
        most = max(most, len(used))
        assert space.high_water == most > max(used, default=-1)


def test_a_late_response_outlives_its_prompt():
    """The group's tail comes without the prompt's rows, which were needed after its short response was evicted."""
    retention = Retention(100)
    add(retention, 5, prompt_length=21, group=1)
    assert add(retention, 90, group=2) and len(retention.prompts) == 1
    assert add(retention, 95, prompt_length=21, group=1, first=20)
    assert lengths(retention) == [95] and [prompt.tokens.tolist() for prompt in retention.prompts] == [[1]]
    assert not add(retention, 95, prompt_length=21, group=1, first=20) and retention.num_evicted == 3


@given(st.lists(st.tuples(st.sampled_from([3, 5, 8, 13, 21, 34, 55, 89]), st.integers(0, 5)), max_size=120))
def test_against_a_plain_model(responses):
    """A list of (length, number, group) says who is kept; group g has a prompt of 3 g rows."""
    retention, kept, stored = Retention(300), list[tuple[int, int, int]](), list[int]()

    def used(entries, groups):
        return sum(length for length, _, _ in entries) + sum(3 * group for group in groups)

    for number, (length, group) in enumerate(responses):
        entry, groups = (length, number, group), [*stored, *({group} - {*stored})]
        users = {other[2]: max(each[0] for each in kept if each[2] == other[2]) for other in kept}
        order = [("prompt", other) for other in stored if other not in users]
        order += [("response", other) for other in sorted(kept) if other[0] < length]
        order += [("prompt", other) for other in stored if users.get(other, length) < length]
        left = [*kept, entry]
        for kind, victim in order:
            if used(left, groups) > 300 and (kind, victim) != ("prompt", group):
                (groups if kind == "prompt" else left).remove(victim)
        fits = used(left, groups) <= 300
        kept, stored = (left, groups) if fits else (kept, stored)
        assert add(retention, length, 3 * group + 1, group) == fits
        assert lengths(retention) == [length for length, _, _ in kept]
        assert 300 - retention.space.num_free == used(kept, stored)
        assert {len(prompt.tokens) for prompt in retention.prompts} == {3 * group + 1 for _, _, group in kept}
        assert Counter(len(response.prompt.tokens) for response in retention.responses) == Counter(
            3 * group + 1 for _, _, group in kept
        )
        assert retention.num_evicted == number + 1 - len(kept)
