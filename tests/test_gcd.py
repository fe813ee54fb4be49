"""The embedded task: workings that are right to the letter, splits that never meet, and a long tail of lengths."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import embedded_tokenizer, response_text

from tlt_hpc.data.prompts import (
    MAX_DIVISOR,
    MAX_NUMBER,
    MAX_WORKING_TOKENS,
    GcdProblem,
    Split,
    draw_from_split,
    draw_problem,
    num_working_tokens,
)

numbers = st.integers(1, MAX_NUMBER)
problems = st.builds(GcdProblem, numbers, numbers)
SPLITS: tuple[Split, ...] = ("supervised", "train", "evaluation")


@given(problems)
def test_subtractions_lead_to_the_answer(problem: GcdProblem) -> None:
    pairs = problem.subtractions()
    assert pairs[0] == (problem.a, problem.b)
    for (a, b), (c, d) in itertools.pairwise(pairs):
        assert a != b
        assert (c, d) == ((a - b, b) if a > b else (a, b - a))
    assert pairs[-1] == (math.gcd(problem.a, problem.b),) * 2
    assert problem.answer == str(pairs[-1][0])


def test_the_texts_to_the_letter() -> None:
    problem = GcdProblem(6, 4)
    assert problem.prompt == "gcd(6,4)="
    assert response_text(problem.subtractions(), problem.answer) == "<think>6,4;2,4;2,2</think>\\boxed{2}"


@given(problems)
def test_lengths_are_counted_as_the_tokenizer_counts(problem: GcdProblem) -> None:
    pairs = problem.subtractions()
    response = embedded_tokenizer().encode(response_text(pairs, problem.answer))
    assert response.tokens[0] == "<think>"
    assert response.tokens.index("</think>") - 1 == num_working_tokens(pairs)
    assert embedded_tokenizer().decode(response.ids) == response_text(pairs, problem.answer)


@given(st.integers(0, 2**32))
def test_drawn_problems_keep_the_bounds(seed: int) -> None:
    problem = draw_problem(random.Random(seed))
    assert 1 <= min(problem.a, problem.b) < max(problem.a, problem.b) <= MAX_NUMBER
    assert 1 <= int(problem.answer) <= MAX_DIVISOR
    assert num_working_tokens(problem.subtractions()) <= MAX_WORKING_TOKENS


def test_splits_are_disjoint_and_their_shares_right() -> None:
    source = random.Random(0)
    drawn = {draw_problem(source) for _ in range(6000)}
    shares = {split: sum(problem.split == split for problem in drawn) / len(drawn) for split in SPLITS}
    # over 5,000 different problems: three standard errors are 0.02
    assert shares == pytest.approx({"supervised": 0.6, "train": 0.3, "evaluation": 0.1}, abs=0.02)


@pytest.mark.parametrize("split", SPLITS)
def test_draws_stay_in_their_split(split: Split) -> None:
    source = random.Random(1)
    drawn = [draw_from_split(source, split) for _ in range(200)]
    assert {problem.split for problem in drawn} == {split}
    assert len(set(drawn)) > 150


def test_the_split_is_of_the_text_alone() -> None:
    """Known answers: another hash would hand RL the problems that the shipped model was trained on."""
    problems = [(196, 364), (12, 18), (7, 5), (90, 45), (8, 6), (21, 14)]
    expected = ["supervised", "train", "train", "evaluation", "supervised", "evaluation"]
    assert [GcdProblem(a, b).split for a, b in problems] == expected
