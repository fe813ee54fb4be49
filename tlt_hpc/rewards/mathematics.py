"""Whether two answers are equal as mathematics: exactly where they are rational, otherwise by two ways that must agree.

The first way evaluates the tree that ``expression.py`` reads, with mpmath; the second reads the same text with
latex2sympy2_extended and evaluates it with sympy at other points. docs/rewards.md states the rules.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

from tlt_hpc.rewards.answer import Failure, Verdict
from tlt_hpc.rewards.exact import decimal_of, exact_value
from tlt_hpc.rewards.expression import MAX_CHARACTERS, UNITS, Node, UnreadableError, read_expression
from tlt_hpc.rewards.final_answer import answer_in, find_answer
from tlt_hpc.rewards.notation import plain_words, tidy
from tlt_hpc.rewards.real_sets import is_set_of_reals, same_sets
from tlt_hpc.rewards.values import (
    NoValueError,
    constant_value,
    is_rounded,
    same_at_points,
    same_constant,
    symbols_of,
)

_CONVERSION = ConversionConfig(lowercase_symbols=False)
_SECOND_POINTS, _SECOND_DIGITS = 5, 40
_MAX_ITEMS = 200
_MIN_DIGITS = 3
"""Significant digits that a rounded number must show."""
_LETTERS = re.compile(r"[a-z]{3,}")
"""An answer of letters alone is a word, whose letters have an order: no product of variables."""
_LIST = re.compile(r"[,;]|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b")
_WORD = re.compile(r"\\text|(?<![\\A-Za-z])[A-Za-z]{2,}")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_LETTER_IN_BRACKETS = re.compile(r"\(([A-Z])\)")
_BRACKET = re.compile(r"[(\[|^_]|\\(?!text)")
_LARGE = re.compile(r"(?:thousand|million|billion|trillion)", re.IGNORECASE)
_LARGE_POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_DECIMAL = re.compile(r"(\d*)\.(\d+)")
_BEFORE_BINOMIAL = re.compile(r"(?<=[\d})!])\s*(?=\\binom)")
"""Where the other reader takes a product for a mixed number."""
_BARE_ARGUMENT = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc|ln|log)\s*(?:\^\s*(?:\d|\{[^{}]*\}))?)\s*(\d*\s*(?:[A-Za-z]|\\[a-z]+))(?=\s*\\(?:cdot|times))"
)
"""A function of one letter before a sign of multiplication, which does not belong to its argument."""
_COMMA = re.compile(r"\d,\d{3}")


@dataclass(frozen=True)
class Reading:
    """An answer as it was read: in one notation, and as a tree; None if it is no mathematics."""

    text: str
    tree: Node | None


@lru_cache(maxsize=64)
def read(answer: str, commas_separate: bool = False) -> Reading:
    """The reading of an answer's text; ``commas_separate``: none of its commas stands between thousands."""
    if len(answer) > MAX_CHARACTERS:
        return Reading(answer.strip(), None)
    text = tidy(answer, commas_separate)
    if _LETTERS.fullmatch(text):
        return Reading(text, None)
    try:
        return Reading(text, read_expression(text))
    except UnreadableError:
        return Reading(text, None)


def equal_as_mathematics(text: str, truth: str, is_finished: bool = True) -> Verdict:
    """1.0 if the response's answer is mathematically equal to the data's."""
    box = find_answer(truth) if "\\boxed" in truth or "\\fbox" in truth else None
    expected = box.text if box else truth
    wanted = read(expected)
    if not wanted.text:
        return Verdict(0.0, Failure.UNREADABLE, f"answer {truth[:80]!r} cannot be read as mathematics")
    found = find_answer(text, is_finished)
    given = read(answer_in(found)) if found else Reading("", None)
    if found is None or not given.text:
        return Verdict(0.0, detail="the response gives no answer")
    verdict = _compare(given, wanted)
    if not verdict.reward and (_COMMA.search(found.text) or _COMMA.search(expected)):
        as_lists = _compare(read(answer_in(found), True), read(expected, True))
        return as_lists if as_lists.reward else verdict
    return verdict


def same_answer(text: str, other: str) -> Verdict:
    """1.0 if two responses give equal answers; unreadable if the first gives no answer."""
    found = [find_answer(each) for each in (text, other)]
    given, wanted = (read(answer_in(each)) if each else Reading("", None) for each in found)
    if not given.text:
        return Verdict(0.0, Failure.UNREADABLE, "no answer")
    return _compare(given, wanted)


