"""Programs are judged right and wrong as their tests say, whatever form the tests and the response have."""

from __future__ import annotations

import ast
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from program_cases import Case, cases

from tlt_hpc.config import RewardSection
from tlt_hpc.extras.code_rewards.code import judge_program
from tlt_hpc.extras.code_rewards.code_tests import unlimited_int_digits
from tlt_hpc.extras.code_rewards.fences import extract_program
from tlt_hpc.extras.code_rewards.results import same_output
from tlt_hpc.extras.code_rewards.sandbox.outside import Template, start_working_template
from tlt_hpc.extras.code_rewards.sandbox.values import to_literal
from tlt_hpc.rewards.answer import Failure, Verdict

CODE = RewardSection(default="code", cpu_seconds=4.0)
LIMITED = RewardSection(default="code", cpu_seconds=0.5)


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(__file__).with_name(name).read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with closing(start_working_template()) as template:
        yield template


@pytest.mark.parametrize(
    ("seed", "every"),
    [(0, 19), pytest.param(1, 1, marks=pytest.mark.ci), pytest.param(2, 1, marks=pytest.mark.slow)],
)
@unlimited_int_digits()
def test_programs_are_judged_right(template: Template, seed: int, every: int) -> None:
    chosen = list(cases(seed))[::every]
    assert len(chosen) >= 1500 // every
    assert [case for case in chosen if not is_judged_right(case, template)] == []


def is_judged_right(case: Case, template: Template) -> bool:
    verdict = judge_program(case.response, case.truth, CODE, template, case.extra)
    if case.is_right:
        return (verdict.reward, verdict.failure, verdict.detail) == (1.0, None, "")
    return verdict.reward == 0.0 and verdict.failure != Failure.UNREADABLE


ONES = "1" * 4999
LONG = [
    {"program": "print(int('1'*5000)+1)", "tests": {"inputs": [""], "outputs": [f"{ONES}2"]}, "expected": "right"},
    {"program": "def f(n): return n", "tests": "assert f(900) == " + " + ".join(["1"] * 900), "expected": "right"},
    {"program": "def f(n): return n", "tests": {"fn_name": "f", "inputs": [[10**5000]], "outputs": [10**5000]},
     "expected": "right"},
]  # fmt: skip


@unlimited_int_digits()
def test_examples_have_their_verdict(template: Template) -> None:
    """Forms of tests, and traps, that the generator does not write; ``detail`` is a part of what the verdict says."""
    wrong = []
    for row in (*rows_of("program_examples.jsonl"), *LONG):
        truth = row["tests"] if isinstance(row["tests"], str) else json.dumps(row["tests"])
        verdict = judge_program(f"```python\n{row['program']}\n```", truth, CODE, template)
        found = verdict.failure or ("right" if verdict.reward else "wrong")
        is_explained = row.get("detail", "") in verdict.detail and "\n" not in verdict.detail
        if found != row["expected"] or not is_explained or bool(verdict.detail) != (found != "right"):
            wrong.append((row, verdict))
    assert wrong == []


def test_the_rows_own_name_of_the_function_comes_first(template: Template) -> None:
    program, truth = "def f(n): return n\ndef g(n): return -n", "def check(candidate):\n    assert candidate(1) == 1"
    for named, wanted in (("f", 1.0), ("g", 0.0), ("", 0.0), ("h", 0.0)):
        named_by = {"entry_point": named}
        for columns in (named_by, {"extra_info": named_by}, {"reward_model": named_by}):
            assert judge_program(program, truth, CODE, template, json.dumps(columns)).reward == wanted


def test_a_long_program_is_shortened(template: Template) -> None:
    verdict = judge_program(
        f"```python\n\nprint({'1' * 100})\n\n\n# x\n```", '{"inputs": [""], "outputs": ["1"]}', CODE, template
    )
    assert verdict.read == f"print({'1' * 74} (and 3 lines)" and len(verdict.detail) < 200


# --- programs in responses ---

FENCE = "```"


