"""Values of scalar expressions by mpmath, constant ones and those with variables at points; sets of real numbers.

No value is rounded to a fixed number of decimals: two are compared relative to their size, at 300 digits if they are
constant.
"""

from __future__ import annotations

import itertools
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


def symbol_names(node: Node) -> frozenset[str]:
    """The names of the variables in an expression."""
    own = {node.name} if node.kind == "symbol" and node.name not in _CONSTANTS else set[str]()
    return frozenset(own).union(*map(symbol_names, node.parts))


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
        return _Evaluation({}).evaluate(node)


def value_at(node: Node, point: Mapping[str, Any]) -> Any:
    """The value of an expression at a point, with the precision that is set.

    Raises:
        NoValueError: it has none.
    """
    return _Evaluation(point).evaluate(node)


def same_constant(first: Node, second: Node) -> bool:
    """True if two expressions without variables have equal values, relative to their size."""
    with mp.workdps(CONSTANT_DIGITS + 20):
        if 0 in (exact_value(first), exact_value(second)):
            return _is_numerically_zero(second if exact_value(first) == 0 else first)
        return _are_equal_at_point(first, second, {}, CONSTANT_DIGITS)


def _is_numerically_zero(node: Node) -> bool:
    """True if a value is smaller by as many digits as it is computed with; a small one stays as it is."""
    try:
        rough, _ = _evaluate_constant_with_cancellation(node, mp.dps)
        with mp.workdps(2 * mp.dps):
            fine, _ = _evaluate_constant_with_cancellation(node, mp.dps)
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
                values = [_Evaluation(point).evaluate(node) for node in (first, second)]
            except NoValueError:
                continue
            is_real = all(mpmath.im(value) == 0 for value in values)
            if not _are_equal_at_point(first, second, point, _POINT_DIGITS - 10):
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


def _are_equal_at_point(first: Node, second: Node, point: Mapping[str, Any], digits: int) -> bool:
    try:
        (given, lost), (wanted, other_lost) = (_evaluate_with_cancellation(node, point) for node in (first, second))
    except NoValueError:
        return False
    if mpmath.isinf(given) or mpmath.isinf(wanted):
        return bool(given == wanted)
    size = max(abs(given), abs(wanted))
    # a sum whose terms cancel has an error relative to them, not to its value
    slack = max(lost, other_lost) * mpf(10) ** -mp.dps
    return bool(abs(given - wanted) <= size * mpf(10) ** -digits + slack * 1000)


def _evaluate_with_cancellation(node: Node, point: Mapping[str, Any]) -> tuple[Any, Any]:
    """The value at a point, and the largest term of a sum in it that lost half of the digits or more."""
    if not point:
        return _evaluate_constant_with_cancellation(node, mp.dps)
    evaluation = _Evaluation(point)
    return evaluation.evaluate(node), evaluation.cancelled


@lru_cache(maxsize=1024)
def _evaluate_constant_with_cancellation(node: Node, digits: int) -> tuple[Any, Any]:
    """As ``_evaluate_with_cancellation``; elements of sets are compared with each other."""
    evaluation = _Evaluation({})
    return evaluation.evaluate(node), evaluation.cancelled


class _Evaluation:
    """The value of a tree at a point."""

    def __init__(self, point: Mapping[str, Any]) -> None:
        self._point = point
        self.cancelled = mpf(0)
        """Largest term of a sum that lost half of the digits or more."""

    def evaluate(self, node: Node) -> Any:
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
        parts = [self.evaluate(part) for part in node.parts]
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


def _raise_to_power(node: Node, base: Any, exponent: Any) -> Any:
    if base == 0 and mpmath.re(exponent) < 0:
        raise NoValueError("a division by zero")
    if mpmath.isfinite(base) and base != 0 and abs(exponent) * (abs(mpmath.log(abs(base), 2)) + 1) > _MAX_EXPONENT:
        raise NoValueError("too large")
    root = exact_value(node.parts[1])
    if root is not None and root.denominator % 2 and mpmath.im(base) == 0 and base < 0:  # the real one of odd roots
        return (-1) ** (root.numerator % 2) * mp.power(-base, exponent)
    return mp.power(base, exponent)


def _real_or_complex_root(node: Node, value: Any, degree: Any = 2) -> Any:
    if mpmath.im(value) == 0 and value < 0 and degree % 2 == 1:
        return -mp.root(-value, int(degree))
    return mp.power(value, 1 / mpf(degree))


def _in_radians(node: Node, value: Any) -> Any:
    """An argument of a trigonometric function in radians."""
    return value * mp.pi / 180 if node.parts[0].kind == "degree" else value


def _log(node: Node, value: Any, base: Any = None) -> Any:
    if value == 0:
        raise NoValueError("a logarithm of zero")
    return mp.log(value) if base is None else mp.log(value) / mp.log(base)


