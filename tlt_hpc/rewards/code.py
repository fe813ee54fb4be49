"""The judgement of a program by its unit tests. Programs run in the sandbox; what they did is compared here.

The data's answer is verl's: JSON with ``inputs`` and ``outputs``, and ``fn_name`` where they are a function's arguments
and results rather than standard input and output; or a list of assertions; or one text of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from tlt_hpc.config import RewardSection
from tlt_hpc.rewards.answer import Failure, Verdict
from tlt_hpc.rewards.sandbox.outside import Outcome, ProgramLimits, Sandbox, Template
from tlt_hpc.rewards.sandbox.values import decode, encode

_FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_SPARE_OUTPUT_BYTES = 2**16
_TOLERANCE = Fraction(1, 10**6)
"""Of numbers with a decimal point, relative where they are above 1."""
_NUMBER = re.compile(r"[-+]?\d{1,400}(?:\.\d{0,400})?(?:[eE][-+]?\d{1,3})?")


@dataclass(frozen=True)
class Tests:
    """What a program has to do: one of the three."""

    scripts: tuple[tuple[str, str], ...] = ()
    """Standard input and output."""
    calls: tuple[tuple[list[Any], Any], ...] = ()
    """Arguments and result of the function ``name``."""
    name: str = ""
    assertions: tuple[str, ...] = ()


@dataclass
class _Budget:
    """What is left of an answer's CPU time over its tests."""

    settings: RewardSection
    used: float = field(default=0.0)

    def limits(self, expected: str) -> ProgramLimits:
        """For the next test."""
        left = max(0.0, self.settings.cpu_seconds - self.used)
        # UTF-8 takes four bytes a character at most
        return ProgramLimits(left, self.settings.memory_mb * 2**20, 4 * len(expected) * 2 + _SPARE_OUTPUT_BYTES)


def passes_tests(text: str, truth: str, settings: RewardSection, template: Template) -> Verdict:
    """1.0 where the response's program passes all tests.

    Raises:
        SandboxError: this machine has no sandbox (any more).
    """
    try:
        tests = read_tests(truth)
    except ValueError as error:
        return Verdict.failed(Failure.UNREADABLE, f"tests {truth[:80]!r}: {error}")
    code, budget = extract_program(text), _Budget(settings)
    with Sandbox(template) as sandbox:
        if tests.assertions:
            return _run_assertions(sandbox, code, tests.assertions, budget)
        for stdin, expected in tests.scripts:
            outcome = sandbox.run(code, stdin, budget.limits(expected))
            if verdict := _not_passed(outcome, same_output(outcome.output, expected), budget):
                return verdict
        for arguments, result in tests.calls:
            outcome = sandbox.call(code, tests.name, encode(arguments), budget.limits(json.dumps(result)))
            if verdict := _not_passed(outcome, _same_result(outcome.output, result), budget):
                return verdict
    return Verdict(1.0)


def extract_program(text: str) -> str:
    """The last fenced block that is marked as Python, else the last one, else the whole response."""
    blocks = _FENCE.findall(text)
    marked = [body for language, body in blocks if language.lower() in ("python", "py", "python3")]
    chosen = marked or [body for _, body in blocks]
    return chosen[-1] if chosen else text


def read_tests(truth: str) -> Tests:
    """The data's answer.

    Raises:
        ValueError: it is none of the forms.
    """
    tree = _parse(truth)
    if isinstance(tree, str):
        tree = [tree]
    if isinstance(tree, dict):
        return _pairs(tree.get("inputs"), tree.get("outputs"), tree.get("fn_name"))
    if isinstance(tree, list) and tree and all(isinstance(each, str) for each in tree):
        _check_assertions(tree)
        return Tests(assertions=tuple(tree))
    if isinstance(tree, list) and tree and all(isinstance(each, dict) for each in tree):  # as LiveCodeBench has them
        return _pairs([each.get("input") for each in tree], [each.get("output") for each in tree], None)
    raise ValueError("neither inputs and outputs nor a list of assertions")


def same_output(given: str, expected: str) -> bool:
    """Whether a program wrote what it should: line by line, without the space at their ends, numbers by value."""
    lines, wanted = given.rstrip().split("\n"), expected.rstrip().split("\n")
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _parse(truth: str) -> Any:
    try:
        tree = json.loads(truth)
        return json.loads(tree) if isinstance(tree, str) and tree.lstrip()[:1] in ("{", "[") else tree
    except json.JSONDecodeError:
        return truth  # assertions as they stand


def _pairs(inputs: Any, outputs: Any, name: Any) -> Tests:
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise ValueError("'inputs' and 'outputs' must be lists of one length, with one test or more")
    if name is None:
        return Tests(scripts=tuple(zip(map(_text, inputs), map(_text, outputs), strict=True)))
    calls = [(_arguments(given), _from_json(wanted)) for given, wanted in zip(inputs, outputs, strict=True)]
    return Tests(calls=tuple(calls), name=str(name))


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


def _check_assertions(texts: Sequence[str]) -> None:
    for text in texts:
        try:
            compile(text, "assertions", "exec")
        except SyntaxError as error:
            raise ValueError(f"{text[:40]!r} is no assertion: {error.msg}") from None


def _run_assertions(sandbox: Sandbox, code: str, assertions: Sequence[str], budget: _Budget) -> Verdict:
    outcome = sandbox.check(code, list(assertions), budget.limits("passed"))
    return _not_passed(outcome, outcome.output == "passed", budget) or Verdict(1.0)


def _not_passed(outcome: Outcome, is_right: bool, budget: _Budget) -> Verdict | None:
    """The verdict that a test ends with; None where it is passed."""
    budget.used += outcome.cpu_seconds
    if outcome.failure == "cpu" or budget.used > budget.settings.cpu_seconds:
        return Verdict.failed(Failure.CPU, f"more than {budget.settings.cpu_seconds} s of CPU time")
    if outcome.failure:
        return Verdict.failed(Failure(outcome.failure))
    if outcome.is_out_of_memory:
        return Verdict.failed(Failure.MEMORY)
    if outcome.status < 0:
        return Verdict.failed(Failure.CRASH, f"the program was killed by signal {-outcome.status}")
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
        given = _as_json(decode(output))
    except ValueError:
        return False
    wanted = _as_json(wanted)
    return _equal(given, wanted) or (isinstance(wanted, list) and len(wanted) == 1 and _equal(given, wanted[0]))


def _as_json(value: Any) -> Any:
    """Tuples as lists and keys as texts, since a data set that is JSON has no others."""
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    return value


def _equal(given: Any, wanted: Any) -> bool:
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(_equal, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(_equal(given[key], wanted[key]) for key in wanted)
    if isinstance(wanted, float) and isinstance(given, int | float):
        return abs(given - wanted) <= float(_TOLERANCE) * max(1.0, abs(wanted))
    return bool(given == wanted)