@pytest.mark.parametrize("row", rows_of("program_responses.jsonl"))
def test_the_program_of_a_response(row: dict[str, str]) -> None:
    assert extract_program(row["response"]) == row["program"]


@pytest.mark.parametrize(
    "text",
    [
        f"{FENCE}python\n" * 20_000,
        f'{FENCE}python\n"""\n' * 20_000,
        f'{FENCE}\n"""\n' * 20_000,
        f"{FENCE}python\nn\n{FENCE}\n" * 20_000,
        f"~~~python\nn\n{FENCE}\n" * 20_000,
        f"{FENCE}md\n" * 20_000,
        "".join(f"{'`' * n}md\n" for n in range(600, 2, -1)),
        f'{FENCE}python\nx = """\n' + f"{FENCE}\n" * 20_000,
        f"{FENCE}\n(\n{FENCE}python\n" * 10 + "n = 1\n" * 20_000,
        FENCE + "a" * 20_000 + "`",
        FENCE + " " * 20_000 + "`",
    ],
    ids=range(11),
)
def test_many_fences_take_no_time(text: str) -> None:
    before = time.process_time()
    extract_program(text)
    assert time.process_time() - before < 0.5


def test_the_last_of_many_programs_is_taken() -> None:
    drafts = f"{FENCE}python\n(\n" * 50 + f'{FENCE}\n"""\n' * 50
    assert extract_program(f"{drafts}\n{FENCE}python\nn\n{FENCE}\n{FENCE}\nout\n{FENCE}") == "n\n"


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("1 2\n3\n", "1 2 \n3", True),
        ("\n1\r\n2\r\n", "1\n2", True),
        ("1\n2", "1 2", False),
        ("1.0", "1", True),
        ("0.33333333", "0.333333334", True),
        ("0.3333", "0.333333334", False),
        ("1" * 500, "1" * 499 + "2", False),
        ("11", "0011", False),
        ("1e+16", "10000000000000000", True),
    ],
)
def test_outputs_are_compared_by_line_and_number(given: str, expected: str, same: bool) -> None:
    assert same_output(given, expected) is same


# --- limits and values ---


@pytest.mark.parametrize(
    ("program", "assertion", "failure"),
    [
        ("def f():\n    while True: pass", "assert f()", Failure.CPU),
        ("def f(): return 1", "f()\nwhile True: assert len", Failure.CPU),
        ("def f(): return [0] * 10**9", "assert f()", Failure.MEMORY),
        ("import os\ndef f(): os.abort()", "assert f()", Failure.CRASH),
    ],
)
def test_a_program_and_its_assertions_have_limits(
    template: Template, program: str, assertion: str, failure: Failure
) -> None:
    assert judge_program(program, assertion, LIMITED, template).failure == failure


def test_cpu_time_is_counted_over_all_tests_of_an_answer(template: Template) -> None:
    program = "import time\nwhile time.process_time() < 0.1: pass\nprint(1)"
    for count, wanted in ((2, Verdict(1.0)), (9, Verdict(0.0, Failure.CPU, "more than 0.5 s of CPU time"))):
        truth = json.dumps({"inputs": [""] * count, "outputs": ["1"] * count})
        assert judge_program(program, truth, LIMITED, template) == wanted


@pytest.mark.parametrize(
    "value", [None, True, 2**100, float("inf"), "\u00e9\n\ud800", b"\x00", -1j, (1, [2]), {1}, set(), {(1, 2): [3]}, ()]
)
def test_values_come_through(value: object) -> None:
    again = ast.literal_eval(to_literal(value))
    assert again == value and type(again) is type(value) and "\n" not in to_literal(value)


def test_values_are_of_builtin_types() -> None:
    class Liar(str):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = str.__hash__

    assert to_literal([Liar("x"), Counter("a"), frozenset({1})]) == "['x',{'a':1,},{1,},]"
    with pytest.raises(ValueError, match="a object cannot leave the sandbox"):
        to_literal([object()])
