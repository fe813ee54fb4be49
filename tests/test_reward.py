"""What counts as the right answer, by the strict box and by mathematics."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from tlt_hpc.records import FinishReason, Rollout, SampleKey
from tlt_hpc.rewards.scorer import Scorer, score


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("\\boxed{28}", 1.0),
        ("<think>196,364</think>\\boxed{ 28 }\n ", 1.0),
        ("\\boxed{3} no, \\boxed{28}", 1.0),
        ("\\boxed{28} no, \\boxed{3}", 0.0),
        ("\\boxed{28}.", 0.0),
        ("\\boxed{28}\\boxed{28", 0.0),
        ("\\boxed{28", 0.0),
        ("\\boxed{2 8}", 0.0),
        ("\\boxed{028}", 0.0),
        ("\\boxed{28.0}", 0.0),
        ("28", 0.0),
        ("", 0.0),
        ("\\boxed{}", 0.0),
    ],
)
def test_the_last_box_must_be_the_answer_and_the_end(text: str, reward: float) -> None:
    assert score(text, " 28", "boxed") == reward


def test_braces_inside_the_box_are_balanced() -> None:
    assert score("so \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", "boxed") == 1.0
    assert score("so \\boxed{\\frac{1}{2}", "\\frac{1}{2}", "boxed") == 0.0
    assert score("so \\boxed{\\frac{1}{2}}}", "\\frac{1}{2}", "boxed") == 0.0


def test_an_empty_answer_is_not_given_by_no_box() -> None:
    assert score("nothing", "", "boxed") == 0.0


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("So $\\boxed{0.5}$.", "\\frac{1}{2}", 1.0),
        ("the answer is \\boxed{\\frac{2}{4}} as shown", "1/2", 1.0),
        ("\\boxed{22\\sqrt{2}/2}", "11\\sqrt2", 1.0),
        ("\\boxed{11}", "11\\sqrt2", 0.0),
        ("\\boxed{x+1}", "1+x", 1.0),
        ("\\boxed{3}", "$4$", 0.0),
        ("\\boxed{3}", "\\boxed{3}", 1.0),
        ("no idea", "3", 0.0),
    ],
)
def test_mathematics_compares_values(text: str, answer: str, reward: float) -> None:
    assert score(text, answer, "math") == reward


def test_an_answer_that_is_no_mathematics_scores_zero_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert score("\\boxed{3}", "$$", "math") == 0.0
    assert "answer '$$' cannot be read" in caplog.text


def test_mathematics_off_the_main_thread_is_refused() -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            score("\\boxed{3}", "3", "math")
        except AssertionError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(errors) == 1


def rollouts(num: int) -> list[Rollout]:
    tokens = np.zeros(1, np.int32)
    return [
        Rollout(
            SampleKey(0, 0, 0, i, 0), tokens, tokens, np.zeros(1, np.float32), FinishReason.EOS, 0, 1, float(i)
        )
        for i in range(num)
    ]  # fmt: skip


def test_rewards_scored_ahead_are_those_scored_after() -> None:
    asked: list[int] = []

    def judge(rollout: Rollout) -> float:
        asked.append(rollout.key.draw)
        return float(score(f"\\boxed{{{rollout.key.draw % 3}}}", "1", "boxed"))

    after = Scorer(judge).rewards(rollouts(9))
    assert after.dtype == np.float32 and after.tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0]
    asked.clear()
    scorer, answers = Scorer(judge), iter([False, False, True])
    assert scorer.has_unscored(rollouts(9))
    scorer.score_ahead(rollouts(9), lambda: next(answers))
    assert asked == [0, 1], "the release came after the second answer: none is begun after it"
    assert scorer.num_ahead == 2 and scorer.seconds_ahead > 0 and scorer.has_unscored(rollouts(9))
    in_another_order = rollouts(9)[::-1]
    assert scorer.rewards(in_another_order).tobytes() == after[::-1].tobytes()
    assert sorted(asked) == list(range(9)), "nothing is scored twice"
    assert not scorer.has_unscored(rollouts(9)) and scorer.num_ahead == 2