def warm_up() -> None:
    """Have everything imported, compiled and cached that answers would have to wait for, in every fork again."""
    for text, truth in _USUAL:
        equal_as_mathematics(f"\\boxed{{{text}}}", truth)


_USUAL = (
    ("\\frac{2}{4}", "\\frac{1}{2}"), ("(x+1)^2", "x^2+2x+1"), ("(-\\infty,1)\\cup(2,3]", "x<1 or 2<x\\le 3"),
    ("\\{1, \\sqrt{8}\\}", "\\{1, 2\\sqrt{2}\\}"), ("\\sin(2x)", "2\\sin x\\cos x"), ("\\frac{\\ln 8}{\\ln 2}", "3"),
    ("\\frac{\\pi}{2}-1", "\\frac{\\pi-2}{2}"), ("e^{2}\\cdot e", "e^3"), ("|x-1|", "|1-x|"), ("\\text{A}", "B"),
)  # fmt: skip
"""Answers of usual forms. What reading one has left in caches makes the next like it several times as fast."""


def _compare(given: Reading, wanted: Reading) -> Verdict:
    shown = given.text
    if given.text == wanted.text or _bare(given.text) == _bare(wanted.text):
        return Verdict(1.0, read=shown)
    has_words = any(_WORD.search(reading.text) or reading.tree is None for reading in (given, wanted))
    is_same = has_words and _same_words(given.text, wanted.text)
    if is_same or given.tree is None or wanted.tree is None:
        return Verdict(float(is_same), detail="" if is_same else f"other words than {wanted.text[:80]!r}", read=shown)
    comparison = _Comparison()
    if not comparison.same(given.tree, wanted.tree):
        return Verdict(0.0, detail=f"not equal to {wanted.text[:80]!r}", read=shown)
    if not all(_confirmed(*pair) for pair in comparison.pairs):
        return Verdict(
            0.0,
            detail=f"disputed: only one of two ways finds it equal to {wanted.text[:80]!r}",
            read=shown,
            is_disputed=True,
        )
    return Verdict(1.0, read=shown)


def _bare(text: str) -> str:
    """The text without blanks that separate nothing."""
    return re.sub(r"(?<![A-Za-z0-9.]) | (?![A-Za-z0-9.])", "", text)


def _same_words(given: str, wanted: str) -> bool:
    """Whether two answers that are no mathematics are the same words, or the same list of them in any order."""
    if max(len(given), len(wanted)) > MAX_CHARACTERS:
        return given == wanted
    texts = [_LETTER_IN_BRACKETS.sub(r"\1", _TEXT.sub(r" \1 ", text)) for text in (given, wanted)]
    lists = [_LIST.split(text) if not _BRACKET.search(text) else [text] for text in texts]
    words = [sorted(filter(None, (_bare(plain_words(part)) for part in each))) for each in lists]
    return words[0] == words[1] != []


# --- comparison by the first way ---


