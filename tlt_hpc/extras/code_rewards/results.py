"""Compares what a program wrote or returned with what the data has."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Any

_TOLERANCE = Fraction(1, 10**6)
"""Tolerance of numbers with a decimal point, relative above 1."""
_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,399})(?:\.\d{0,400})?(?:[eE][-+]\d{1,3})?")
"""With a superfluous zero or sign, or an exponent without a sign, it is a text: 0011, +1, 12e3."""

_LARGEST = 1e300
"""From here on numbers are the same only if they are equal: their difference may be none."""


def same_output(given: str, expected: str) -> bool:
    """True if a program wrote what is expected: line by line, without the space at their ends, numbers by value."""
    lines, wanted = given.strip().split("\n"), expected.strip().split("\n")
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def same_result(output: str, wanted: list[Any]) -> bool:
    """True if a function's result, as JSON, is one of the values that the data's text or value may stand for."""
    try:
        given = json.loads(output)
    except (ValueError, RecursionError):
        return False
    return any(_equal(given, each) for each in wanted)


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
    tolerance = _TOLERANCE * max(Fraction(1), abs(target)) if not wanted.lstrip("-").isdigit() else 0
    return abs(value - target) <= tolerance


def _equal(given: Any, wanted: Any) -> bool:
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(_equal, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(_equal(given[key], wanted[key]) for key in wanted)
    if isinstance(wanted, float) and isinstance(given, int | float):
        tolerance = float(_TOLERANCE) * max(1.0, abs(wanted))
        return given == wanted or (abs(given) < _LARGEST > abs(wanted) and abs(given - wanted) <= tolerance)
    return bool(given == wanted)
