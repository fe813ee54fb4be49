"""Tells the kinds of parts of an answer apart, and rewrites a part in other forms, for the comparison."""

from __future__ import annotations

import re
from fractions import Fraction

from tlt_hpc.rewards.mathematics.exact import exact_value, to_decimal
from tlt_hpc.rewards.mathematics.node import Node, number_node

UNORDERED = ("", "{}")


def simplify(node: Node) -> Node:
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
    if _is_tuple_equation(node):
        pairs = zip(node.parts[0].parts, node.parts[1].parts, strict=True)
        return Node("group", tuple(Node("relation", pair, "=") for pair in pairs))
    if node.kind == "group" and node.name in UNORDERED:
        items = [simplify(item) if _num_sign_choices(item) else item for item in node.parts]
        flat = [
            part for item in items for part in (item.parts if item.kind == "group" and item.name == "" else (item,))
        ]
        return Node("group", tuple(flat), node.name, source=node.source)
    if node.kind == "relation" and node.name == "=" and _num_sign_choices(node.parts[1]) == 1:
        return simplify(node.parts[1])
    if node.kind not in ("relation", "group") and _num_sign_choices(node) == 1:  # of several each may have its own
        return Node("group", (_resolve_plus_minus(node, "+"), _resolve_plus_minus(node, "neg")))
    return node


def _num_sign_choices(node: Node) -> int:
    return (node.kind == "pm") + sum(map(_num_sign_choices, node.parts))


def _resolve_plus_minus(node: Node, sign: str) -> Node:
    """The expression with one sign for each plus-minus."""
    parts = tuple(_resolve_plus_minus(part, sign) for part in node.parts)
    if node.kind != "pm":
        return Node(node.kind, parts, node.name, node.value, _replace_plus_minus_sign(node.source, sign))
    last = Node("neg", parts[-1:], source=f"-({parts[-1].source})") if sign == "neg" else parts[-1]
    source = _replace_plus_minus_sign(node.source, sign)
    return (
        Node("+", (parts[0], last), source=source)
        if len(parts) > 1
        else Node(last.kind, last.parts, last.name, last.value, source)
    )


def _replace_plus_minus_sign(source: str, sign: str) -> str:
    return re.sub(r"\\pm(?![A-Za-z])", "+" if sign == "+" else "-", source)


def _is_tuple_equation(node: Node) -> bool:
    """True for an equation of tuples such as (x, y) = (1, 2)."""
    if not is_equation(node) or len(node.parts) != 2 or {part.kind for part in node.parts} != {"group"}:
        return False
    names, values = node.parts
    return len(names.parts) == len(values.parts) > 1 and all(part.kind == "symbol" for part in names.parts)


def as_group(node: Node) -> Node:
    """The node itself if it is a group, else a group of this one part."""
    return node if node.kind == "group" else Node("group", (node,))


def may_be_same_list(given: Node, wanted: Node) -> bool:
    """True if lists with other brackets may be equal in order: "(1,2)" may be an interval, three numbers are none."""
    if given.name == wanted.name:
        return True
    names = {given.name, wanted.name}
    if "{}" in names or names & {"(]", "[)"}:
        return False
    return len(wanted.parts) > 2 or (wanted.name == "" and given.name == "()")


def is_equation(node: Node) -> bool:
    """True if it is a relation of equalities or approximations alone."""
    return node.kind == "relation" and set(node.name.split()) <= {"=", "~", "=="}


def bare_source(node: Node) -> str:
    """The source without what may be left out."""
    return re.sub(r"[{}\s]", "", node.source)


def terms(node: Node) -> list[Node]:
    """The terms of a sum, without their signs."""
    return [term for part in node.parts for term in terms(part)] if node.kind in ("+", "neg") else [node]


def can_name_value(node: Node) -> bool:
    """True if it can name a value: x, f(x), (x, y)."""
    if node.kind == "symbol":
        return node.name not in ("pi", "e", "oo")
    if node.kind == "*":
        return (
            node.parts[0].kind == "symbol"
            and node.source.rstrip().endswith(")")
            and all(map(can_name_value, node.parts))
        )
    return node.kind == "group" and bool(node.parts) and all(map(can_name_value, node.parts))


def difference_of_sides(node: Node) -> Node:
    """The first side of a relation less the second."""
    first, second = node.parts
    return Node("+", (first, Node("neg", (second,))), source=f"({first.source})-({second.source})")


def smaller_side_first(node: Node) -> Node:
    """The relation with its smaller side first."""
    return Node("relation", node.parts[::-1], node.name.replace(">", "<")) if ">" in node.name else node


def strictness(node: Node) -> str | None:
    """The sign of an inequality as if its smaller side were the first: ``<`` or ``<=``; None for other relations."""
    return {"<": "<", ">": "<", "<=": "<=", ">=": "<="}.get(node.name)


def substitute_values(node: Node, point: dict[str, Fraction]) -> Node:
    """The expression with values in place of the variables that ``point`` names."""
    if node.kind == "symbol" and node.name in point:
        return number_node(point[node.name])
    return Node(
        node.kind, tuple(substitute_values(part, point) for part in node.parts), node.name, node.value, node.source
    )


def divide_by_100(node: Node) -> Node:
    """The node divided by 100; a decimal keeps its digits."""
    return (
        Node("*", (node, Node("^", (number_node(Fraction(10)), number_node(Fraction(-2))))))
        if to_decimal(node)
        else Node("/", (node, number_node(Fraction(100))), source=f"\\frac{{{node.source}}}{{100}}")
    )


def digits_of(node: Node) -> str:
    """The digits of a number in a base, without the base; of another node its source."""
    return node.name.partition(" ")[0] if node.kind == "based" else node.source


def bases_agree(given: str, wanted: str) -> bool:
    """True if the bases of two numbers are the same, or one has none."""
    bases = [name.partition(" ")[2] for name in (given, wanted)]
    return bases[0] == bases[1] or not all(bases)


def fraction_parts(node: Node) -> tuple[Node, ...]:
    """Numerator and denominator; the denominator is 1 if it is no fraction."""
    return node.parts if node.kind == "/" else (node, number_node(Fraction(1)))


def is_numeral(node: Node) -> bool:
    """True if it is a numeral: an integer, decimal, fraction or mixed number, with sign and power of ten."""
    match node.kind:
        case "number":
            return True
        case "neg" | "unit" | "degree":
            return is_numeral(node.parts[0])
        case "/":
            return all(map(is_numeral, node.parts))
        case "+":  # of a mixed number
            return "+" not in node.source and "-" not in node.source and all(map(is_numeral, node.parts))
        case "*":
            return to_decimal(node) is not None or (
                is_numeral(node.parts[0])
                and exact_value(node.parts[1]) is not None
                and node.parts[1].kind == "^"
                and exact_value(node.parts[1].parts[0]) == 10
            )
    return False
