"""Answers as data sets and models write them, read and compared: as mathematics, number, letter or text.

Pairs known by construction, lines of reward_forms.txt, the page's own table, and hostile text.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import mpmath
import pytest
from math_pairs import pairs

from tlt_hpc.rewards import text as texts
from tlt_hpc.rewards.answer import Verdict
from tlt_hpc.rewards.final_answer import extract_mathematics, find_answer
from tlt_hpc.rewards.judge import find_truth_problem
from tlt_hpc.rewards.mathematics import answer_equality_verdict, mathematical_equality_verdict

_LINES = (Path(__file__).parent / "reward_forms.txt").read_text(encoding="utf-8").splitlines()
_WRAPPINGS = (
    "So the answer is $\\boxed{ANSWER}$.",
    "\\boxed{ANSWER}",
    "First \\boxed{999}, no. **Final Answer**\n\n\\[\n\\boxed{ANSWER}\n\\]",
    "</think>\n\nTherefore: $$\\boxed{ANSWER}$$",
    "<think>x=4 \\boxed{77}</think><answer>\\boxed{ANSWER}</answer>",
)


PAGE = Path(__file__).parents[1] / "docs" / "rewards.md"


def verdict(answer: str, truth: str) -> float:
    return mathematical_equality_verdict(f"\\boxed{{{answer}}}", truth).reward


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.ci), pytest.param(3, marks=pytest.mark.ci)])
def test_pairs_that_are_known_by_construction(seed: int) -> None:
    wrong, count = [], 1200
    for pair in pairs(seed, count):
        found = mathematical_equality_verdict(pair.response, pair.truth)
        if (found.reward == 1.0) != pair.is_right or found.failure:
            wrong.append((pair, found))
    assert not wrong, wrong[:5]


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
        "math": lambda: mathematical_equality_verdict(response, truth, is_finished),
        "numeric": lambda: texts.numeric_verdict(response, truth, is_finished),
        "choice": lambda: texts.choice_verdict(response, truth, is_finished),
        "boxed": lambda: texts.boxed_verdict(response, truth),
        "format": lambda: Verdict(texts.format_tags_reward(response, truth.split())),
    }[kind]()
    assert found.reward == (verdict == "right"), found


@pytest.mark.parametrize("line", _lines("truth"))
def test_an_answer_of_the_data_must_be_right_by_its_own_kind(line: str) -> None:
    _, verdict, kind, truth = line.split("\t")
    assert (find_truth_problem(kind, truth) == "") == (verdict == "right")


@pytest.mark.parametrize("line", _lines("answer"))
def test_which_part_of_a_response_is_its_answer(line: str) -> None:
    _, what, answer, response = line.split("\t")
    found = find_answer(response.replace("\u23ce", "\n"))
    assert (extract_mathematics(found) if found else None) == (answer if what == "read" else None)


@pytest.mark.parametrize("number", range(len(_WRAPPINGS)))
def test_forms_of_answers_are_compared_by_what_they_mean(number: int) -> None:
    """Each form in one of the wrappings."""
    wrong = []
    for index, (truth, sign, answer) in enumerate(_forms()):
        if index % len(_WRAPPINGS) == number:
            found = mathematical_equality_verdict(_WRAPPINGS[number].replace("ANSWER", answer), truth)
            if found.reward != (sign == "\u2261"):
                wrong.append(f"{truth} {sign} {answer}: {found.detail or 'equal'}")
    assert wrong == []


def test_the_table_of_the_page() -> None:
    lines = re.findall(r"^\| [^`|]* \| (`.+?) \|(?: (`.+`) \|| \|)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    pairs_of = re.compile(r"`(.+?)`, `(.+?)`(?:; |$)")
    found = [(*pair, right) for cells in lines for cell, right in zip(cells, (1.0, 0.0), strict=True) if cell
             for pair in pairs_of.findall(cell)]  # fmt: skip
    assert len(found) >= 25
    assert [(answer, truth, verdict(answer, truth)) for answer, truth, _ in found] == found


def test_what_only_one_of_two_ways_finds_equal_is_disputed() -> None:
    found = mathematical_equality_verdict("\\boxed{1/2x}", "\\frac{x}{2}")
    assert (found.reward, found.is_disputed) == (0.0, True) and "disputed" in found.detail
    plain = mathematical_equality_verdict("\\boxed{1/2}", "0.5")
    assert (plain.reward, plain.is_disputed) == (1.0, False)


def test_each_way_alone_finds_what_the_other_takes_for_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second way would reject what a wrong first one accepted, and the first does not ask it about what differs."""
    monkeypatch.setattr("tlt_hpc.rewards.mathematics.compare.same_at_points", lambda *_: True)
    assert mathematical_equality_verdict("\\boxed{x+1}", "x+2").is_disputed
    monkeypatch.setattr("tlt_hpc.rewards.mathematics.compare.same_constant", lambda *_: True)
    assert mathematical_equality_verdict("\\boxed{\\sqrt{2}}", "\\sqrt{3}").is_disputed


def test_why_a_verdict_is_wrong() -> None:
    assert mathematical_equality_verdict("\\boxed{5}", "6").detail == "not equal to '6'"
    assert mathematical_equality_verdict("\\boxed{5", "6").detail == "the response gives no answer"
    assert mathematical_equality_verdict("\\boxed{red}", "blue").detail == "other words than 'blue'"
    assert mathematical_equality_verdict("\\boxed{ 5. }", "5").read == "5"


