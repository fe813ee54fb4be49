"""Units of values, and the large numbers that are written as words."""

from __future__ import annotations

import re
from fractions import Fraction

from tlt_hpc.rewards.mathematics.node import Node, UnreadableError, number_node

UNITS = {
    word: unit
    for unit, words in {
        "mm": "mm millimeter millimeters millimetre millimetres",
        "cm": "cm centimeter centimeters centimetre centimetres",
        "m": "m meter meters metre metres", "km": "km kilometer kilometers kilometre kilometres",
        "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard yards", "mi": "mi mile miles",
        "mg": "mg milligram milligrams", "g": "g gram grams", "kg": "kg kilogram kilograms",
        "lb": "lb lbs pound pounds",
        "ms": "ms millisecond milliseconds", "s": "s sec second seconds", "min": "min minute minutes",
        "h": "h hr hrs hour hours", "day": "day days", "week": "week weeks", "month": "month months",
        "year": "year years", "ml": "ml mL milliliter milliliters", "l": "L l liter liters litre litres",
        "rad": "rad radian radians", "am": "am", "pm": "pm", "degC": "degC", "degF": "degF",
    }.items()
    for word in words.split()
}  # fmt: skip
"""Units that are told apart by name; with all others a number is read as it is without them."""
MIN_WORD = 3
"""Letters of a word that is a unit behind a blank; fewer are a product, unless the unit is known."""
_MAX_UNIT_WORDS = 5
_NO_UNIT = re.compile(
    r"\b(?:or|less|more|least|most|fewer|greater|not|no|wrong|incorrect|if|unless|than|hundred|dozen|times|other|plus|minus)\b"
)
"""Words that change the value before them."""
_LARGE = re.compile(r"(?:thousand|million|billion|trillion)", re.IGNORECASE)
_LARGE_POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}


def unit_name(words: str) -> str:
    """The words behind a value as the name of a unit, without layout.

    Raises:
        UnreadableError: they are no unit.
    """
    if _NO_UNIT.search(words) or len(re.findall(r"[A-Za-z]+", words)) > _MAX_UNIT_WORDS:
        raise UnreadableError("words that are no unit")
    return re.sub(r"\\text\s*|[{}\s]", "", words)


def without_unit(node: Node) -> Node:
    """The value of a node with a unit; another node as it is."""
    return node.parts[0] if node.kind == "unit" else node


def factor_of_word(node: Node) -> int:
    """The number that a word behind the value stands for, as in 1.5 million; 1 if there is none."""
    match = _LARGE.match(node.name) if node.kind == "unit" else None
    return 10 ** _LARGE_POWERS[match[0].lower()] if match else 1


def times(node: Node, factor: int) -> Node:
    """The node times ``factor``, a power of ten."""
    power = Node("^", (number_node(Fraction(10)), number_node(Fraction(len(str(factor)) - 1))))
    return node if factor == 1 else Node("*", (node, power), source=f"{factor} \\cdot ({node.source})")


def known_unit(name: str) -> str:
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