def _refuse_large_value(value: Any) -> Any:
    if abs(value) > 10**6:
        raise NoValueError("too large")
    return value


def _divided(node: Node, above: Any, below: Any) -> Any:
    if below == 0:
        raise NoValueError("a division by zero")
    return above / below


def _evaluation_rules() -> dict[str, Callable[..., Any]]:
    of_angles = {name: getattr(mp, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc")}
    of_numbers = {
        "arcsin": mp.asin, "arccos": mp.acos, "arctan": mp.atan, "arccot": mp.acot, "sinh": mp.sinh, "cosh": mp.cosh,
        "tanh": mp.tanh, "coth": mp.coth,
    }  # fmt: skip
    return {
        **{name: lambda node, x, f=f: f(_refuse_large_value(_in_radians(node, x))) for name, f in of_angles.items()},
        **{name: lambda node, x, f=f: f(_refuse_large_value(x)) for name, f in of_numbers.items()},
        "+": lambda node, a, b: a + b, "*": lambda node, a, b: a * b, "/": _divided, "neg": lambda node, a: -a,
        "^": _raise_to_power, "sqrt": _real_or_complex_root, "ln": _log, "log": _log,
        "lg": lambda node, x: _log(node, x, mpf(10)), "!": lambda node, x: mp.factorial(_refuse_large_value(x)),
        "binom": lambda node, n, k: mp.binomial(_refuse_large_value(n), _refuse_large_value(k)),
        "exp": lambda node, x: _raise_to_power(Node("^", node.parts * 2), +mp.e, x), "abs": lambda node, x: abs(x),
        "floor": lambda node, x: mp.floor(x), "ceil": lambda node, x: mp.ceil(x), "max": lambda node, *x: max(x),
        "min": lambda node, *x: min(x), "degree": lambda node, x: x, "unit": lambda node, x: x,
    }  # fmt: skip


_RULES = _evaluation_rules()


_DIGITS = 100
_COMBINED = frozenset({"cup", "cap", "setminus", "or", "and"})
_MAX_ENDS = 200


def is_set_of_reals(node: Node) -> bool:
    """True if its notation gives a set by its limits or by a condition."""
    if node.kind in _COMBINED or node.kind == "builder" or (node.kind == "symbol" and node.name == "set R"):
        return True
    if node.kind == "relation":
        return node.name != "=" and "~" not in node.name
    is_interval = node.kind == "group" and len(node.parts) == 2 and node.name in ("()", "[]", "(]", "[)")
    return is_interval and (node.name in ("(]", "[)") or any(_is_infinite(part) for part in node.parts))


def same_sets(first: Node, second: Node) -> bool:
    """True if two sets of real numbers are equal; one of them may be a list of numbers or an interval.

    Raises:
        NoValueError: one is no set of reals with constant limits.
    """
    names = [_number_variables(node) for node in (first, second)]
    if max(map(len, names)) > 1:
        raise NoValueError("several variables")
    if all(names) and names[0] != names[1]:
        return False
    with mp.workdps(_DIGITS):
        ends = sorted({end for node in (first, second) for end in _boundary_numbers(node) if mpmath.isfinite(end)})
        if len(ends) > _MAX_ENDS:
            raise NoValueError("too many limits")
        between = [(low + high) / 2 for low, high in itertools.pairwise(ends)]
        outside = [ends[0] - 1, ends[-1] + 1] if ends else [mpf(0)]
        return all(_set_contains(first, x) == _set_contains(second, x) for x in (*ends, *between, *outside))


def _is_infinite(node: Node) -> bool:
    inner = node.parts[0] if node.kind == "neg" else node
    return inner.kind == "symbol" and inner.name == "oo"


def _number_variables(node: Node) -> frozenset[str]:
    return frozenset(name for name in symbol_names(node) if not name.startswith("set "))


def _boundary_numbers(node: Node) -> Iterator[Any]:
    """The numbers at which the set may change."""
    if node.kind == "relation" and any(map(_is_expression, node.parts)):
        for pair in itertools.pairwise(node.parts):
            yield from _intersection_points(*pair)
    elif node.kind in ("symbol", "builder", "relation", "group") or node.kind in _COMBINED:
        for part in node.parts:
            yield from _boundary_numbers(part)
    else:
        yield _real_constant_value(node)


def _is_expression(node: Node) -> bool:
    """True if it has variables, but is none."""
    return (
        node.kind != "symbol"
        and node.kind not in (*_COMBINED, "group", "builder", "relation")
        and bool(symbol_names(node))
    )


def _intersection_points(left: Node, right: Node) -> Iterator[Any]:
    """The numbers at which two sides are equal: polynomials of the second degree, also with one absolute value."""
    difference = Node("+", (left, Node("neg", (right,))))
    names = symbol_names(difference)
    if len(names) != 1 or _num_absolute_values(difference) > 1:
        raise NoValueError("not one variable, or several absolute values")
    for sign in ("+", "neg"):
        branch = _resolve_absolute_values(difference, sign)
        values = {x: _real_value_at(branch, x) for x in (-1, 0, 1, 5, -7, mpf(11) / 4)}
        square, slope = (values[1] + values[-1]) / 2 - values[0], (values[1] - values[-1]) / 2
        if any(_compare_numbers(square * x * x + slope * x + values[0], value) for x, value in values.items()):
            raise NoValueError("no polynomial of the second degree")
        if square == 0:
            roots = [-values[0] / slope] if slope else []
        else:
            under = slope * slope - 4 * square * values[0]
            roots = [(-slope + side * mp.sqrt(under)) / (2 * square) for side in (1, -1)] if under >= 0 else []
        yield from roots


def _num_absolute_values(node: Node) -> int:
    return (node.kind == "abs") + sum(map(_num_absolute_values, node.parts))


def _resolve_absolute_values(node: Node, sign: str) -> Node:
    parts = tuple(_resolve_absolute_values(part, sign) for part in node.parts)
    if node.kind == "abs":
        return parts[0] if sign == "+" else Node("neg", parts)
    return Node(node.kind, parts, node.name, node.value, node.source)


def _real_value_at(node: Node, x: Any) -> Any:
    value = value_at(node, dict.fromkeys(symbol_names(node), mpf(x)))
    if mpmath.im(value) != 0:
        raise NoValueError("not real")
    return +mpmath.re(value)


def _real_constant_value(node: Node) -> Any:
    value = constant_value(node)
    if mpmath.im(value) != 0:
        raise NoValueError("a limit that is not real")
    return +mpmath.re(value)


def _set_contains(node: Node, x: Any) -> bool:
    match node.kind:
        case "cup" | "or":
            return any(_set_contains(part, x) for part in node.parts)
        case "cap" | "and":
            return all(_set_contains(part, x) for part in node.parts)
        case "setminus":
            return _set_contains(node.parts[0], x) and not _set_contains(node.parts[1], x)
        case "builder":
            return all(_set_contains(part, x) for part in node.parts if part.kind != "symbol")
        case "relation":
            return _relation_chain_holds(node, x)
        case "symbol" if node.name == "set R":
            return True
        case "group":
            return _group_contains(node, x)
    raise NoValueError(node.kind)


def _group_contains(node: Node, x: Any) -> bool:
    is_interval = node.name in ("()", "[]", "(]", "[)")
    if not is_interval:
        if any(part.kind == "relation" and part.name != "=" for part in node.parts):  # conditions that all hold
            return all(_set_contains(part, x) for part in node.parts)
        return any(
            _set_contains(part, x) if part.kind == "relation" else _compare_numbers(x, _real_constant_value(part)) == 0
            for part in node.parts
        )
    if len(node.parts) != 2:
        raise NoValueError("no interval")
    low, high = map(_real_constant_value, node.parts)
    if _compare_numbers(low, high) > 0:
        raise NoValueError("no interval")
    low, high = _compare_numbers(x, low), _compare_numbers(x, high)
    return (low > 0 or (low == 0 and node.name[0] == "[")) and (high < 0 or (high == 0 and node.name[1] == "]"))


def _relation_chain_holds(node: Node, x: Any) -> bool:
    """True if a chain of relations holds; each side is the variable or a constant."""
    sides = node.parts
    return all(
        _relation_holds(left, sign, right, x)
        for left, sign, right in zip(sides, node.name.split(), sides[1:], strict=False)
    )


def _relation_holds(left: Node, sign: str, right: Node, x: Any) -> bool:
    if sign == "in":
        return _set_contains(right, x)
    order = _compare_numbers(_value_of_side(left, x), _value_of_side(right, x))
    return {
        "<": order < 0, ">": order > 0, "<=": order <= 0, ">=": order >= 0, "!=": order != 0, "=": order == 0,
    }[sign]  # fmt: skip


def _value_of_side(node: Node, x: Any) -> Any:
    if _is_expression(node):
        return _real_value_at(node, x)
    return x if node.kind == "symbol" and node.name not in ("pi", "e", "i", "oo") else _real_constant_value(node)


def _compare_numbers(first: Any, second: Any) -> int:
    """-1, 0 or 1; numbers that differ by less than their digits are equal."""
    slack = max(abs(first), abs(second), mpf(10) ** -_DIGITS) * mpf(10) ** (10 - _DIGITS)
    if mpmath.isfinite(slack) and abs(first - second) <= slack:
        return 0
    return int(mpmath.sign(first - second))
