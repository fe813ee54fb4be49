"""Owns the comparison of answers as mathematics, by math-verify. Knows no limits: whoever calls it can be killed."""

from __future__ import annotations

import logging

from math_verify import parse, verify

from tlt_hpc.rewards.answer import Failure, Verdict
from tlt_hpc.rewards.text import BOX

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits, seconds of the clock, are off


def equal_as_mathematics(text: str, truth: str) -> Verdict:
    """1.0 where the response's answer means what the data's does."""
    # Bare LaTeX is read as plain text, and "11\\sqrt2" then means 11.
    marked = truth if "$" in truth or BOX in truth else f"{BOX}{truth}}}"
    wanted = parse(marked, parsing_timeout=None)
    if not wanted:
        return Verdict.failed(Failure.UNREADABLE, f"answer {truth[:80]!r} cannot be read as mathematics")
    return Verdict(float(verify(wanted, parse(text, parsing_timeout=None), timeout_seconds=None)))


def warm_up() -> None:
    """Have everything imported and compiled that the first answer would have to wait for."""
    equal_as_mathematics("so $\\boxed{\\frac{2}{4}}$", "\\frac{1}{2}")
    equal_as_mathematics("so $x^2+\\sqrt{2}$ or 3", "x^2+1.41")
