"""The comparison of answers as mathematics, by math-verify."""

from __future__ import annotations

import logging

from math_verify import parse, verify

from tlt_hpc.rewards.answer import Failure, Verdict
from tlt_hpc.rewards.text import BOX

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits, seconds of the clock, are off

_USUAL = (
    ("so $\\boxed{\\frac{2}{4}}$", "\\frac{1}{2}"),
    ("\\boxed{(x+1)^2}", "x^2+2x+1"),
    ("$(-\\infty,1)\\cup(2,3]$", "(-\\infty,1)\\cup(2,3]"),
    ("\\boxed{\\{1, 2\\}}", "\\{1,2\\}"),
    ("\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("$\\sin(x) + \\frac{\\ln 3}{\\ln 2}$", "\\sin x + \\log_2 3"),
    ("1234", "1,234"),
    ("\\boxed{\\text{A}}", "\\text{A}"),
    ("so 3 or $x^2+\\sqrt{2}$", "x^2+1.41"),
)
"""Answers of usual forms. What parsing one has left in caches makes the next like it three times as fast."""


def equal_as_mathematics(text: str, truth: str) -> Verdict:
    """1.0 if the response's answer is mathematically equal to the data's."""
    # Bare LaTeX is read as plain text, and "11\\sqrt2" then means 11.
    has_marks = "$" in truth.replace("\\$", "") or BOX in truth  # an escaped one is an amount of money
    marked = truth if has_marks else f"{BOX}{truth}}}"
    wanted = parse(marked, parsing_timeout=None)
    if not wanted:
        return Verdict(0.0, Failure.UNREADABLE, f"answer {truth[:80]!r} cannot be read as mathematics")
    return Verdict(float(verify(wanted, parse(text, parsing_timeout=None), timeout_seconds=None)))


def same_answer(text: str, other: str) -> Verdict:
    """1.0 if two responses give equal answers; unreadable if the first gives no answer."""
    given = parse(text, parsing_timeout=None)
    if not given:
        return Verdict(0.0, Failure.UNREADABLE, "no answer")
    return Verdict(float(verify(parse(other, parsing_timeout=None), given, timeout_seconds=None)))


def warm_up() -> None:
    """Have everything imported, compiled and cached that answers would have to wait for, in every fork again."""
    for text, truth in _USUAL:
        equal_as_mathematics(text, truth)
