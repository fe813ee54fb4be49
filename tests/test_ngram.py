"""The model-free drafter: which continuations it offers and how sure it is, what it forgets, and who helps whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_hpc.common.records import Request, SampleKey, SamplingParams
from tlt_hpc.models.ngram import ORDERS, SuffixDrafter
from tlt_hpc.rollout.ngram_drafts import NgramDrafts
from tlt_hpc.rollout.responses import Response
from tlt_hpc.rollout.sampling import SamplingRule
from tlt_hpc.rollout.strategy import Strategy

OTHERS = "others"


def taught(*texts: Sequence[int], orders: Sequence[int] = (3, 2, 1), history: int = 10_000) -> SuffixDrafter:
    drafter = SuffixDrafter(history, orders)
    for text in texts:
        drafter.learn(OTHERS, list(text), 0)
    return drafter


def offered(drafter: SuffixDrafter, context: Sequence[int], group: str = OTHERS) -> list[int]:
    return [token for token, _ in drafter.continuations(group, context)]


def test_the_longest_known_context_counts_most() -> None:
    drafter = taught([1, 2, 3, 7], [9, 2, 3, 8], [3, 6])
    assert offered(drafter, [1, 2, 3])[0] == 7
    assert offered(drafter, [9, 2, 3])[0] == 8
    assert offered(drafter, [4, 2, 3]) == [8, 7, 6]
    assert offered(drafter, [4, 4, 3]) == [6, 8, 7]
    assert offered(drafter, [4, 4, 4]) == []
    assert offered(drafter, []) == []


def test_the_more_recent_weighs_more_and_the_more_frequent_too() -> None:
    drafter = taught([1, 5], [1, 6], [1, 7], orders=(1,))
    assert offered(drafter, [1]) == [7, 6, 5]
    assert len({weight for _, weight in drafter.continuations(OTHERS, [1])}) == 3
    drafter.learn(OTHERS, [1, 5], 0)
    assert offered(drafter, [1]) == [5, 7, 6]


def test_the_own_group_counts_more_than_many_others() -> None:
    drafter = taught([1, 2, 3, 7], [1, 2, 3, 7], [1, 2, 3, 7])
    drafter.learn("own", [1, 2, 3, 8], 0)
    drafter.learn(OTHERS, [1, 2, 3, 7], 0)
    assert offered(drafter, [1, 2, 3], "own")[0] == 8
    assert offered(drafter, [1, 2, 3], OTHERS)[0] == 7
    assert offered(drafter, [1, 2, 3], "a third")[0] == 7


few_tokens = st.lists(st.integers(0, 3), max_size=60)


@given(few_tokens, st.lists(st.integers(0, 60)))
def test_learning_in_parts_is_learning_at_once(tokens: list[int], cuts: list[int]) -> None:
    whole, parts = taught(tokens), SuffixDrafter(10_000, (3, 2, 1))
    learned = 0
    for cut in sorted(cuts):
        parts.learn(OTHERS, tokens[:cut], learned)
        learned = min(cut, len(tokens))
    parts.learn(OTHERS, tokens, learned)
    assert (parts._recent, parts._older) == (whole._recent, whole._older)
    assert parts._num_recent == whole._num_recent == len(tokens)


@given(few_tokens, few_tokens, few_tokens)
def test_weights_are_chances(own: list[int], other: list[int], context: list[int]) -> None:
    drafter = taught(other, orders=ORDERS, history=50)
    drafter.learn("own", own, 0)
    found = drafter.continuations("own", context)
    tokens, weights = [token for token, _ in found], [weight for _, weight in found]
    assert len(set(tokens)) == len(tokens) <= 4
    assert weights == sorted(weights, reverse=True)
    assert all(weight > 0 for weight in weights) and sum(weights) < 1


def test_the_older_half_is_forgotten_and_the_newer_kept() -> None:
    drafter = taught([1, 2, 3], orders=(2,), history=100)
    for start in range(100, 1000, 10):
        drafter.learn(OTHERS, list(range(start, start + 10)), 0)
    assert offered(drafter, [1, 2]) == []
    assert offered(drafter, [997, 998]) == [999]


@pytest.mark.parametrize(("temperature", "wanted"), [(1.0, 6), (0.0, 8)])
def test_continuations_compete_under_the_noise(temperature: float, wanted: int) -> None:
    """Noise that outweighs all else picks the token; a greedy response takes the likeliest, here the latest."""
    drafts, context = NgramDrafts(active=True), [9, 10, 11, 12, 13, 14, 15, 16]
    request = Request(SampleKey(0, 0, 0, 0, 0), np.array([1], np.int32))
    text = [1, *(token for end in (5, 6, 8) for token in (*context, end)), *context]
    response = Response(request, SamplingParams(90, temperature), SamplingRule(temperature, 20), 0, text=text)
    drafts.update_table([response])
    (chain,) = drafts.draft_chains([response], lambda row, d, token: 100.0 * (token == 6), Strategy("ngram", 1))
    assert chain == [wanted]
