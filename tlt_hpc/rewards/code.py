"""Judges a program by its unit tests. Programs run in the sandbox; their results are compared here.

The data's answer is verl's: JSON with ``inputs`` and ``outputs``, and ``fn_name`` where they are a function's arguments
and results rather than standard input and output; or LiveCodeBench's list of tests; or assertions: Python text, or a
JSON list of such.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from fractions import Fraction
from typing import Any

from tlt_hpc.config import RewardSection
from tlt_hpc.rewards.answer import Failure, Verdict
from tlt_hpc.rewards.sandbox.outside import Outcome, ProgramLimits, Sandbox, Template, check

_FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_SPARE_OUTPUT_BYTES = 2**16
ASSERTIONS = "assert"
"""Stands for a function's name, which no function can have."""
_TOLERANCE = Fraction(1, 10**6)
"""Tolerance of numbers with a decimal point, relative above 1."""
_NUMBER = re.compile(r"[-+]?\d{1,400}(?:\.\d{0,400})?(?:[eE][-+]?\d{1,3})?")


def passes_tests(text: str, truth: str, settings: RewardSection, template: Template) -> Verdict:
    """1.0 if the response's program passes all tests.

    Raises:
        SandboxError: this machine has no sandbox (any more).
    """
    try:
        name, tests = read_tests(truth)
    except ValueError as error:
        return Verdict(0.0, Failure.UNREADABLE, f"tests {truth[:80]!r}: {error}")
    code, used = extract_program(text), 0.0
    if name == ASSERTIONS:
        return _hold(code, tests, settings, template)
    with Sandbox(template) as sandbox:
        for given, wanted in tests:
            expected = json.dumps(wanted) if name else wanted
            # CPU time is counted over all tests; UTF-8 takes four bytes a character at most
            limits = ProgramLimits(
                max(0.0, settings.cpu_seconds - used),
                settings.memory_mb * 2**20,
                8 * len(expected) + _SPARE_OUTPUT_BYTES,
            )
            if name:
                outcome = sandbox.call(code, name, given, limits)
                is_right = _same_result(outcome.output, wanted)
            else:
                outcome = sandbox.run(code, given, limits)
                is_right = same_output(outcome.output, wanted)
            used += outcome.cpu_seconds
            if verdict := _not_passed(outcome, is_right, used, settings):
                return verdict
    return Verdict(1.0)


def extract_program(text: str) -> str:
    """The last fenced block that is marked as Python, else the last one, else the whole response."""
    blocks = _FENCE.findall(text)
    marked = [body for language, body in blocks if language.lower() in ("python", "py", "python3")]
    chosen = marked or [body for _, body in blocks]
    return chosen[-1] if chosen else text


def read_tests(truth: str) -> tuple[str, list[Any]]:
    """The tests of the data's answer: a function's name with pairs of arguments and result, "" with pairs of input and
    output, or ``ASSERTIONS`` with texts.

    Raises:
        ValueError: the answer has another form.
    """
    tree: Any = truth
    with contextlib.suppress(json.JSONDecodeError):  # assertions may stand as they are
        tree = json.loads(tree)
        tree = json.loads(tree) if isinstance(tree, str) else tree
    if isinstance(tree, str) or (isinstance(tree, list) and tree and all(isinstance(each, str) for each in tree)):
        return ASSERTIONS, _assertions([tree] if isinstance(tree, str) else tree)
    if isinstance(tree, list) and all(isinstance(each, dict) for each in tree):  # as LiveCodeBench has them
        tree = {
            "inputs": [each.get("input") for each in tree],
            "outputs": [each.get("output") for each in tree],
            "fn_name": _function_of(tree[0]) if tree else None,
        }
    if not isinstance(tree, dict):
        raise ValueError("neither a table with 'inputs' and 'outputs' nor a list of such nor assertions")
    inputs, outputs, name = tree.get("inputs"), tree.get("outputs"), tree.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise ValueError("'inputs' and 'outputs' must be lists of one length, with one test or more")
    if name is None:
        return "", list(zip(map(_text, inputs), map(_text, outputs), strict=True))
    return str(name), list(zip(map(_arguments, inputs), map(_from_json, outputs), strict=True))


