"""The model-free drafter: which continuations it offers and how sure it is, what it forgets, and who helps whom."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tiny import embedded_tokenizer, response_text

from tlt_hpc.data.gcd import draw_problem
from tlt_hpc.models.ngram import ORDERS, SuffixDrafter

OTHERS = "others"


def taught(*texts: Sequence[int], orders: Sequence[int] = (3, 2, 1), history: int = 10_000) -> SuffixDrafter:
    drafter = SuffixDrafter(history, orders)
    for text in texts:
        drafter.learn(OTHERS, list(text), 0)
    return drafter


def offered(drafter: SuffixDrafter, context: Sequence[int], group: str = OTHERS) -> list[int]:
    return [token for token, _ in drafter.continuations(group, context)]


def num_entries(drafter: SuffixDrafter) -> int:
    return len(drafter._recent) + len(drafter._older)


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


def test_tokens_before_the_start_are_context_only() -> None:
    drafter = SuffixDrafter(10_000, (1,))
    drafter.learn(OTHERS, [1, 2, 3, 4], 2)
    assert offered(drafter, [1]) == []
    assert offered(drafter, [2]) == [3]
    assert offered(drafter, [3]) == [4]


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


@given(few_tokens, few_tokens, few_tokens, st.sampled_from([10, 40, 10_000]))
def test_walking_is_asking_for_each_context(own: list[int], other: list[int], walk: list[int], history: int) -> None:
    """Steps where nobody asks, unknown tokens included."""
    drafter = taught(other, orders=(9, 5, 3, 2, 1), history=history)
    drafter.learn("own", own, 0)
    cursor = drafter.cursor("own", own)
    for step, token in enumerate(walk):
        cursor.advance(token)
        if step % 3:
            assert cursor.continuations() == drafter.continuations("own", own + walk[: step + 1])


def test_forgetting_bounds_the_number_of_entries() -> None:
    """Each table holds at most half the history and one text; an entry per token and order, everybody's and own."""
    orders, history, length = (4, 2), 1000, 100
    drafter = SuffixDrafter(history, orders)
    source = random.Random(0)
    most = 0
    for group in range(300):
        drafter.learn(group, [source.randrange(10**6) for _ in range(length)], 0)
        most = max(most, num_entries(drafter))
    assert history // 2 < most <= 2 * len(orders) * (history + 2 * length)


def test_the_older_half_is_forgotten_and_the_newer_kept() -> None:
    drafter = taught([1, 2, 3], orders=(2,), history=100)
    for start in range(100, 1000, 10):
        drafter.learn(OTHERS, list(range(start, start + 10)), 0)
    assert offered(drafter, [1, 2]) == []
    assert offered(drafter, [997, 998]) == [999]


def test_the_older_half_still_counts() -> None:
    drafter = taught([1, 2, 3], [1, 2, 3], orders=(2,), history=100)
    drafter.learn("own", [1, 2, 4], 0)
    drafter.learn(OTHERS, list(range(100, 150)), 0)
    assert drafter._older and not drafter._recent
    assert offered(drafter, [1, 2], "own") == [4]
    drafter.learn("own", [1, 2, 5], 0)
    assert offered(drafter, [1, 2], "own") == [5, 4]


def working(problem_seed: int, steps: str) -> list[int]:
    problem = draw_problem(random.Random(problem_seed))
    pairs = problem.subtractions()
    if steps == "big":
        pairs = [*pairs[:-1:2], pairs[-1]]
    return embedded_tokenizer().encode(problem.prompt + response_text(pairs, problem.answer)).ids


def share_foreseen(drafter: SuffixDrafter, group: str, tokens: Sequence[int]) -> float:
    """Share of tokens that are the likeliest continuation of what stands before them."""
    hits = sum(offered(drafter, tokens[:end], group)[:1] == [tokens[end]] for end in range(1, len(tokens)))
    return hits / (len(tokens) - 1)


def test_siblings_help() -> None:
    """Another answer to the same problem foretells more of an answer than answers to other problems do."""
    alone = together = 0.0
    for seed in range(20):
        own, stranger, sibling = working(seed, "small"), working(100 + seed, "small"), working(seed, "big")
        drafter = taught(stranger, orders=ORDERS)
        alone += share_foreseen(drafter, "own", own) / 20
        drafter.learn("own", sibling, 0)
        together += share_foreseen(drafter, "own", own) / 20
    assert together > alone + 0.1


def test_the_group_tells_its_own_from_a_crowd() -> None:
    """What one sibling said outweighs a hundred strangers; without the group's name it would not."""
    drafter = taught(*(working(100 + seed, "small") for seed in range(100)), orders=ORDERS)
    for seed in range(20):
        drafter.learn(f"prompt {seed}", working(seed, "big"), 0)
    drafter.learn(OTHERS, working(300, "small"), 0)
    own = sum(share_foreseen(drafter, f"prompt {seed}", working(seed, "small")) for seed in range(20)) / 20
    nobody = sum(share_foreseen(drafter, "unnamed", working(seed, "small")) for seed in range(20)) / 20
    assert own > nobody + 0.03
