"""The second way: latex2sympy2_extended reads two expressions, and sympy computes them at points of its own."""

from __future__ import annotations

import random
import re
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

from tlt_hpc.rewards.mathematics.node import Node

_CONVERSION = ConversionConfig(lowercase_symbols=False)
_POINTS, _DIGITS = 5, 40
_DECIMAL = re.compile(r"(\d*)\.(\d+)")
_BEFORE_BINOMIAL = re.compile(r"(?<=[\d})!])\s*(?=\\binom)")
"""Where the other reader takes a product for a mixed number."""
_BARE_ARGUMENT = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc|ln|log)\s*(?:\^\s*(?:\d|\{[^{}]*\}))?)\s*(\d*\s*(?:[A-Za-z]|\\[a-z]+))(?=\s*\\(?:cdot|times))"
)
"""A function of one letter before a sign of multiplication, which does not belong to its argument."""


def is_confirmed_by_sympy(given: Node, wanted: Node) -> bool:
    """True if another reader and sympy find two expressions equal too."""
    if given.source == wanted.source:
        return True
    first, second = _parse_with_sympy(given.source), _parse_with_sympy(wanted.source)
    if first is None or second is None:
        return False
    names = sorted(map(str, first.free_symbols | second.free_symbols))
    num_compared = 0
    for number in range(_POINTS if names else 1):
        draw = random.Random(f"second {number}")
        # below 1.5, so that no tower of powers is too large to be computed
        point = {
            name: sympy.Float(f"0.{draw.randint(5, 9)}{draw.getrandbits(64)}", 60) + draw.randint(0, 5) / 10
            for name in names
        }
        if "i" in point:
            point["i"] = sympy.I
        values = [_evaluate_numerically(each, point) for each in (first, second)]
        if any(value is None for value in values):
            continue
        num_compared += 1
        size = max(map(abs, values))
        if abs(values[0] - values[1]) > size * sympy.Float(10) ** (10 - _DIGITS):
            return False
    return num_compared > 0


def _evaluate_numerically(expression: sympy.Expr, point: dict[str, sympy.Expr]) -> Any:
    """The value at a point; None if it is not finite."""
    found = expression.subs({symbol: point[str(symbol)] for symbol in expression.free_symbols})
    found = found.doit().replace(_is_odd_root, lambda root: sympy.Integer(-1) ** root.exp.p)
    value = sympy.N(found, _DIGITS)
    return value if value.is_number and value.is_finite else None


def _is_odd_root(expression: sympy.Basic) -> bool:
    """True for a root of -1 that has a real value, which sympy does not take."""
    is_power = (
        isinstance(expression, sympy.Pow) and expression.base == -1 and isinstance(expression.exp, sympy.Rational)
    )
    return is_power and expression.exp.q % 2 == 1 and expression.exp.q > 1


def _parse_with_sympy(source: str) -> sympy.Expr | None:
    """An expression of sympy's by latex2sympy2_extended; None if it cannot read the text."""
    source = re.sub(r"(\d+(?:\.\d+)?)\s*\\degree", r"{(\\frac{\1\\cdot\\pi}{180})}", source)
    source = source.replace("\\lg", "\\log_{10}").replace("%", "\\%")
    source = _DECIMAL.sub(lambda each: f"(\\frac{{{int(each[1] + each[2])}}}{{{10 ** len(each[2])}}})", source)
    source = re.sub(r"\^\s*(-\s*(?:\d+|[A-Za-z]))", r"^{\1}", source)
    source = _BEFORE_BINOMIAL.sub(r"\\cdot ", source)
    source = _BARE_ARGUMENT.sub(r"\1(\2)", source)
    try:
        found = latex2sympy(source, conversion_config=_CONVERSION)
    except Exception:  # noqa: BLE001  it raises Exception itself
        return None
    return found if isinstance(found, sympy.Expr) else None
