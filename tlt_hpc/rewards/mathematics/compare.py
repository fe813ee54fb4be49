"""The first way: two trees are compared part by part, their expressions exactly or by mpmath."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from fractions import Fraction

from tlt_hpc.rewards.mathematics.exact import exact_value, to_decimal
from tlt_hpc.rewards.mathematics.forms import (
    UNORDERED,
    as_group,
    bare_source,
    bases_agree,
    can_name_value,
    difference_of_sides,
    digits_of,
    divide_by_100,
    fraction_parts,
    is_equation,
    is_numeral,
    may_be_same_list,
    simplify,
    smaller_side_first,
    strictness,
    substitute_values,
    terms,
)
from tlt_hpc.rewards.mathematics.node import Node, number_node
from tlt_hpc.rewards.mathematics.tokens import canonical_unit, factor_of_word, multiply_by_power_of_ten, without_unit
from tlt_hpc.rewards.mathematics.values import (
    NoValueError,
    constant_value,
    is_rounded,
    is_set_of_reals,
    same_at_points,
    same_constant,
    same_sets,
    symbol_names,
)

_MAX_ITEMS = 200
_MIN_DIGITS, _MIN_DIGITS_OF_DATA = 3, 6
"""Significant digits that a rounded answer must show, and a rounded number of the data."""


class AnswerComparison:
    """One comparison; ``pairs`` are the expressions that it took for equal and that are to be confirmed."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Node, Node]] = []

    def are_equal_collecting_pairs(self, given: Node, wanted: Node) -> bool:
        """True if two answers are equal, except for ``pairs``, which are left to be confirmed."""
        given, wanted = simplify(given), simplify(wanted)
        if "percent" in (given.kind, wanted.kind):
            return self._same_percent(given, wanted)
        if given.kind == "unit" or wanted.kind == "unit":
            return self._same_unit(given, wanted)
        if "based" in (given.kind, wanted.kind):
            return digits_of(given) == digits_of(wanted) and bases_agree(given.name, wanted.name)
        if is_equation(given) or is_equation(wanted):
            return self._same_equation(given, wanted)
        if is_set_of_reals(given) or is_set_of_reals(wanted):
            return self._same_set(given, wanted)
        if "group" in (given.kind, wanted.kind):
            return self._same_group(as_group(given), as_group(wanted))
        if "matrix" in (given.kind, wanted.kind):
            return given.kind == wanted.kind and self._same_matrix(given, wanted)
        if "ratio" in (given.kind, wanted.kind):
            return self._same_ratio(given, wanted)
        return self._same_scalar(given, wanted)

    def _same_percent(self, given: Node, wanted: Node) -> bool:
        """12.5% is 12.5 and 0.125, whichever the data means."""
        if given.kind == wanted.kind:
            return self.are_equal_collecting_pairs(given.parts[0], wanted.parts[0])
        if given.kind == "percent":
            return self.are_equal_collecting_pairs(given.parts[0], wanted) or self.are_equal_collecting_pairs(
                divide_by_100(given.parts[0]), wanted
            )
        return self.are_equal_collecting_pairs(given, wanted.parts[0]) or self.are_equal_collecting_pairs(
            given, divide_by_100(wanted.parts[0])
        )

    def _same_unit(self, given: Node, wanted: Node) -> bool:
        """A unit counts only where both sides have one and both are known."""
        if given.kind == wanted.kind:
            names = [canonical_unit(node.name) for node in (given, wanted)]
            if all(names) and names[0] != names[1]:
                return False
        values = [without_unit(node) for node in (given, wanted)]
        if given.kind == wanted.kind and {value.kind for value in values} == {"ratio"}:  # times of day
            return self._are_equal_in_order(values[0].parts, values[1].parts)
        factors = [factor_of_word(node) for node in (given, wanted)]
        if self.are_equal_collecting_pairs(*values) and (factors[0] == factors[1] or 1 in factors):
            return True
        return factors[0] != factors[1] and self.are_equal_collecting_pairs(
            *map(multiply_by_power_of_ten, values, factors)
        )

    def _same_equation(self, given: Node, wanted: Node) -> bool:
        """Equations that give a name a value are compared by it, others as conditions."""
        one, other = _value_of_equation(given), _value_of_equation(wanted)
        if one is None and not is_equation(wanted) and not symbol_names(wanted):
            one = _final_constant_of_equation(given)
        if one is not None and other is not None:
            have_names = is_equation(given) and is_equation(wanted)
            if not have_names or bare_source(given.parts[0]) == bare_source(wanted.parts[0]):
                return self.are_equal_collecting_pairs(one, other)
        is_pair = is_equation(given) and is_equation(wanted) and len(given.parts) == len(wanted.parts) == 2
        return is_pair and self._same_condition(given, wanted, either_sign=True)

    def _same_condition(self, given: Node, wanted: Node, either_sign: bool) -> bool:
        """True if the difference of one's sides is a constant multiple of that of the other's."""
        first, second = (difference_of_sides(node) for node in (given, wanted))
        names = symbol_names(first) | symbol_names(second)
        if not names or any(name.startswith("set ") for name in names):
            return False
        ratio = Node("/", (first, second))
        at_one = _evaluate_at_rational_point(ratio, names)
        if at_one is None or (not either_sign and at_one < 0):
            return False
        factor = f"\\frac{{{at_one.numerator}}}{{{at_one.denominator}}}"
        is_same = same_at_points(first, Node("*", (second, number_node(at_one))), names)
        if is_same:
            self.pairs.append((first, Node("*", source=f"{factor} \\cdot ({second.source})")))
        return is_same

    def _same_set(self, given: Node, wanted: Node) -> bool:
        try:
            return same_sets(given, wanted)
        except NoValueError:
            pass
        if given.kind != wanted.kind or len(given.parts) != len(wanted.parts):
            return False
        if given.kind == "relation":
            if self._is_same_or_reversed_chain(given, wanted):
                return True
            is_pair = len(given.parts) == 2 and strictness(given) == strictness(wanted) is not None
            return is_pair and self._same_condition(
                smaller_side_first(given), smaller_side_first(wanted), either_sign=False
            )
        return given.name == wanted.name and self._are_equal_in_order(given.parts, wanted.parts)

    def _same_group(self, given: Node, wanted: Node) -> bool:
        if len(given.parts) > _MAX_ITEMS or len(wanted.parts) > _MAX_ITEMS:
            return False
        named = [_sort_equations_by_name(node) for node in (given, wanted)]
        if (named[0] is None) != (named[1] is None):
            return self._are_equal_in_order(
                *(parts or node.parts for parts, node in zip(named, (given, wanted), strict=True))
            )
        if given.name in UNORDERED and wanted.name in UNORDERED:
            return self._are_equal_in_any_order(given.parts, wanted.parts)
        if not may_be_same_list(given, wanted):
            return False
        return self._are_equal_in_order(given.parts, wanted.parts)

    def _is_same_or_reversed_chain(self, given: Node, wanted: Node) -> bool:
        """True if two chains have the same sides, in one direction or the other."""
        mirror = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
        backwards = " ".join(mirror.get(sign, sign) for sign in reversed(given.name.split()))
        if given.name == wanted.name and self._are_equal_in_order(given.parts, wanted.parts):
            return True
        return backwards == wanted.name and self._are_equal_in_order(given.parts[::-1], wanted.parts)

    def _are_equal_in_order(self, given: Sequence[Node], wanted: Sequence[Node]) -> bool:
        return len(given) == len(wanted) and all(map(self.are_equal_collecting_pairs, given, wanted))

    def _are_equal_in_any_order(self, given: Sequence[Node], wanted: Sequence[Node]) -> bool:
        """True if each part has an equal one on the other side; repeated elements of a set count once."""
        return all(any(self.are_equal_collecting_pairs(each, other) for other in wanted) for each in given) and all(
            any(self.are_equal_collecting_pairs(each, other) for each in given) for other in wanted
        )

    def _same_matrix(self, given: Node, wanted: Node) -> bool:
        return len(given.parts) == len(wanted.parts) and all(
            self._are_equal_in_order(row.parts, other.parts)
            for row, other in zip(given.parts, wanted.parts, strict=True)
        )

    def _same_ratio(self, given: Node, wanted: Node) -> bool:
        sides = [node.parts if node.kind == "ratio" else fraction_parts(node) for node in (given, wanted)]
        if len(sides[0]) != len(sides[1]):
            return False
        quotients = [[Node("/", pair) for pair in itertools.pairwise(parts)] for parts in sides]
        return all(map(self._same_scalar, *quotients))

    def _same_scalar(self, given: Node, wanted: Node) -> bool:
        one, other = exact_value(given), exact_value(wanted)
        if one is not None and other is not None and one == other:
            if not (is_numeral(given) and is_numeral(wanted)):
                self.pairs.append((given, wanted))
            return True
        names = symbol_names(given) | symbol_names(wanted)
        if any(name.startswith("set ") for name in names):
            return given == wanted
        if not names and _is_rounded(given, wanted):
            return True
        if one is not None and other is not None:
            return False
        is_same = same_at_points(given, wanted, names) if names else same_constant(given, wanted)
        if is_same:
            self.pairs.append((given, wanted))
        return is_same


