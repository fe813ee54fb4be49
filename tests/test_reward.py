"""What counts as the right answer, by the strict box and by mathematics."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from tlt_hpc.rl.reward import score, score_rollouts


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


def test_rewards_are_float32_in_order() -> None:
    rewards = score_rollouts(["\\boxed{1}", "\\boxed{2}", "\\boxed{3}"], ["1", "1", "3"], "boxed")
    assert rewards.dtype == np.float32 and rewards.tolist() == [1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="zip"):
        score_rollouts(["\\boxed{1}"], [], "boxed")
