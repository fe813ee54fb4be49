"""The model-free drafter: which continuation it offers, what it forgets, and that siblings help it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tiny import embedded_tokenizer

from tlt_hpc.data.gcd import draw_problem, response_text
from tlt_hpc.models.ngram import NgramDrafter


def taught(*texts: Sequence[int], orders: Sequence[int] = (3, 2, 1), history: int = 10_000) -> NgramDrafter:
    drafter = NgramDrafter(orders, history)
    for text in texts:
        drafter.learn(list(text), 0)
    return drafter


def num_entries(drafter: NgramDrafter) -> int:
    return len(drafter._recent) + len(drafter._older)


def test_the_longest_known_context_wins() -> None:
    drafter = taught([1, 2, 3, 7], [9, 2, 3, 8], [3, 6])
    assert drafter.continuations([1, 2, 3]) == (7,)
    assert drafter.continuations([9, 2, 3]) == (8,)
    assert drafter.continuations([4, 2, 3]) == (8, 7)
    assert drafter.continuations([4, 4, 3]) == (6, 8, 7)
    assert drafter.continuations([4, 4, 4]) == ()
    assert drafter.continuations([]) == ()


def test_orders_count_whatever_their_order() -> None:
    texts = [[1, 2, 3, 7], [9, 2, 3, 8]]
    assert taught(*texts, orders=(1, 3, 2)).continuations([1, 2, 3]) == (7,)


def test_the_most_recent_comes_first_and_only_once() -> None:
    drafter = taught([1, 5], [1, 6], [1, 7], orders=(1,))
    assert drafter.continuations([1]) == (7, 6, 5)
    drafter.learn([1, 5], 0)
    assert drafter.continuations([1]) == (5, 7, 6)


def test_few_continuations_are_kept() -> None:
    drafter = taught(*([1, token] for token in range(10, 30)), orders=(1,))
    assert drafter.continuations([1]) == (29, 28, 27, 26)


def test_tokens_before_the_start_are_context_only() -> None:
    drafter = NgramDrafter((1,), 10_000)
    drafter.learn([1, 2, 3, 4], 2)
    assert drafter.continuations([1]) == ()
    assert drafter.continuations([2]) == (3,)
    assert drafter.continuations([3]) == (4,)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 59))
def test_learning_in_parts_is_learning_at_once(tokens: list[int], cut: int) -> None:
    whole, parts = taught(tokens), NgramDrafter((3, 2, 1), 10_000)
    parts.learn(tokens[:cut], 0)
    parts.learn(tokens, min(cut, len(tokens)))
    assert (parts._recent, parts._older) == (whole._recent, whole._older)


def test_forgetting_bounds_the_number_of_entries() -> None:
    """However much it learns: each table holds at most half the history and one text, an entry per token and order."""
    orders, history, length = (4, 2), 1000, 100
    drafter = NgramDrafter(orders, history)
    source = random.Random(0)
    most = 0
    for _ in range(300):
        drafter.learn([source.randrange(10**6) for _ in range(length)], 0)
        most = max(most, num_entries(drafter))
    assert history // 2 < most <= len(orders) * (history + 2 * length)


def test_the_older_half_is_forgotten_and_the_newer_kept() -> None:
    drafter = taught([1, 2, 3], orders=(2,), history=100)
    for start in range(100, 1000, 10):
        drafter.learn(list(range(start, start + 10)), 0)
    assert drafter.continuations([1, 2]) == ()
    assert drafter.continuations([997, 998]) == (999,)


def test_what_is_used_again_is_not_forgotten() -> None:
    drafter = NgramDrafter((2,), 100)
    for start in range(100, 1000, 10):
        drafter.learn(list(range(start, start + 10)), 0)
        drafter.learn([1, 2, 3], 0)
    assert drafter.continuations([1, 2]) == (3,)


def share_foreseen(drafter: NgramDrafter, tokens: Sequence[int]) -> float:
    """Share of tokens that are the first continuation of what stands before them."""
    hits = sum(drafter.continuations(tokens[:end])[:1] == (tokens[end],) for end in range(1, len(tokens)))
    return hits / (len(tokens) - 1)


def test_siblings_help() -> None:
    """Another answer to the same problem foretells more of an answer than answers to other problems do."""
    source = random.Random(0)
    encode = embedded_tokenizer().encode
    alone = together = 0.0
    for _ in range(20):
        problem, other = draw_problem(source), draw_problem(source)
        own = encode(problem.prompt + response_text(problem.subtractions(), problem.answer)).ids
        stranger = encode(other.prompt + response_text(other.subtractions(), other.answer)).ids
        sibling = encode(problem.prompt + response_text(problem.jumps(), problem.answer)).ids
        alone += share_foreseen(taught(stranger, orders=(8, 6, 4, 3)), own) / 20
        together += share_foreseen(taught(stranger, sibling, orders=(8, 6, 4, 3)), own) / 20
    assert together > alone + 0.1
