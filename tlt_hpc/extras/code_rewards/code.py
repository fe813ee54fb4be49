"""Judges a program by its unit tests. Programs run in the sandbox; their results are compared here."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from tlt_hpc.common.formatting import format_count
from tlt_hpc.config import RewardSection
from tlt_hpc.extras.code_rewards.code_tests import Tests, unlimited_int_digits
from tlt_hpc.extras.code_rewards.code_tests import read_tests as read_tests
from tlt_hpc.extras.code_rewards.fences import extract_program
from tlt_hpc.extras.code_rewards.results import same_output, same_result
from tlt_hpc.extras.code_rewards.sandbox.outside import Outcome, ProgramLimits, Sandbox, Template, run_python_tests
from tlt_hpc.extras.code_rewards.sandbox.outside import start_working_template as start_working_template
from tlt_hpc.rewards.answer import MEMORY_BYTES, Failure, Verdict

_SPARE_OUTPUT_BYTES = 2**16
_NUMPY = re.compile(r"\bnumpy\b|\bnp\.")
_SHOWN = 80
"""Characters of what was expected or given."""


@unlimited_int_digits()
def judge_program(text: str, truth: str, settings: RewardSection, template: Template, extra: str = "") -> Verdict:
    """1.0 if the response's program passes all tests; ``extra`` are the row's other columns as JSON.

    Raises:
        SandboxError: this machine has no sandbox (any more).
    """
    try:
        tests = read_tests(truth, extra)
    except ValueError as error:
        return Verdict(0.0, Failure.UNREADABLE, f"tests {truth[:80]!r}: {error}")
    code = extract_program(text)
    find_verdict = _check_assertions if tests.texts else _compare_outputs
    verdict = find_verdict(code, tests, settings, template)
    first, *others = code.strip().split("\n")
    return replace(verdict, read=first[:_SHOWN] + (f" (and {format_count(len(others), 'line')})" if others else ""))


def _compare_outputs(code: str, tests: Tests, settings: RewardSection, template: Template) -> Verdict:
    used = 0.0
    with Sandbox(template, has_numpy=_NUMPY.search(code) is not None) as sandbox:
        for number, (given, wanted) in enumerate(tests.pairs, 1):
            expected = json.dumps(wanted) if tests.function else wanted
            # CPU time is counted over all tests; UTF-8 takes four bytes a character at most
            seconds_left = max(0.0, settings.cpu_seconds - used)
            limits = ProgramLimits(seconds_left, MEMORY_BYTES, 8 * len(expected) + _SPARE_OUTPUT_BYTES)
            if tests.function:
                outcome = sandbox.call(code, tests.function, given, limits)
                is_right = same_result(outcome.output, wanted)
            else:
                outcome = sandbox.run(code, given, limits)
                is_right = same_output(outcome.output, wanted)
            used += outcome.cpu_seconds
            if verdict := _limit_verdict(outcome, used, settings):
                return verdict
            if not is_right or outcome.status != 0:
                shown = json.dumps(wanted[0]) if tests.function else wanted.strip()
                return Verdict(0.0, detail=f"test {number}: {_describe_outcome(outcome)}, expected {shown[:_SHOWN]!r}")
    return Verdict(1.0)


def _check_assertions(code: str, tests: Tests, settings: RewardSection, template: Template) -> Verdict:
    limits = ProgramLimits(settings.cpu_seconds, MEMORY_BYTES, _SPARE_OUTPUT_BYTES)
    program, checked = run_python_tests(
        template, code, tests.texts, limits, tests.entry, any(map(_NUMPY.search, (code, *tests.texts)))
    )
    for outcome in (program, checked):
        if verdict := _limit_verdict(outcome, outcome.cpu_seconds, settings):
            return verdict
    report: dict[str, Any] = json.loads(checked.output) if checked.output else {"trouble": _describe_outcome(checked)}
    trouble = report["trouble"].replace("\n", " ")  # errors of numpy have several lines
    if program.status != 0 or report.get("is_silent"):
        is_over = any(error in trouble for error in ("BrokenPipeError: ", "ConnectionResetError: "))
        why = "before a test called it, as by an error of syntax or import" if is_over else trouble
        return Verdict(0.0, detail=f"the program {_describe_outcome(program)}: {why}"[: 3 * _SHOWN])
    if trouble and not report.get("is_unreadable"):
        return Verdict(0.0, detail=f"test {report.get('held', 0) + 1}: {trouble}")
    trouble = trouble or ("" if report["held"] else "no assertion was executed")
    if trouble or not report["answers"]:
        return Verdict(0.0, Failure.UNREADABLE, f"tests {tests.texts[0][:80]!r}: {trouble or 'nothing was called'}")
    return Verdict(1.0)


def _describe_outcome(outcome: Outcome) -> str:
    """What a program did."""
    return f"ended with status {outcome.status}" if outcome.status else f"gave {outcome.output.strip()[:_SHOWN]!r}"


def _limit_verdict(outcome: Outcome, used: float, settings: RewardSection) -> Verdict | None:
    """The verdict of a program that met a limit or was killed; None for others."""
    if outcome.failure == "cpu" or used > settings.cpu_seconds:
        return Verdict(0.0, Failure.CPU, f"more than {settings.cpu_seconds} s of CPU time")
    if outcome.failure:
        return Verdict(0.0, Failure(outcome.failure))
    if outcome.is_out_of_memory:
        return Verdict(0.0, Failure.MEMORY)
    if outcome.status < 0:
        return Verdict(0.0, Failure.CRASH, f"the program was killed by signal {-outcome.status}")
    return None