def _sort_equations_by_name(node: Node) -> tuple[Node, ...] | None:
    """The equations of a list that gives each of several names a value, by name; None if it is no such list."""
    names = [bare_source(part.parts[0]) for part in node.parts if is_equation(part) and len(part.parts) == 2]
    if len(names) < 2 or len(set(names)) < len(node.parts):
        return None
    if not all(re.fullmatch("[A-Za-z]", name) for name in names):
        return node.parts
    return tuple(part for _, part in sorted(zip(names, node.parts, strict=True), key=lambda pair: pair[0]))


def _value_of_equation(node: Node) -> Node | None:
    """The value that an equation gives its first side; the node itself if it is no equation; None: no value."""
    if not is_equation(node):
        return node
    sides, signs = list(node.parts), node.name.split()
    if can_name_value(sides[0]) and len(sides) > 1:
        del sides[0], signs[0]
    elif can_name_value(sides[-1]):
        del sides[-1], signs[-1]
    if signs and signs[0] == "~":
        return sides[0]
    if all(_are_equal_sides(sides[0], side) for side in sides[1:]):
        return sides[-1] if "~" not in signs else sides[0]
    return None


def _final_constant_of_equation(node: Node) -> Node | None:
    """The constant that an equation ends with, as 6 in m + n = 6; None if its first side has a number of its own."""
    first, *others = node.parts
    constants = [side for side in others if not symbol_names(side)]
    if not others or others[-1] not in constants or not symbol_names(first) or node.name[:1] != "=" or "~" in node.name:
        return None
    if any(not symbol_names(term) for term in terms(first)):
        return None
    return others[-1] if all(_are_equal_sides(side, others[-1]) for side in constants) else None