def test_equal_answers_of_two_responses() -> None:
    assert answer_equality_verdict("\\boxed{\\frac{2}{4}}", "so $0.5$").reward == 1.0
    assert answer_equality_verdict("\\boxed{2}", "\\boxed{3}").reward == 0.0
    assert answer_equality_verdict("\\boxed{2", "\\boxed{3}").failure == "unreadable"


@pytest.mark.parametrize("term", ["(3^{33000}*7^{14000})^{1/64}", "1000!", "3^{9999}"])
def test_a_number_of_many_digits_is_found_soon(term: str) -> None:
    """Numbers are read in the rank itself, which decodes nothing meanwhile."""
    start = time.process_time()
    assert texts.numeric_verdict(f"\\boxed{{{'+'.join([term] * 480)}}}", "5").reward == 0.0
    assert time.process_time() - start < 0.5


def test_a_verdict_does_not_depend_on_the_precision_that_somebody_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for digits in (8, 50):
        monkeypatch.setattr(mpmath.mp, "dps", digits)
        assert verdict("3.14159265358979323846", "\\pi") == 1.0
        assert verdict("\\sqrt{2}+10^{-40}", "\\sqrt{2}") == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_random_text_raises_nothing(seed: int) -> None:
    draw = random.Random(seed)
    alphabet = [
        *PIECES,
        *["_", "^.5", "x_", "5_", "√{", "\\pm", "e^", "10", ":", "\\in", "\\{", "\\text{or}", "!", "}", "\\mid"],
    ]
    for _ in range(1500):
        text = "".join(draw.choice(alphabet) for _ in range(draw.randint(1, 12)))
        for response in (f"\\boxed{{{text}}}", f"the answer is {text}", text):
            texts.numeric_verdict(response, "5")
            texts.choice_verdict(response, "B")
            mathematical_equality_verdict(response, "5")


HANGING = [
    ("9^{9^{9}}", "9^{387420489}"), ("9^{9^{9^{9}}}", "9^{9^{9^{8}}}"), ("2^{2^{2^{2^{2^2}}}}", "2^{2^{2^{2^{4}}}}"),
    ("(10^{10})!", "1"), ("\\binom{10^9}{5\\cdot10^8}", "\\binom{10^9}{500000000}"), ("\\sum_{k=1}^{10^9} k", "1"),
    ("x^{99999999}", "x^{99999998}\\cdot x"), ("(x+1)^{100000}", "(1+x)^{100000}"), ("\\sqrt[10^9]{2}", "1"),
    ("\\sqrt[1000000007]{2}", "2^{1/1000000007}"), ("\\gcd(10^{1000000},10^{999999})", "1"),
    ("\\lfloor e^{e^{e^{e}}}\\rfloor", "1"), ("\\sin(10^{10^{10}})", "0"), ("\\sin(10^{100})", "0.1"), ("0.1^{10^9}", "0"),
    ("1" * 4500, "1" * 4499 + "2"), ("10^{10^5}!", "1"), ("((((((((3!)!)!)!)!)!)!)!", "2"), ("3!!!!!!", "1"),
    ("e^{e^{e^{e^{e^{e}}}}}", "1"), ("e^{e^{e^{e}}}", "e^{e^{e^{e}}}+1"), ("10^{-10^{10}}", "10^{-10^{9}}"),
    ("(1+\\frac{1}{10^{20}})^{10^{20}}", "e"), ("\\cos^{100000} x", "1"), ("x^{x^{x^{x^{x}}}}", "x^{x^{x^{x^{x+0}}}}"),
    ("9999999!", "1"), ("2^{1000000}", "4^{500000}"), ("3^{200000}", "9^{100000}"), ("\\tan(\\frac{\\pi}{2})", "1"),
    ("+".join(["x"] * 2000), "2000x"), ("-" * 4000 + "1", "1"), ("(" * 2000 + "1" + ")" * 2000, "1"), ("{" * 2000, "1"),
    ("\\frac{" * 1500 + "1", "1"), ("\\{" + ",".join(map(str, range(190))) + "\\}", "1"), ("\\pm".join("1" * 500), "1"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "truth"), HANGING, ids=lambda text: text[:24])
def test_expressions_that_cannot_be_computed_end_soon(answer: str, truth: str) -> None:
    start = time.process_time()
    mathematical_equality_verdict(f"\\boxed{{{answer}}}", truth)
    assert time.process_time() - start < 4.0, "reward.cpu_seconds is 5"


PIECES = [
    "(", ")", "[", "{", "}", "\\", "$", " ", "\n", ".", ",", "1", "1,", "a", "a ", "\\boxed{", "\\boxed{}", "\\frac", "\\sqrt(",
    "\\text{", "|", "-", "^", "_", "\\,", "answer ", "answer is ", "answer:", "A", "and ", "#", "<answer>", "*", "`", "\u221a",
    "0.\\overline{3", "\\dot{1}", "1e5", "!", "%", "=", "1 000", "000 ", "...", "your ", "\\pm", "$x$", "sqrt(", "I ", "10^",
    "\\boxed{1} and ", "option ", "B is the answer ", "1/", "\\begin{pmatrix}", "\\\\",
]  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_text_of_one_piece_is_read_in_linear_time(piece: str) -> None:
    """Numbers and letters are read in the rank itself, which decodes nothing meanwhile."""
    for before, after in (("", ""), ("\\boxed{", "1}"), ("the answer is ", "!x")):
        text = before + piece * (50_000 // len(piece)) + after
        for read in (find_answer, texts.number_of_response, texts.letter_of_response):
            start = time.process_time()
            read(text)
            assert time.process_time() - start < 1.0, (read, before)
