"""The tree of an answer that was read as mathematics."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

_MAX_TREE_DEPTH = 150


class UnreadableError(ValueError):
    """The text is no mathematics that this grammar has."""


@dataclass(frozen=True)
class Node:
    """A part of an answer: ``kind`` with ``parts``, and the ``source`` that it was read from.

    Kinds: ``number`` (``value``), ``symbol`` and ``text`` (``name``); operations by name, ``+ * / ^ neg pm ! sqrt``
    and functions; ``percent`` and ``degree``; ``group`` (``name``: its two brackets, empty for a list without),
    ``relation`` (``name``: its signs, separated by blanks), ``cup cap setminus``, ``or`` and ``and`` of relations,
    ``builder`` (variable and condition), ``ratio``, ``matrix`` of ``row``, and ``based`` (digits and base in ``name``).
    """

    kind: str
    parts: tuple[Node, ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)
    source: str = ""
    depth: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", 1 + max((part.depth for part in self.parts), default=0))
        if self.depth > _MAX_TREE_DEPTH:
            raise UnreadableError("too many operations")


def number_node(value: Fraction) -> Node:
    """A number that nothing was read from."""
    return Node("number", value=value)
