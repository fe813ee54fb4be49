"""Figures of evaluations against values computed by hand, and which answers count as the same."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from tlt_hpc.common.records import FinishReason, SampleKey
from tlt_hpc.config import RewardSection
from tlt_hpc.evaluate.metrics import (
    PromptAnswers,
    data_set_figures,
    is_right,
    majority_vote_accuracy,
    mean_and_standard_error,
    metrics_of,
    pass_at_k,
)
from tlt_hpc.evaluate.tally import extract_answer, group_equal_answers, votes_by_answer
from tlt_hpc.rewards.scorer import Judge
from tlt_hpc.storage.rollout_log import JudgedResponse


def response(
    vote: int | None, sample: int = 0, length: int = 10, reason: FinishReason = FinishReason.EOS
) -> JudgedResponse:
    """A response that is right where its vote is 0."""
    return JudgedResponse(SampleKey(0, 1, 0, 0, sample), np.zeros(length, np.int32), reason, 1, float(vote == 0))


def prompt(*votes: int | None, greedy: int | None = 0, can_tell: bool = True) -> PromptAnswers:
    responses = [response(vote, sample) for sample, vote in enumerate((greedy, *votes))]
    return PromptAnswers(responses, (greedy, *votes) if can_tell else None)


def test_pass_at_k_is_the_share_of_all_subsets_that_hold_a_right_one():
    for c in range(7):
        for k in range(1, 7):
            subsets = list(itertools.combinations(range(6), k))
            holding = sum(any(i < c for i in subset) for subset in subsets)
            assert pass_at_k(6, c, k) == pytest.approx(holding / len(subsets))


def test_pass_at_k_of_many_samples_does_not_overflow():
    exact = 1 - math.comb(9000, 500) / math.comb(10_000, 500)
    assert pass_at_k(10_000, 1000, 500) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(
    ("votes", "value"),
    [
        ((0, 0, 1), 1.0),
        ((0, 1, 1), 0.0),
        ((0, 1, 2), 1 / 3),
        ((0, 0, 1, 1, 2), 0.5),
        ((None, None, 0), 1.0),
        ((None, None, None), 0.0),
        ((1, 2, 1, 2), 0.0),
    ],
)
def test_majority(votes, value):
    assert majority_vote_accuracy(votes) == value


def test_standard_errors():
    assert mean_and_standard_error([1.0, 0.0, 0.0, 1.0]).standard_error == pytest.approx(math.sqrt((4 * 0.25 / 3) / 4))
    assert mean_and_standard_error([0.5]).standard_error is None
    assert mean_and_standard_error([0.25, 0.25]).standard_error == 0.0


def test_figures_of_prompts():
    figures = data_set_figures([prompt(0, 0, 1, None), prompt(1, 2, 0, 1, greedy=1)], (1, 2, 4))
    assert (figures.num_prompts, figures.num_samples) == (2, 4)
    assert figures.greedy is not None and figures.greedy.value == 0.5
    assert figures.mean is not None and figures.mean.value == 3 / 8
    assert figures.mean.standard_error == pytest.approx(0.125)
    assert {k: e.value for k, e in figures.pass_at.items()} == pytest.approx({1: 3 / 8, 2: (5 / 6 + 1 / 2) / 2, 4: 1.0})
    assert figures.majority is not None and figures.majority.value == 0.5
    assert figures.reward.value == pytest.approx((3 / 5 + 1 / 5) / 2)
    assert figures.unanswered_share == 0.1
    assert (figures.mean_length, figures.cut_share) == (10.0, 0.0)


def test_lengths_and_cuts_are_of_all_responses():
    greedy = response(0, length=70, reason=FinishReason.LENGTH)
    long = PromptAnswers([greedy, response(0, 1), response(1, 2)], (0, 0, 1))
    figures = data_set_figures([long, prompt(0, 1)], ())
    assert (figures.mean_length, figures.cut_share) == (20.0, 1 / 6)
    metrics = metrics_of("x", figures)
    assert metrics["val-aux/x/response_length/clip_ratio"] == 1 / 6
    mixed = data_set_figures([long, prompt(0, 0, can_tell=False)], ())
    assert mixed.majority is None and mixed.unanswered_share is None, "of some prompts nobody can tell"


@pytest.mark.parametrize("reward", [0.0, 0.5, 1.0, 2.0])
def test_a_response_is_right_where_its_reward_is_whole(reward):
    assert is_right(replace(response(0), reward=reward)) == (reward >= 1)


def test_metrics_have_verls_names():
    metrics = metrics_of("aime24", data_set_figures([prompt(0, 1), prompt(0, 0)], (2,)))
    assert {name: value for name, value in metrics.items() if name.startswith("val-core")} == {
        "val-core/aime24/acc/greedy": 1.0,
        "val-core/aime24/acc/mean@2": 0.75,
        "val-core/aime24/acc/pass@2": 1.0,
        "val-core/aime24/acc/maj@2/mean": 0.75,
    }
    assert metrics["val-aux/aime24/acc/mean@2/stderr"] == pytest.approx(0.25)
    assert metrics["val-aux/aime24/response_length/mean"] == 10.0


@pytest.mark.parametrize(
    ("kind", "texts", "rights", "votes"),
    [
        ("boxed", [r"\boxed{4}", r"so \boxed{5}", r"\boxed{5}", "5", r"\boxed{5} ."], "10000", [0, 1, 1, None, None]),
        ("boxed", [r"\boxed{}", "5", "no box"], "000", [None] * 3),  # an empty box is none
        ("numeric", ["it is 0.5", "1/2", "#### 3", "three"], "0000", [1, 1, 2, None]),
        ("numeric", ["3000000", "3000002", "3000004"], "000", [1, 1, 2]),  # the tolerance is relative
        ("choice", ["The answer is B", r"\boxed{(B)}", "A", "none of them"], "0010", [1, 1, 0, None]),
        # two ways to write what is right are one answer
        ("boxed", ["first", "second"], "11", [0, 0]),
        ("code", ["x", "y"], "01", None),
    ],
)
def test_equal_answers_have_one_vote(kind, texts, rights, votes):
    assert votes_by_answer(Judge(RewardSection(), None), kind, texts, [right == "1" for right in rights]) == votes


def test_a_number_of_any_length_is_an_answer():
    """It must not end an evaluation, nor the training that it is a part of."""
    long = "9" * 4000 + "e999"
    texts = [long, "so -1/2", "-0.5", long]
    assert votes_by_answer(Judge(RewardSection(), None), "numeric", texts, [False] * 4) == [2, 1, 1, 2]


def test_mathematics_is_compared_with_the_first_answer_that_has_no_number_yet():
    """Numbers stand for answers: those of one parity are equal, and 9 cannot be read."""
    asked = []

    def compare(answers, other):
        asked.append(len(answers))
        return [None if a == "9" else other != "9" and int(a) % 2 == int(other) % 2 for a in answers]

    assert group_equal_answers({"1", "2", "3", "9"}, compare) == {"1": 1, "3": 1, "2": 2}
    assert asked == [4, 1]
    assert group_equal_answers({"1", "2"}, lambda answers, other: [False] * len(answers)) == {"1": 1, "2": 2}
    assert extract_answer("math", "x" * 9000 + " so 7") == "\\boxed{7}", "without a box it is read from the end"