class _Comparison:
    """One comparison; ``pairs`` are the expressions that it took for equal and that are to be confirmed."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Node, Node]] = []

    def same(self, given: Node, wanted: Node) -> bool:
        """Whether two answers are equal."""
        given, wanted = _settled(given), _settled(wanted)
        if "percent" in (given.kind, wanted.kind):
            return self._same_percent(given, wanted)
        if given.kind == "unit" or wanted.kind == "unit":
            return self._same_unit(given, wanted)
        if "based" in (given.kind, wanted.kind):
            return _digits_of(given) == _digits_of(wanted) and _agree(given.name, wanted.name)
        if _is_equation(given) or _is_equation(wanted):
            return self._same_equation(given, wanted)
        if is_set_of_reals(given) or is_set_of_reals(wanted):
            return self._same_set(given, wanted)
        if "group" in (given.kind, wanted.kind):
            return self._same_group(_as_group(given), _as_group(wanted))
        if "matrix" in (given.kind, wanted.kind):
            return given.kind == wanted.kind and self._same_matrix(given, wanted)
        if "ratio" in (given.kind, wanted.kind):
            return self._same_ratio(given, wanted)
        return self._same_scalar(given, wanted)

    def _same_percent(self, given: Node, wanted: Node) -> bool:
        """12.5% is 12.5 and 0.125, whichever the data means."""
        if given.kind == wanted.kind:
            return self.same(given.parts[0], wanted.parts[0])
        if given.kind == "percent":
            return self.same(given.parts[0], wanted) or self.same(_hundredth(given.parts[0]), wanted)
        return self.same(given, wanted.parts[0]) or self.same(given, _hundredth(wanted.parts[0]))

    def _same_unit(self, given: Node, wanted: Node) -> bool:
        """A unit counts only where both sides have one and both are known."""
        if given.kind == wanted.kind:
            names = [_known_unit(node.name) for node in (given, wanted)]
            if all(names) and names[0] != names[1]:
                return False
        values = [_without_unit(node) for node in (given, wanted)]
        factors = [_large(node) for node in (given, wanted)]
        if self.same(*values) and (factors[0] == factors[1] or 1 in factors):
            return True
        return factors[0] != factors[1] and self.same(*map(_times, values, factors))

    def _same_equation(self, given: Node, wanted: Node) -> bool:
        """Equations that give a name a value are compared by it, others as conditions."""
        one, other = _named_value(given), _named_value(wanted)
        if one is None and not _is_equation(wanted) and not symbols_of(wanted):
            one = _said_value(given)
        if one is not None and other is not None:
            have_names = _is_equation(given) and _is_equation(wanted)
            if not have_names or _spelled(given.parts[0]) == _spelled(wanted.parts[0]):
                return self.same(one, other)
        is_pair = _is_equation(given) and _is_equation(wanted) and len(given.parts) == len(wanted.parts) == 2
        return is_pair and self._same_condition(given, wanted, either_sign=True)

    def _same_condition(self, given: Node, wanted: Node, either_sign: bool) -> bool:
        """Whether the differences of the sides are one a constant multiple of the other."""
        first, second = (_difference(node) for node in (given, wanted))
        names = symbols_of(first) | symbols_of(second)
        if not names or any(name.startswith("set ") for name in names):
            return False
        ratio = Node("/", (first, second))
        at_one = _at_one_point(ratio, names)
        if at_one is None or (not either_sign and at_one < 0):
            return False
        return same_at_points(first, Node("*", (second, _number(at_one))), names)

    def _same_set(self, given: Node, wanted: Node) -> bool:
        try:
            return same_sets(given, wanted)
        except NoValueError:
            pass
        if given.kind != wanted.kind or len(given.parts) != len(wanted.parts):
            return False
        if given.kind == "relation":
            if any(_is_turned(given, wanted, self)):
                return True
            is_pair = len(given.parts) == 2 and _strictness(given) == _strictness(wanted) is not None
            return is_pair and self._same_condition(_turned(given), _turned(wanted), either_sign=False)
        return given.name == wanted.name and self._in_order(given.parts, wanted.parts)

    def _same_group(self, given: Node, wanted: Node) -> bool:
        if len(given.parts) > _MAX_ITEMS or len(wanted.parts) > _MAX_ITEMS:
            return False
        if given.name in _UNORDERED and wanted.name in _UNORDERED:
            return self._in_any_order(given.parts, wanted.parts)
        if not _may_be_same_list(given, wanted):
            return False
        return self._in_order(given.parts, wanted.parts)

    def _in_order(self, given: Sequence[Node], wanted: Sequence[Node]) -> bool:
        return len(given) == len(wanted) and all(map(self.same, given, wanted))

    def _in_any_order(self, given: Sequence[Node], wanted: Sequence[Node]) -> bool:
        """Whether each has an equal one on the other side; repeated elements of a set count once."""
        return all(any(self.same(each, other) for other in wanted) for each in given) and all(
            any(self.same(each, other) for each in given) for other in wanted
        )

    def _same_matrix(self, given: Node, wanted: Node) -> bool:
        return len(given.parts) == len(wanted.parts) and all(
            self._in_order(row.parts, other.parts) for row, other in zip(given.parts, wanted.parts, strict=True)
        )

    def _same_ratio(self, given: Node, wanted: Node) -> bool:
        sides = [node.parts if node.kind == "ratio" else _fraction_parts(node) for node in (given, wanted)]
        if len(sides[0]) != len(sides[1]):
            return False
        quotients = [[Node("/", pair) for pair in itertools.pairwise(parts)] for parts in sides]
        return all(map(self._same_scalar, *quotients))

    def _same_scalar(self, given: Node, wanted: Node) -> bool:
        one, other = exact_value(given), exact_value(wanted)
        if one is not None and other is not None and one == other:
            if not (_is_plain(given) and _is_plain(wanted)):
                self.pairs.append((given, wanted))
            return True
        names = symbols_of(given) | symbols_of(wanted)
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


_UNORDERED = ("", "{}")


def _settled(node: Node) -> Node:
    """The node without degrees, signs and brackets that change nothing, and with both values of a plus-minus."""
    while node.kind == "degree" or (node.kind == "group" and node.name in ("()", "[]") and len(node.parts) == 1):
        node = node.parts[0]
    if node.kind == "neg" and node.parts[0].kind in ("percent", "unit", "degree"):
        inner = node.parts[0]
        return Node(inner.kind, (Node("neg", inner.parts, source=node.source),), inner.name, source=node.source)
    if node.kind == "relation" and node.name == "in":
        return node.parts[1]
    if node.kind == "ratio" and (last := node.parts[-1]).kind == "unit":  # of a time of day
        return Node("unit", (Node("ratio", (*node.parts[:-1], last.parts[0])),), last.name)
    if node.kind == "group" and node.name in _UNORDERED:
        items = [_settled(item) if _has_sign_choice(item) else item for item in node.parts]
        flat = [
            part for item in items for part in (item.parts if item.kind == "group" and item.name == "" else (item,))
        ]
        return Node("group", tuple(flat), node.name, source=node.source)
    if node.kind == "relation" and node.name == "=" and _has_sign_choice(node.parts[1]):
        return _settled(node.parts[1])
    if node.kind not in ("relation", "group") and _has_sign_choice(node):
        return Node("group", (_with_sign(node, "+"), _with_sign(node, "neg")))
    return node


def _has_sign_choice(node: Node) -> bool:
    return node.kind == "pm" or any(map(_has_sign_choice, node.parts))


def _with_sign(node: Node, sign: str) -> Node:
    """The expression with one sign for each plus-minus."""
    parts = tuple(_with_sign(part, sign) for part in node.parts)
    if node.kind != "pm":
        return Node(node.kind, parts, node.name, node.value, _signed_source(node.source, sign))
    last = Node("neg", parts[-1:], source=f"-({parts[-1].source})") if sign == "neg" else parts[-1]
    source = _signed_source(node.source, sign)
    return (
        Node("+", (parts[0], last), source=source)
        if len(parts) > 1
        else Node(last.kind, last.parts, last.name, last.value, source)
    )


def _signed_source(source: str, sign: str) -> str:
    return re.sub(r"\\pm(?![A-Za-z])", "+" if sign == "+" else "-", source)


def _as_group(node: Node) -> Node:
    return node if node.kind == "group" else Node("group", (node,))


def _may_be_same_list(given: Node, wanted: Node) -> bool:
    """Whether lists with other brackets may be equal in order: "(1,2)" may be an interval, three numbers are none."""
    if given.name == wanted.name:
        return True
    names = {given.name, wanted.name}
    if "{}" in names or names & {"(]", "[)"}:
        return False
    if all(_is_equation(part) for part in (*given.parts,)) and len(given.parts) > 1:
        return True
    return len(wanted.parts) > 2 or (wanted.name == "" and given.name == "()")


def _is_equation(node: Node) -> bool:
    return node.kind == "relation" and set(node.name.split()) <= {"=", "~", "=="}


def _named_value(node: Node) -> Node | None:
    """What an equation says that its first side is; the node itself if it is no equation; None: no value."""
    if not _is_equation(node):
        return node
    sides, signs = list(node.parts), node.name.split()
    if _is_name(sides[0]) and len(sides) > 1:
        del sides[0], signs[0]
    elif _is_name(sides[-1]):
        del sides[-1], signs[-1]
    if signs and signs[0] == "~":
        return sides[0]
    if all(same_quietly(sides[0], side) for side in sides[1:]):
        return sides[-1] if "~" not in signs else sides[0]
    return None


def _spelled(node: Node) -> str:
    """The source without what may be left out."""
    return re.sub(r"[{}\s]", "", node.source)


def _said_value(node: Node) -> Node | None:
    """The constant that an equation ends with, as 6 in m + n = 6; None if its first side has a number of its own."""
    first, *others = node.parts
    constants = [side for side in others if not symbols_of(side)]
    if not others or others[-1] not in constants or not symbols_of(first) or node.name[:1] != "=" or "~" in node.name:
        return None
    if any(not symbols_of(term) for term in _terms(first)):
        return None
    return others[-1] if all(same_quietly(side, others[-1]) for side in constants) else None


def _terms(node: Node) -> list[Node]:
    return [term for part in node.parts for term in _terms(part)] if node.kind in ("+", "neg") else [node]


def same_quietly(first: Node, second: Node) -> bool:
    """Whether two sides of an equation have one value."""
    return _Comparison().same(first, second)


def _is_name(node: Node) -> bool:
    """Whether it can name a value: x, f(x), (x, y)."""
    if node.kind == "symbol":
        return node.name not in ("pi", "e", "oo")
    if node.kind == "*":
        return node.parts[0].kind == "symbol" and node.source.rstrip().endswith(")") and all(map(_is_name, node.parts))
    return node.kind == "group" and bool(node.parts) and all(map(_is_name, node.parts))


def _difference(node: Node) -> Node:
    return Node("+", (node.parts[0], Node("neg", (node.parts[1],))))


def _turned(node: Node) -> Node:
    """The relation with its smaller side first."""
    return Node("relation", node.parts[::-1], node.name.replace(">", "<")) if ">" in node.name else node


def _strictness(node: Node) -> str | None:
    return {"<": "<", ">": "<", "<=": "<=", ">=": "<="}.get(node.name)


def _is_turned(given: Node, wanted: Node, comparison: _Comparison) -> list[bool]:
    """Whether two chains have the same sides, in one direction or the other."""
    mirror = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
    turned = " ".join(mirror.get(sign, sign) for sign in reversed(given.name.split()))
    return [
        given.name == wanted.name and comparison._in_order(given.parts, wanted.parts),
        turned == wanted.name and comparison._in_order(given.parts[::-1], wanted.parts),
    ]


def _at_one_point(ratio: Node, names: frozenset[str]) -> Fraction | None:
    """The value of a quotient at a rational point, where it is exact."""
    draw = random.Random(",".join(sorted(names)))
    for _ in range(4):
        point = {name: Fraction(draw.randint(100, 999), draw.randint(100, 999)) for name in sorted(names)}
        value = exact_value(_replaced(ratio, point))
        if value:
            return value
    return None


def _replaced(node: Node, point: dict[str, Fraction]) -> Node:
    if node.kind == "symbol" and node.name in point:
        return _number(point[node.name])
    return Node(node.kind, tuple(_replaced(part, point) for part in node.parts), node.name, node.value, node.source)


def _number(value: Fraction) -> Node:
    return Node("number", value=value)


def _hundredth(node: Node) -> Node:
    return (
        Node("*", (node, Node("^", (_number(Fraction(10)), _number(Fraction(-2))))))
        if decimal_of(node)
        else Node("/", (node, _number(Fraction(100))), source=f"\\frac{{{node.source}}}{{100}}")
    )


def _without_unit(node: Node) -> Node:
    return node.parts[0] if node.kind == "unit" else node


def _large(node: Node) -> int:
    """The number that a word behind the value stands for, as in 1.5 million; 1 if there is none."""
    match = _LARGE.match(node.name) if node.kind == "unit" else None
    return 10 ** _LARGE_POWERS[match[0].lower()] if match else 1


def _times(node: Node, factor: int) -> Node:
    power = Node("^", (_number(Fraction(10)), _number(Fraction(len(str(factor)) - 1))))
    return node if factor == 1 else Node("*", (node, power), source=f"{factor} \\cdot ({node.source})")


def _known_unit(name: str) -> str:
    """The unit's usual sign; empty if a part of it is not known."""
    if name.startswith("mod "):
        return name
    name = name.replace(".", "")
    words = re.findall(r"[A-Za-z]+", name)
    return (
        re.sub(r"[A-Za-z]+", lambda match: UNITS[match[0]], name)
        if words and all(word in UNITS for word in words)
        else ""
    )


