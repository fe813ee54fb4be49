"""Pairs of answers whose verdict is known by construction: values, the forms that they are written in, and responses.

A value is drawn first, as numbers; what is written is made from them by the forms of ``math_pairs.toml``, so no reader
of mathematics decides what is expected. Unequal pairs differ in the drawn value by a step that the forms show.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from jinja2 import Environment

Draw = random.Random
_KINDS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("math_pairs.toml").read_text("utf-8"))
_RESPONSES = (
    "\\boxed{ANSWER}",
    "So the answer is $\\boxed{ANSWER}$.",
    "\\[ \\boxed {ANSWER} \\]",
    "Therefore \\fbox{ANSWER}",
    "I first got \\boxed{OTHER}, but it is \\boxed{ANSWER}",
    "Put it in \\boxed{}. Then \\boxed{ANSWER} is final.",
    "x = \\boxed{OTHER}, so the sum is \\boxed{ANSWER}.",
    "<think>maybe \\boxed{OTHER}</think> \\boxed{ANSWER}",
    "<think>it is OTHER</think><answer>ANSWER</answer>",
    "Step 1: 3 + 4 = 7.\n\n**Answer:** \\boxed{ ANSWER }\n",
    "\\boxed{\\boxed{ANSWER}}",
    "${\\boxed{ANSWER}}$ I hope it is correct, OTHER times.",
)


@dataclass(frozen=True)
class Pair:
    """A response with the data's answer and whether it is right."""

    kind: str
    response: str
    truth: str
    is_right: bool


def pairs(seed: int, count: int) -> Iterator[Pair]:
    """Pairs of all kinds in turn, each kind with as many right as wrong ones."""
    for number in range(count):
        kind, is_right = list(_KINDS)[number % len(_KINDS)], number // len(_KINDS) % 2 == 0
        draw = random.Random(f"{seed} {number}")
        answer, truth = _pair(_KINDS[kind], draw, is_right)
        response = "so \\boxed{ANSWER}." if kind == "boxes" else draw.choice(_RESPONSES)
        response = response.replace("OTHER", str(draw.randint(10**6, 10**7))).replace("ANSWER", answer)
        yield Pair(kind, response, truth, is_right)


def _pair(kind: dict[str, Any], draw: Draw, is_right: bool) -> tuple[str, str]:
    values = {name: _drawn(draw, given) for name, given in kind["draw"].items()}
    changed = dict(values)
    if not is_right and "wrong" in kind:
        name, _, expression = draw.choice(kind["wrong"]).partition(" = ")
        changed[name] = _JINJA.compile_expression(expression)(**values)
    if not is_right and "unequal" in kind:
        forms = draw.choice(kind["unequal"])
    elif "pairs" in kind:
        forms = draw.choice(kind["pairs"])
    else:
        forms = [draw.choice(kind["answers"]), draw.choice(kind["truths"])]
    written = [_JINJA.from_string(form).render(numbers) for form, numbers in zip(forms, (changed, values), strict=True)]
    if kind.get("either_way") and draw.random() < 0.5:
        written.reverse()
    return written[0], written[1]


def _drawn(draw: Draw, given: Any) -> Any:
    one = draw.choice(given) if isinstance(given, list) else given
    if isinstance(one, str) and ".." in one:
        low, _, high = one.partition("..")
        return draw.randint(int(low), int(high))
    return one


# --- what forms can call ---


def _decimal(above: int, below: int) -> str:
    """A fraction that is a decimal one, with all its digits."""
    value, places = Fraction(above, below), 0
    while (value * 10**places).denominator != 1:
        places += 1
    return _with_point(int(value * 10**places), places)


def _with_point(number: int, places: int) -> str:
    digits, sign = str(abs(number)).rjust(places + 1, "0"), "-" if number < 0 else ""
    return f"{sign}{digits[:-places]}.{digits[-places:]}" if places else f"{sign}{digits}"


def _rounded(above: int, below: int, places: int, by: int) -> str:
    return _with_point(round(Fraction(above, below) * 10**places) + by, places)


def _shifted(number: int, exponent: int) -> str:
    """The number times a power of ten, without an exponent."""
    return str(number * 10**exponent) if exponent >= 0 else _decimal(number, 10**-exponent)


def _repeating(above: int, below: int, command: str) -> str:
    whole, rest = divmod(above, below)
    digits, seen = "", dict[int, int]()
    while rest not in seen:
        seen[rest] = len(digits)
        digit, rest = divmod(rest * 10, below)
        digits += str(digit)
    return f"{whole}.{digits[: seen[rest]]}{command}{{{digits[seen[rest] :]}}}"


_LONG = {"cm": "centimeters", "m": "meters", "km": "kilometers", "ft": "feet", "kg": "kilograms", "g": "grams"}
_JINJA = Environment(variable_start_string="«", variable_end_string="»", comment_start_string="«#")
_JINJA.globals.update(
    decimal=_decimal,
    bare=lambda decimal: decimal.removeprefix("0"),
    rounded=_rounded,
    shifted=_shifted,
    repeating=_repeating,
    long=lambda unit: _LONG.get(unit, unit),
    marked=lambda number, mark: f"{number:,}".replace(",", mark),
    wide=lambda number: str(number).translate({ord(digit): ord(digit) + 0xFEE0 for digit in "0123456789"}),
)