def same_output(given: str, expected: str) -> bool:
    """Whether a program wrote what it should: line by line, without the space at their ends, numbers by value."""
    lines, wanted = given.rstrip().split("\n"), expected.rstrip().split("\n")
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _function_of(test: dict[str, Any]) -> str | None:
    """The function that a test of LiveCodeBench calls; None if it is one of standard input and output."""
    if test.get("testtype") != "functional":
        return None
    metadata = test.get("metadata")
    name = metadata.get("func_name") if isinstance(metadata, dict) else None
    if not isinstance(name, str):
        raise ValueError("a function's tests without metadata.func_name")
    return name


def _assertions(texts: list[str]) -> list[str]:
    nodes = list[ast.AST]()
    for text in texts:
        try:
            tree = ast.parse(text)
            compile(tree, "assertions", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"{text[:40]!r} is neither JSON nor Python: {error}") from None
        nodes += ast.walk(tree)
    if not any(isinstance(node, ast.Assert) for node in nodes):
        raise ValueError(f"{texts[0][:40]!r} asserts nothing")
    return texts


def _hold(code: str, assertions: list[str], settings: RewardSection, template: Template) -> Verdict:
    limits = ProgramLimits(settings.cpu_seconds, settings.memory_mb * 2**20, _SPARE_OUTPUT_BYTES)
    program, checked = check(template, code, assertions, limits)
    for outcome, is_right in ((program, True), (checked, checked.output == "passed")):
        if verdict := _not_passed(outcome, is_right, outcome.cpu_seconds, settings):
            return verdict
    return Verdict(1.0)


def _text(given: Any) -> str:
    """Standard input or output: a text, or a list of lines."""
    if isinstance(given, list):
        return "\n".join(map(str, given))
    if not isinstance(given, str):
        raise ValueError(f"{str(given)[:40]!r} is no text of standard input or output")
    return given


def _arguments(given: Any) -> list[Any]:
    """A function's arguments: a list, or a text with one JSON value a line."""
    if isinstance(given, str):
        return [json.loads(line) for line in given.split("\n") if line.strip()]
    if not isinstance(given, list):
        raise ValueError(f"{str(given)[:40]!r} is no list of arguments")
    return given


def _from_json(wanted: Any) -> Any:
    """A result; a text may be JSON, as in LiveCodeBench, or itself the result."""
    try:
        return json.loads(wanted) if isinstance(wanted, str) else wanted
    except json.JSONDecodeError:
        return wanted


def _not_passed(outcome: Outcome, is_right: bool, used: float, settings: RewardSection) -> Verdict | None:
    """The verdict that a test ends with; None if it is passed."""
    if outcome.failure == "cpu" or used > settings.cpu_seconds:
        return Verdict(0.0, Failure.CPU, f"more than {settings.cpu_seconds} s of CPU time")
    if outcome.failure:
        return Verdict(0.0, Failure(outcome.failure))
    if outcome.is_out_of_memory:
        return Verdict(0.0, Failure.MEMORY)
    if outcome.status < 0:
        return Verdict(0.0, Failure.CRASH, f"the program was killed by signal {-outcome.status}")
    return None if is_right and outcome.status == 0 else Verdict(0.0)


def _same_line(given: str, wanted: str) -> bool:
    if given.strip() == wanted.strip():
        return True
    words, wanted_words = given.split(), wanted.split()
    return len(words) == len(wanted_words) and all(map(_same_word, words, wanted_words))


def _same_word(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    if not (_NUMBER.fullmatch(given) and _NUMBER.fullmatch(wanted)):
        return False
    value, target = Fraction(given), Fraction(wanted)
    tolerance = _TOLERANCE * max(Fraction(1), abs(target)) if not wanted.lstrip("+-").isdigit() else 0
    return abs(value - target) <= tolerance


def _same_result(output: str, wanted: Any) -> bool:
    """Whether a function returned what it should; a one-element list of results may stand for its element (APPS)."""
    try:
        given = json.loads(output)
    except (ValueError, RecursionError):
        return False
    return _equal(given, wanted) or (isinstance(wanted, list) and len(wanted) == 1 and _equal(given, wanted[0]))


def _equal(given: Any, wanted: Any) -> bool:
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(_equal, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(_equal(given[key], wanted[key]) for key in wanted)
    if isinstance(wanted, float) and isinstance(given, int | float):
        return abs(given - wanted) <= float(_TOLERANCE) * max(1.0, abs(wanted))
    return bool(given == wanted)
