"""Exact rational values of expressions, and decimals with the digits they show."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import comb, factorial, gcd, isqrt, lcm
from typing import Any

from tlt_hpc.rewards.mathematics.node import Node

_MAX_BITS = 20_000
"""Bits of an exact number; a larger one is computed as a floating-point number with an exponent of any size."""
_MAX_FACTORIAL = 1000
_MAX_ROOT_BITS = 4000
"""Bits of a number whose exact root is looked for."""


@dataclass(frozen=True)
class Decimal:
    """A number that is written with a decimal point: its value, the unit of its last digit, its significant digits."""

    value: Fraction
    unit: Fraction
    digits: int

    def times_power_of_ten(self, factor: Fraction) -> Decimal:
        """The same digits times a power of ten."""
        return Decimal(self.value * factor, abs(self.unit * factor), self.digits)


def exact_value(node: Node) -> Fraction | None:
    """The value of an expression of rational numbers; None if it has others, or is too large to be exact."""
    if node.kind == "number":
        return node.value
    rule = _EXACT.get(node.kind)
    if rule is None:
        return None
    known = list[Fraction]()
    for part in node.parts:
        value = exact_value(part)
        if value is None or _bits(value) > _MAX_BITS:
            return None
        known.append(value)
    try:
        found: Fraction | None = rule(*known)
        return found
    except (ZeroDivisionError, ValueError):
        return None


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        return (
            _exact_root(base**exponent.numerator, exponent.denominator)
            if _power_fits(base, exponent.numerator)
            else None
        )
    return base**exponent.numerator if _power_fits(base, exponent.numerator) else None


def _power_fits(base: Fraction, exponent: int) -> bool:
    return _bits(base) * abs(exponent) <= _MAX_BITS


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    """The root, where it is rational."""
    if value < 0 or degree > 64:
        return None
    roots = [_exact_integer_root(part, degree) for part in (value.numerator, value.denominator)]
    return None if None in roots else Fraction(*roots)  # type: ignore[arg-type]


def _exact_integer_root(number: int, degree: int) -> int | None:
    if number.bit_length() > _MAX_ROOT_BITS:
        return None
    if degree == 2:
        root = isqrt(number)
        return root if root * root == number else None
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if middle**degree < number else (low, middle)
    return low if low**degree == number else None


def _require_integer(value: Fraction) -> int:
    if value.denominator != 1:
        raise ValueError(value)
    return value.numerator


def _factorial(value: Fraction) -> Fraction | None:
    return Fraction(factorial(_require_integer(value))) if 0 <= value <= _MAX_FACTORIAL else None


def _binomial(above: Fraction, below: Fraction) -> Fraction | None:
    return (
        Fraction(comb(_require_integer(above), _require_integer(below)))
        if 0 <= below <= _MAX_FACTORIAL >= above >= 0
        else None
    )


def _sqrt(value: Fraction, degree: Fraction = Fraction(2)) -> Fraction | None:
    return _exact_root(value, _require_integer(degree)) if degree >= 1 else None


_EXACT: dict[str, Any] = {
    "+": lambda a, b: a + b, "*": lambda a, b: a * b, "/": lambda a, b: a / b, "neg": lambda a: -a, "^": _power,
    "!": _factorial, "binom": _binomial, "sqrt": _sqrt, "abs": abs, "floor": lambda a: Fraction(a // 1),
    "ceil": lambda a: Fraction(-(-a // 1)), "max": lambda *a: max(a), "min": lambda *a: min(a),
    "gcd": lambda *a: Fraction(gcd(*map(_require_integer, a))),
    "lcm": lambda *a: Fraction(lcm(*map(_require_integer, a))), "degree": lambda a: a, "unit": lambda a: a,
}  # fmt: skip


def to_decimal(node: Node) -> Decimal | None:
    """A number with a decimal point, also with a sign or times a power of ten; None if it is written otherwise."""
    match node.kind, node.parts:
        case "number", _:
            if "." not in node.source:
                return None
            places = len(node.source.partition(".")[2])
            return Decimal(node.value, Fraction(1, 10**places), len(node.source.replace(".", "").lstrip("0")))
        case "neg", (part,):
            found = to_decimal(part)
            return found.times_power_of_ten(Fraction(-1)) if found else None
        case "percent" | "degree" | "unit", (part,):
            return to_decimal(part)
        case "*", (left, right) if right.kind == "^" and exact_value(right.parts[0]) == 10:
            found, power = to_decimal(left), exact_value(right)
            return found.times_power_of_ten(power) if found and power is not None else None
    return None