def _digits_of(node: Node) -> str:
    return node.name.partition(" ")[0] if node.kind == "based" else node.source


def _agree(given: str, wanted: str) -> bool:
    """Whether the bases of two numbers are the same, or one has none."""
    bases = [name.partition(" ")[2] for name in (given, wanted)]
    return bases[0] == bases[1] or not all(bases)


def _fraction_parts(node: Node) -> tuple[Node, ...]:
    return node.parts if node.kind == "/" else (node, _number(Fraction(1)))


def _is_plain(node: Node) -> bool:
    """Whether it is a numeral: an integer, decimal, fraction or mixed number, with sign and power of ten."""
    match node.kind:
        case "number":
            return True
        case "neg" | "unit" | "degree":
            return _is_plain(node.parts[0])
        case "/":
            return all(map(_is_plain, node.parts))
        case "+":  # of a mixed number
            return "+" not in node.source and "-" not in node.source and all(map(_is_plain, node.parts))
        case "*":
            return decimal_of(node) is not None or (
                _is_plain(node.parts[0])
                and exact_value(node.parts[1]) is not None
                and node.parts[1].kind == "^"
                and exact_value(node.parts[1].parts[0]) == 10
            )
    return False


def _is_rounded(given: Node, wanted: Node) -> bool:
    """Whether one is a decimal, and the other no decimal and no integer, whose value it has to the digits it shows."""
    one, other = decimal_of(given), decimal_of(wanted)
    rounded, full = (one, wanted) if one is not None else (other, given)
    if rounded is None or rounded.digits < _MIN_DIGITS or (one is not None and other is not None):
        return False
    exact = exact_value(full)
    if exact is not None and exact.denominator == 1:
        return False
    try:
        value = constant_value(full)
        return value.imag == 0 and is_rounded(rounded, value.real)
    except NoValueError:
        return False


