"""Programs are judged right and wrong as their tests say, whatever form the tests and the response have."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from program_cases import Case, cases
from program_examples import EXAMPLES, UNREADABLE

from tlt_hpc.config import RewardSection
from tlt_hpc.extras.code_rewards.code import passes_tests
from tlt_hpc.extras.code_rewards.code_tests import any_number_of_digits, read_tests
from tlt_hpc.extras.code_rewards.fences import extract_program
from tlt_hpc.extras.code_rewards.results import same_output
from tlt_hpc.extras.code_rewards.sandbox.outside import Template, working_template
from tlt_hpc.rewards.answer import Failure

CODE = RewardSection(default="code", cpu_seconds=4.0)


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with closing(working_template()) as template:
        yield template


@any_number_of_digits()
def judged_wrong(seed: int, template: Template, every: int = 1) -> tuple[int, list[Any]]:
    """The number of cases, and those with another verdict than they must have."""
    chosen = list(cases(seed))[::every]
    return len(chosen), [case for case in chosen if not is_judged_right(case, template)]


def is_judged_right(case: Case, template: Template) -> bool:
    verdict = passes_tests(case.response, case.truth, CODE, template, case.extra)
    if case.is_right:
        return (verdict.reward, verdict.failure, verdict.detail) == (1.0, None, "")
    return verdict.reward == 0.0 and (verdict.failure is None or "UNREADABLE" not in verdict.failure.name)


def test_some_programs_are_judged_right(template: Template) -> None:
    number, wrong = judged_wrong(0, template, every=19)
    assert number >= 90 and wrong == []


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.ci), pytest.param(2, marks=pytest.mark.slow)])
def test_all_programs_are_judged_right(template: Template, seed: int) -> None:
    number, wrong = judged_wrong(seed, template)
    assert number >= 1500 and wrong == []


@any_number_of_digits()
def test_examples_are_judged_right(template: Template) -> None:
    for program, tree, wanted in EXAMPLES:
        truth = tree if isinstance(tree, str) else json.dumps(tree)
        verdict = passes_tests(f"```python\n{program}\n```", truth, CODE, template)
        assert verdict.reward == bool(wanted), (program, tree, verdict)
        if wanted is UNREADABLE:
            assert verdict.failure == Failure.UNREADABLE, (program, tree, verdict)


def test_numpy_has_what_it_imports_late(template: Template) -> None:
    for call in (
        "np.unique([1])",
        "np.percentile([1], 1)",
        "np.quantile([1], 0.5)",
        "np.ma.array([1])",
        "np.char.upper(['a'])",
        "np.strings.upper(['a'])",
        "np.rec.array([(1,)])",
        "np.ctypeslib.ndpointer()",
        "np.typing.NDArray",
        "np.fft.fft([1])",
        "np.polynomial.Polynomial([1])",
        "np.linalg.inv([[1]])",
        "np.random.default_rng(0)",
        "np.median(np.pad([1.0], 1))",
        "np.einsum('i,i', [1], [1])",
        "np.savetxt(io.StringIO(), [1])",
    ):
        program = f"import numpy as np\n{call}\nprint(1)"
        verdict = passes_tests(program, '{"inputs": [""], "outputs": ["1"]}', CODE, template)
        assert verdict.reward == 1.0, (call, verdict)


# --- rows that are named before a start ---


@pytest.mark.parametrize(
    ("truth", "trouble"),
    [
        ("def run_all():\n    assert f(1) == 1", "never checks anything: nothing calls run_all"),
        ("def check(a, b):\n    assert a(1) == b", "check takes a, b, which nothing gives"),
        ("def test_a(tmp_path):\n    assert f(tmp_path)", "test_a takes tmp_path, which nothing gives"),
        ("assert True", "asserts nothing"),
        ("assert (f(1) == 2, 'message')", "asserts nothing"),
        ("assert 1 == 1", "calls nothing of the program"),
        ("def f(n): return n\nassert f(1) == 1", "calls nothing of the program"),
        ("import pandas\nassert f(1) == 1", "needs pandas, which the sandbox does not have"),
        ("from unittest.mock import patch\nassert f(1) == 1", "needs unittest.mock, which cannot reach the program"),
        ("import sys, io\nsys.stdout = io.StringIO()\nassert f(1) == 1", "replaces what a program reads or writes"),
        ('[{"testtype": "stdin"}, {"testtype": "functional"}]', "tests of a function and of standard input in one row"),
        ('{"inputs": [true], "outputs": ["1"]}', "'True' is no text of standard input or output"),
    ],
)
def test_rows_whose_tests_test_nothing_are_named(truth: str, trouble: str) -> None:
    with pytest.raises(ValueError, match=trouble) as caught:
        read_tests(truth)
    assert "\n" not in str(caught.value)


def test_tests_that_turn_out_to_check_nothing_are_unreadable(template: Template) -> None:
    for truth, trouble in (
        ("for n in f(0): assert n", "no assertion was executed"),
        ("def test_a():\n    if f(1) == 3: return\n    assert 1\n    f(2)", "asserts nothing"),
        ("assert f(lambda n: n) == 1", "a function cannot be handed to the program"),
        ("assert len('a') == 1\nif len('b') == 2: assert f(1)", "nothing was called"),
    ):
        verdict = passes_tests("def f(n): return [0] * n", truth, CODE, template)
        assert verdict.failure == Failure.UNREADABLE and trouble in verdict.detail, (truth, verdict)


def test_the_rows_own_name_of_the_function_comes_first(template: Template) -> None:
    program, truth = "def f(n): return n\ndef g(n): return -n", "def check(candidate):\n    assert candidate(1) == 1"
    for named, wanted in (("f", 1.0), ("g", 0.0), ("", 0.0), ("h", 0.0)):
        named_by = {"entry_point": named}
        for columns in (named_by, {"extra_info": named_by}, {"reward_model": named_by}):
            assert passes_tests(program, truth, CODE, template, json.dumps(columns)).reward == wanted


# --- verdicts say what was read, and why a program fails ---


@pytest.mark.parametrize(
    ("program", "truth", "detail"),
    [
        ("print(1)", '{"inputs": ["", ""], "outputs": ["1", "2"]}', "test 2: gave '1', expected '2'"),
        ("1 / 0", '{"inputs": [""], "outputs": ["2"]}', "test 1: ended with status 1, expected '2'"),
        (
            "def f(): return 1",
            "assert f() == 1\nassert f() == 2, f()",
            "test 2: assert f() == 2, f(): AssertionError: 1",
        ),
        ("def f(): 1 / 0", "assert f()", "test 1: assert f(): ZeroDivisionError: division by zero"),
        ("x = 1", "assert f()", "the program gave '': assert f(): SystemExit: the program has no 'f'"),
        (
            "import nothing_like_it",
            "assert f()",
            "the program ended with status 1: before a test called it, as by an error of syntax or import",
        ),
    ],
)
def test_a_verdict_says_why(template: Template, program: str, truth: str, detail: str) -> None:
    verdict = passes_tests(f"```python\n{program}\n```", truth, CODE, template)
    assert (verdict.reward, verdict.failure, verdict.detail, verdict.read) == (0.0, None, detail, program)


def test_a_long_program_is_shortened(template: Template) -> None:
    verdict = passes_tests(
        f"```python\n\nprint({'1' * 100})\n\n\n# x\n```", '{"inputs": [""], "outputs": ["1"]}', CODE, template
    )
    assert verdict.read == f"print({'1' * 74} (and 3 lines)" and len(verdict.detail) < 200


# --- programs in responses ---

FENCE = "```"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (f"1. So:\n   {FENCE}python\n   if n:\n       m\n   {FENCE}", "if n:\n    m\n"),
        (f"- {FENCE}python\n  n\n  {FENCE}\n- x", "n\n"),
        ("~~~python\nn\n```\n~~~\nx", "n\n```\n"),
        (f"{FENCE}`python\nn\n{FENCE}\nm\n{FENCE}`\nx", f"n\n{FENCE}\nm\n"),
        (f'{FENCE}python\n"""\n{FENCE}\nx\n{FENCE}\n"""\nn\n{FENCE}\nx', f'"""\n{FENCE}\nx\n{FENCE}\n"""\nn\n'),
        (f"{FENCE}python\nx = '''\n{FENCE}\nlost", "x = '''\n"),
        (f"{FENCE}python\nn", "n"),
        (f"{FENCE}python\nn{FENCE}", "n"),
        (f"> {FENCE}python\n> if n:\n>     m\n> {FENCE}", "if n:\n    m\n"),
        (f"{FENCE}markdown\n~~~py\nn\n~~~\n{FENCE}", "n\n"),
        (f"{FENCE}{{.python}}\nn\n{FENCE}", "n\n"),
        (f"{FENCE}Python 3.11\nn\n{FENCE}\n{FENCE}\nout\n{FENCE}", "n\n"),
        (f"<think>{FENCE}\n{FENCE}python\nlost (\n</think>\n{FENCE}python\nn\n{FENCE}", "n\n"),
    ],
)
def test_the_program_of_a_response(text: str, program: str) -> None:
    assert extract_program(text) == program


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
        ("0011", "11", False),
        ("11", "0011", False),
        ("+1", "1", False),
        ("12e3", "12000", False),
        ("1e-05", "0.00001", True),
        ("1e+16", "10000000000000000", True),
        ("1.50", "1.5", True),
        ("\n1\r\n2\r\n", "1\n2", True),
    ],
)
def test_numbers_that_are_texts(given: str, expected: str, same: bool) -> None:
    assert same_output(given, expected) is same
