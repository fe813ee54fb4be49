"""Answers and responses as data sets and models write them, in reward_forms.txt: each must have its verdict."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tlt_hpc.rewards import text as texts
from tlt_hpc.rewards.answer import Verdict
from tlt_hpc.rewards.final_answer import answer_in, find_answer
from tlt_hpc.rewards.judge import truth_problem
from tlt_hpc.rewards.mathematics import equal_as_mathematics

_LINES = (Path(__file__).parent / "reward_forms.txt").read_text(encoding="utf-8").splitlines()
_WRAPPINGS = (
    "So the answer is $\\boxed{ANSWER}$.",
    "\\boxed{ANSWER}",
    "First \\boxed{999}, no. **Final Answer**\n\n\\[\n\\boxed{ANSWER}\n\\]",
    "</think>\n\nTherefore: $$\\boxed{ANSWER}$$",
    "<think>x=4 \\boxed{77}</think><answer>\\boxed{ANSWER}</answer>",
)


def _lines(*kinds: str) -> list[str]:
    """Lines of these kinds: kind, verdict, truth, response and, where it was cut off, a fifth word."""
    return [line for line in _LINES if line.partition("\t")[0] in kinds]


def _forms() -> Iterator[tuple[str, str, str]]:
    """A truth, a sign and an answer."""
    for line in _LINES:
        if "\t" not in line and not line.startswith("#"):
            truth, *rest = re.split(r" ([\u2261\u2262]) ", line)
            yield from ((truth, sign, answer) for sign, answer in zip(rest[::2], rest[1::2], strict=True))


@pytest.mark.parametrize("line", _lines("math", "numeric", "choice", "boxed", "format"))
def test_responses_have_their_verdict(line: str) -> None:
    kind, verdict, truth, response, *cut = line.split("\t")
    response, is_finished = response.replace("\u23ce", "\n"), not cut
    found = {
        "math": lambda: equal_as_mathematics(response, truth, is_finished),
        "numeric": lambda: texts.numeric(response, truth, is_finished),
        "choice": lambda: texts.choice(response, truth, is_finished),
        "boxed": lambda: texts.boxed(response, truth),
        "format": lambda: Verdict(texts.tags(response, truth.split())),
    }[kind]()
    assert found.reward == (verdict == "right"), found


@pytest.mark.parametrize("line", _lines("truth"))
def test_an_answer_of_the_data_must_be_right_by_its_own_kind(line: str) -> None:
    _, verdict, kind, truth = line.split("\t")
    assert (truth_problem(kind, truth) == "") == (verdict == "right")


@pytest.mark.parametrize("line", _lines("answer"))
def test_which_part_of_a_response_is_its_answer(line: str) -> None:
    _, what, answer, response = line.split("\t")
    found = find_answer(response.replace("\u23ce", "\n"))
    assert (answer_in(found) if found else None) == (answer if what == "read" else None)


@pytest.mark.parametrize("number", range(len(_WRAPPINGS)))
def test_forms_of_answers_are_compared_by_what_they_mean(number: int) -> None:
    """Each form in one of the wrappings."""
    wrong = []
    for index, (truth, sign, answer) in enumerate(_forms()):
        if index % len(_WRAPPINGS) == number:
            found = equal_as_mathematics(_WRAPPINGS[number].replace("ANSWER", answer), truth)
            if found.reward != (sign == "\u2261"):
                wrong.append(f"{truth} {sign} {answer}: {found.detail or 'equal'}")
    assert wrong == []