# --- the second way ---


def _confirmed(given: Node, wanted: Node) -> bool:
    """Whether another reader and sympy find two expressions equal too."""
    if given.source == wanted.source:
        return True
    first, second = _by_sympy(given.source), _by_sympy(wanted.source)
    if first is None or second is None:
        return False
    names = sorted(map(str, first.free_symbols | second.free_symbols))
    num_compared = 0
    for number in range(_SECOND_POINTS if names else 1):
        draw = random.Random(f"second {number}")
        # below 1.5, so that no tower of powers is too large to be computed
        point = {
            name: sympy.Float(f"0.{draw.randint(5, 9)}{draw.getrandbits(64)}", 60) + draw.randint(0, 5) / 10
            for name in names
        }
        if "i" in point:
            point["i"] = sympy.I
        values = [_numeric(each, point) for each in (first, second)]
        if any(value is None for value in values):
            continue
        num_compared += 1
        size = max(map(abs, values))
        if abs(values[0] - values[1]) > size * sympy.Float(10) ** (10 - _SECOND_DIGITS):
            return False
    return num_compared > 0


def _numeric(expression: sympy.Expr, point: dict[str, sympy.Expr]) -> Any:
    """The value at a point; None if it is not finite."""
    found = expression.subs({symbol: point[str(symbol)] for symbol in expression.free_symbols})
    found = found.doit().replace(_is_odd_root, lambda root: sympy.Integer(-1) ** root.exp.p)
    value = sympy.N(found, _SECOND_DIGITS)
    return value if value.is_number and value.is_finite else None


def _is_odd_root(expression: sympy.Basic) -> bool:
    """Whether it is a root of -1 that has a real value, which sympy does not take."""
    is_power = (
        isinstance(expression, sympy.Pow) and expression.base == -1 and isinstance(expression.exp, sympy.Rational)
    )
    return is_power and expression.exp.q % 2 == 1 and expression.exp.q > 1


def _by_sympy(source: str) -> sympy.Expr | None:
    """An expression of sympy's by latex2sympy2_extended; None if it cannot read the text."""
    source = re.sub(r"(\d+(?:\.\d+)?)\s*\\degree", r"{(\\frac{\1\\cdot\\pi}{180})}", source)
    source = source.replace("\\lg", "\\log_{10}").replace("%", "\\%")
    source = _DECIMAL.sub(lambda each: f"(\\frac{{{int(each[1] + each[2])}}}{{{10 ** len(each[2])}}})", source)
    source = _BEFORE_BINOMIAL.sub(r"\\cdot ", source)
    source = _BARE_ARGUMENT.sub(r"\1(\2)", source)
    try:
        found = latex2sympy(source, conversion_config=_CONVERSION)
    except Exception:  # noqa: BLE001  it raises Exception itself
        return None
    return found if isinstance(found, sympy.Expr) else None