def _are_equal_sides(first: Node, second: Node) -> bool:
    """True if two sides of an equation have one value."""
    return AnswerComparison().are_equal_collecting_pairs(first, second)


def _evaluate_at_rational_point(ratio: Node, names: frozenset[str]) -> Fraction | None:
    """The value of a quotient at a rational point, where it is exact."""
    draw = random.Random(",".join(sorted(names)))
    for _ in range(4):
        point = {name: Fraction(draw.randint(100, 999), draw.randint(100, 999)) for name in sorted(names)}
        value = exact_value(substitute_values(ratio, point))
        if value:
            return value
    return None


def _is_rounded(given: Node, wanted: Node) -> bool:
    """True if one is a decimal that shows the value of the other, no decimal and no integer, to its last digit."""
    one, other = to_decimal(given), to_decimal(wanted)
    rounded, full = (one, wanted) if one is not None else (other, given)
    least = _MIN_DIGITS if one is not None else _MIN_DIGITS_OF_DATA
    if rounded is None or rounded.digits < least or (one is not None and other is not None):
        return False
    exact = exact_value(full)
    if exact is not None and exact.denominator == 1:
        return False
    try:
        value = constant_value(full)
        return value.imag == 0 and is_rounded(rounded, value.real)
    except NoValueError:
        return False
