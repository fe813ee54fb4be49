"""Sets of real numbers, however they are written: intervals, unions, inequalities, conditions.

A set is known by which numbers it contains. Two are equal if they contain the same of the numbers at which either may
change, and the same of one number between any two of these.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import mpmath
from mpmath import mp, mpf

from tlt_hpc.rewards.mathematics.node import Node
from tlt_hpc.rewards.mathematics.values import NoValueError, constant_value, symbols_of, value_at

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
    names = [_variables(node) for node in (first, second)]
    if max(map(len, names)) > 1:
        raise NoValueError("several variables")
    if all(names) and names[0] != names[1]:
        return False
    with mp.workdps(_DIGITS):
        ends = sorted({end for node in (first, second) for end in _ends(node) if mpmath.isfinite(end)})
        if len(ends) > _MAX_ENDS:
            raise NoValueError("too many limits")
        between = [(low + high) / 2 for low, high in itertools.pairwise(ends)]
        outside = [ends[0] - 1, ends[-1] + 1] if ends else [mpf(0)]
        return all(_contains(first, x) == _contains(second, x) for x in (*ends, *between, *outside))


def _is_infinite(node: Node) -> bool:
    inner = node.parts[0] if node.kind == "neg" else node
    return inner.kind == "symbol" and inner.name == "oo"


def _variables(node: Node) -> frozenset[str]:
    return frozenset(name for name in symbols_of(node) if not name.startswith("set "))


def _ends(node: Node) -> Iterator[Any]:
    """The numbers at which the set may change."""
    if node.kind == "relation" and any(map(_is_expression, node.parts)):
        for pair in itertools.pairwise(node.parts):
            yield from _crossings(*pair)
    elif node.kind in ("symbol", "builder", "relation", "group") or node.kind in _COMBINED:
        for part in node.parts:
            yield from _ends(part)
    else:
        yield _real(node)


def _is_expression(node: Node) -> bool:
    """Whether it has variables, but is none."""
    return (
        node.kind != "symbol"
        and node.kind not in (*_COMBINED, "group", "builder", "relation")
        and bool(symbols_of(node))
    )


def _crossings(left: Node, right: Node) -> Iterator[Any]:
    """The numbers at which two sides are equal: polynomials of the second degree, also with one absolute value."""
    difference = Node("+", (left, Node("neg", (right,))))
    names = symbols_of(difference)
    if len(names) != 1 or _num_bars(difference) > 1:
        raise NoValueError("not one variable, or several absolute values")
    for sign in ("+", "neg"):
        branch = _without_bars(difference, sign)
        values = {x: _real_at(branch, x) for x in (-1, 0, 1, 5, -7, mpf(11) / 4)}
        square, slope = (values[1] + values[-1]) / 2 - values[0], (values[1] - values[-1]) / 2
        if any(_order(square * x * x + slope * x + values[0], value) for x, value in values.items()):
            raise NoValueError("no polynomial of the second degree")
        if square == 0:
            roots = [-values[0] / slope] if slope else []
        else:
            under = slope * slope - 4 * square * values[0]
            roots = [(-slope + side * mp.sqrt(under)) / (2 * square) for side in (1, -1)] if under >= 0 else []
        yield from roots


def _num_bars(node: Node) -> int:
    return (node.kind == "abs") + sum(map(_num_bars, node.parts))


def _without_bars(node: Node, sign: str) -> Node:
    parts = tuple(_without_bars(part, sign) for part in node.parts)
    if node.kind == "abs":
        return parts[0] if sign == "+" else Node("neg", parts)
    return Node(node.kind, parts, node.name, node.value, node.source)


def _real_at(node: Node, x: Any) -> Any:
    value = value_at(node, dict.fromkeys(symbols_of(node), mpf(x)))
    if mpmath.im(value) != 0:
        raise NoValueError("not real")
    return +mpmath.re(value)


def _real(node: Node) -> Any:
    value = constant_value(node)
    if mpmath.im(value) != 0:
        raise NoValueError("a limit that is not real")
    return +mpmath.re(value)


def _contains(node: Node, x: Any) -> bool:
    match node.kind:
        case "cup" | "or":
            return any(_contains(part, x) for part in node.parts)
        case "cap" | "and":
            return all(_contains(part, x) for part in node.parts)
        case "setminus":
            return _contains(node.parts[0], x) and not _contains(node.parts[1], x)
        case "builder":
            return all(_contains(part, x) for part in node.parts if part.kind != "symbol")
        case "relation":
            return _holds(node, x)
        case "symbol" if node.name == "set R":
            return True
        case "group":
            return _in_group(node, x)
    raise NoValueError(node.kind)


def _in_group(node: Node, x: Any) -> bool:
    is_interval = node.name in ("()", "[]", "(]", "[)")
    if not is_interval:
        if any(part.kind == "relation" and part.name != "=" for part in node.parts):  # conditions that all hold
            return all(_contains(part, x) for part in node.parts)
        return any(
            _contains(part, x) if part.kind == "relation" else _order(x, _real(part)) == 0 for part in node.parts
        )
    if len(node.parts) != 2:
        raise NoValueError("no interval")
    low, high = map(_real, node.parts)
    if _order(low, high) > 0:
        raise NoValueError("no interval")
    low, high = _order(x, low), _order(x, high)
    return (low > 0 or (low == 0 and node.name[0] == "[")) and (high < 0 or (high == 0 and node.name[1] == "]"))


def _holds(node: Node, x: Any) -> bool:
    """Whether a chain of relations holds; each side is the variable or a constant."""
    sides = node.parts
    return all(
        _hold(left, sign, right, x) for left, sign, right in zip(sides, node.name.split(), sides[1:], strict=False)
    )


def _hold(left: Node, sign: str, right: Node, x: Any) -> bool:
    if sign == "in":
        return _contains(right, x)
    order = _order(_side(left, x), _side(right, x))
    return {
        "<": order < 0, ">": order > 0, "<=": order <= 0, ">=": order >= 0, "!=": order != 0, "=": order == 0,
    }[sign]  # fmt: skip


def _side(node: Node, x: Any) -> Any:
    if _is_expression(node):
        return _real_at(node, x)
    return x if node.kind == "symbol" and node.name not in ("pi", "e", "i", "oo") else _real(node)


def _order(first: Any, second: Any) -> int:
    """-1, 0 or 1; numbers that differ by less than their digits are equal."""
    slack = max(abs(first), abs(second), mpf(10) ** -_DIGITS) * mpf(10) ** (10 - _DIGITS)
    if mpmath.isfinite(slack) and abs(first - second) <= slack:
        return 0
    return int(mpmath.sign(first - second))
