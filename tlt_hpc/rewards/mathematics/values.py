"""Values of scalar expressions by mpmath, constant ones and those with variables at points.

No value is rounded to a fixed number of decimals: two are compared relative to their size, at 300 digits if they are
constant.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import mpmath
from mpmath import mp, mpc, mpf

from tlt_hpc.rewards.mathematics.exact import Decimal, exact_value
from tlt_hpc.rewards.mathematics.node import Node

_MAX_EXPONENT = 10**9
"""Bits of the largest number that is computed at all."""
CONSTANT_DIGITS, _POINT_DIGITS = 300, 60
_POINTS, _NEEDED_POINTS = 16, 4


class NoValueError(ArithmeticError):
    """The expression has no value that can be computed."""


def symbols_of(node: Node) -> frozenset[str]:
    """The names of the variables in an expression."""
    own = {node.name} if node.kind == "symbol" and node.name not in _CONSTANTS else set[str]()
    return frozenset(own).union(*map(symbols_of, node.parts))


_CONSTANTS = frozenset({"pi", "e", "i", "oo"})


def is_rounded(decimal: Decimal, exact: Any) -> bool:
    """True if a decimal is an exact real value rounded to its last digit."""
    with mp.workdps(CONSTANT_DIGITS + 20):
        number, unit = (mpf(part.numerator) / part.denominator for part in (decimal.value, decimal.unit))
        return bool(abs(exact - number) <= unit / 2)


def constant_value(node: Node) -> Any:
    """The value of an expression without variables, to ``CONSTANT_DIGITS`` digits.

    Raises:
        NoValueError: it has none.
    """
    with mp.workdps(CONSTANT_DIGITS + 20):
        return _Evaluation({}).value(node)


def value_at(node: Node, point: Mapping[str, Any]) -> Any:
    """The value of an expression at a point, with the precision that is set.

    Raises:
        NoValueError: it has none.
    """
    return _Evaluation(point).value(node)


def same_constant(first: Node, second: Node) -> bool:
    """True if two expressions without variables have equal values, relative to their size."""
    with mp.workdps(CONSTANT_DIGITS + 20):
        if 0 in (exact_value(first), exact_value(second)):
            return _vanishes(second if exact_value(first) == 0 else first)
        return _same(first, second, {}, CONSTANT_DIGITS)


def _vanishes(node: Node) -> bool:
    """Whether a value is smaller by as many digits as it is computed with; a small one stays as it is."""
    try:
        rough, _ = _evaluated_constant(node, mp.dps)
        with mp.workdps(2 * mp.dps):
            fine, _ = _evaluated_constant(node, mp.dps)
    except NoValueError:
        return False
    return bool(fine == 0 or (abs(rough) > 0 and abs(fine) < abs(rough) * mpf(10) ** (-CONSTANT_DIGITS // 2)))


def same_at_points(first: Node, second: Node, names: frozenset[str]) -> bool:
    """True if two expressions have equal values wherever both are real, at points that their names determine.

    If there are too few such points, their complex values are compared.
    """
    num_real = num_complex = 0
    with mp.workdps(_POINT_DIGITS + 10):
        for point in points_for(names):
            try:
                values = [_Evaluation(point).value(node) for node in (first, second)]
            except NoValueError:
                continue
            is_real = all(mpmath.im(value) == 0 for value in values)
            if not _same(first, second, point, _POINT_DIGITS - 10):
                if is_real:
                    return False
                num_complex -= _POINTS
            num_real += is_real
            num_complex += 1
    return num_real >= _NEEDED_POINTS or (num_real == 0 and num_complex >= _NEEDED_POINTS)


def points_for(names: frozenset[str], salt: str = "") -> Iterator[Mapping[str, Any]]:
    """Random points, the same for the same names: rational numbers of both signs, then whole ones, for factorials."""
    for number in range(_POINTS):
        point = dict[str, Any]()
        for name in sorted(names):
            draw = random.Random(f"{salt}{number} {name}")
            if number % 4 == 3:
                point[name] = mpf(draw.randint(1, 12))
            else:
                value = mpf(draw.randint(2 * 10**11, 3 * 10**12)) / 10**12
                point[name] = value if number % 2 == 0 else -value
        yield point


def _same(first: Node, second: Node, point: Mapping[str, Any], digits: int) -> bool:
    try:
        (given, lost), (wanted, other_lost) = (_evaluated(node, point) for node in (first, second))
    except NoValueError:
        return False
    if mpmath.isinf(given) or mpmath.isinf(wanted):
        return bool(given == wanted)
    size = max(abs(given), abs(wanted))
    # a sum whose terms cancel has an error relative to them, not to its value
    slack = max(lost, other_lost) * mpf(10) ** -mp.dps
    return bool(abs(given - wanted) <= size * mpf(10) ** -digits + slack * 1000)


def _evaluated(node: Node, point: Mapping[str, Any]) -> tuple[Any, Any]:
    """The value at a point, and the largest term of a sum in it that lost half of the digits or more."""
    if not point:
        return _evaluated_constant(node, mp.dps)
    evaluation = _Evaluation(point)
    return evaluation.value(node), evaluation.cancelled


@lru_cache(maxsize=1024)
def _evaluated_constant(node: Node, digits: int) -> tuple[Any, Any]:
    """As ``_evaluated``; elements of sets are compared with each other."""
    evaluation = _Evaluation({})
    return evaluation.value(node), evaluation.cancelled


class _Evaluation:
    """The value of a tree at a point."""

    def __init__(self, point: Mapping[str, Any]) -> None:
        self._point = point
        self.cancelled = mpf(0)
        """Largest term of a sum that lost half of the digits or more."""

    def value(self, node: Node) -> Any:
        """An mpf or mpc.

        Raises:
            NoValueError: a part is no number, or none that can be computed.
        """
        if (exact := exact_value(node)) is not None:
            return mpf(exact.numerator) / exact.denominator
        if node.kind == "symbol":
            return self._symbol(node.name)
        rule = _RULES.get(node.kind)
        if rule is None:
            raise NoValueError(node.kind)
        parts = [self.value(part) for part in node.parts]
        try:
            result = rule(node, *parts)
        except (ArithmeticError, ValueError, TypeError) as error:
            raise NoValueError(str(error)) from None
        if mpmath.isnan(result):
            raise NoValueError("not a number")
        if node.kind == "+":
            largest = max(map(abs, parts))
            if abs(result) < largest * mpf(10) ** (-mp.dps // 2):
                self.cancelled = max(self.cancelled, largest)
        return mpmath.re(result) if isinstance(result, mpc) and result.imag == 0 else result

    def _symbol(self, name: str) -> Any:
        constant = {"pi": +mp.pi, "e": +mp.e, "i": mpc(0, 1), "oo": mp.inf}.get(name)
        if constant is None:
            constant = self._point.get(name)
        if constant is None:
            raise NoValueError(name)
        return constant


def _raise(node: Node, base: Any, exponent: Any) -> Any:
    if base == 0 and mpmath.re(exponent) < 0:
        raise NoValueError("a division by zero")
    if mpmath.isfinite(base) and base != 0 and abs(exponent) * (abs(mpmath.log(abs(base), 2)) + 1) > _MAX_EXPONENT:
        raise NoValueError("too large")
    root = exact_value(node.parts[1])
    if root is not None and root.denominator % 2 and mpmath.im(base) == 0 and base < 0:  # the real one of odd roots
        return (-1) ** (root.numerator % 2) * mp.power(-base, exponent)
    return mp.power(base, exponent)


def _root(node: Node, value: Any, degree: Any = 2) -> Any:
    if mpmath.im(value) == 0 and value < 0 and degree % 2 == 1:
        return -mp.root(-value, int(degree))
    return mp.power(value, 1 / mpf(degree))


def _angle(node: Node, value: Any) -> Any:
    """An argument of a trigonometric function in radians."""
    return value * mp.pi / 180 if node.parts[0].kind == "degree" else value


def _log(node: Node, value: Any, base: Any = None) -> Any:
    if value == 0:
        raise NoValueError("a logarithm of zero")
    return mp.log(value) if base is None else mp.log(value) / mp.log(base)


def _small(value: Any) -> Any:
    if abs(value) > 10**6:
        raise NoValueError("too large")
    return value


def _divided(node: Node, above: Any, below: Any) -> Any:
    if below == 0:
        raise NoValueError("a division by zero")
    return above / below


def _rules() -> dict[str, Callable[..., Any]]:
    of_angles = {name: getattr(mp, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc")}
    of_numbers = {
        "arcsin": mp.asin, "arccos": mp.acos, "arctan": mp.atan, "arccot": mp.acot, "sinh": mp.sinh, "cosh": mp.cosh,
        "tanh": mp.tanh, "coth": mp.coth,
    }  # fmt: skip
    return {
        **{name: lambda node, x, f=f: f(_small(_angle(node, x))) for name, f in of_angles.items()},
        **{name: lambda node, x, f=f: f(_small(x)) for name, f in of_numbers.items()},
        "+": lambda node, a, b: a + b, "*": lambda node, a, b: a * b, "/": _divided, "neg": lambda node, a: -a,
        "^": _raise, "sqrt": _root, "ln": _log, "log": _log, "lg": lambda node, x: _log(node, x, mpf(10)),
        "exp": lambda node, x: _raise(Node("^", node.parts * 2), +mp.e, x), "abs": lambda node, x: abs(x),
        "!": lambda node, x: mp.factorial(_small(x)), "binom": lambda node, n, k: mp.binomial(_small(n), _small(k)),
        "floor": lambda node, x: mp.floor(x), "ceil": lambda node, x: mp.ceil(x), "max": lambda node, *x: max(x),
        "min": lambda node, *x: min(x), "degree": lambda node, x: x, "unit": lambda node, x: x,
    }  # fmt: skip


_RULES = _rules()
