"""The data's answers judged against themselves before a start."""

from __future__ import annotations

import numpy as np
import pytest

from tlt_hpc.common.records import Prompt
from tlt_hpc.config import RewardSection
from tlt_hpc.rewards.judge import check_answer


def problem(kind: str, truth: str, **settings: object) -> str:
    section = RewardSection.model_validate({"by_source": {"a": kind}, **settings})
    return check_answer(section, Prompt(np.zeros(1, np.int32), "", truth, "a"))


@pytest.mark.parametrize(
    ("kind", "truth"),
    [
        *(("boxed", text) for text in ("42", "\\frac{1}{2}", "x = 3", "\\{1, 2\\}", '["1", "2"]')),
        *(("numeric", text) for text in ("42", "-3.5", "1,234", "\\frac{1}{2}", "3/4", "12 cm", '["1", "2"]')),
        *(("choice", text) for text in ("B", "(c)", "b.", '["A", "B"]')),
        *(("math", text) for text in ("\\frac{1}{2}", "$x^2$", "(1, 2]", "so $\\boxed{5}$", "\\sqrt{2}", '["1", "2"]')),
        ("a.py:f", "anything"),
        ("format", ""),
    ],
)
def test_answers_that_can_be_right(kind: str, truth: str) -> None:
    tags = {"format_tags": ["a"]} if kind == "format" else {}
    assert problem(kind, truth, **tags) == ""


@pytest.mark.parametrize(
    ("kind", "truth", "wrong"),
    [
        ("numeric", "forty", "forty"),
        ("numeric", '["1", "two"]', "two"),
        ("numeric", "", ""),
        ("choice", "forty", "forty"),
        ("boxed", "f(}", "f(}"),
        ("boxed", "{", "{"),
    ],
)
def test_answers_that_no_response_can_match(kind: str, truth: str, wrong: str) -> None:
    said = problem(kind, truth)
    assert said.startswith(f"reward kind {kind!r}: ") and repr(wrong) in said and "\n" not in said
    assert problem(kind, truth, format_tags=["think"], weights={"format": 0.5}) == said, (
        "the form makes no answer right"
    )


def test_tests_that_cannot_be_read_are_no_answer_at_all() -> None:
    assert problem("code", "assert f(1) == 2") == ""
    with pytest.raises(ValueError, match=r"^reward kind 'code' cannot read the tests '\[\]': "):
        problem("code", "[]")
