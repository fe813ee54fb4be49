"""Rows of a data set, whatever they lie in: what is asked of them, and what a broken one is. Knows no prompt."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

from tlt_hpc.config import UserError

Row = Mapping[str, Any]


class RowError(UserError):
    """A row that cannot be used; its text names the row and the reason in one line."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason


class Rows(Protocol):
    """Rows by index, read when they are asked for."""

    kind: str
    """What a row's ``data_source`` is where the row names none."""
    name: str
    """The file or task."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """A row.

        Raises:
            RowError: it cannot be read.
        """
        ...

    def where(self, index: int) -> str:
        """The file and line, or row, as a message names it."""
        ...

    def columns(self) -> frozenset[str]:
        """What a row has, dotted where a column lies in another."""
        ...

    def digest(self) -> str:
        """A hash of all that the rows are read from; reads it all."""
        ...


class JoinedRows:
    """Several files one after another, read as one."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))
        self.kind, self.name = parts[0].kind, ", ".join(part.name for part in parts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        part, within = self._place(index)
        return part[within]

    def where(self, index: int) -> str:
        part, within = self._place(index)
        return part.where(within)

    def columns(self) -> frozenset[str]:
        """Those that all files have."""
        return frozenset.intersection(*(part.columns() for part in self._parts))

    def digest(self) -> str:
        return "+".join(part.digest() for part in self._parts)

    def _place(self, index: int) -> tuple[Rows, int]:
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


def nested_columns(tree: Mapping[str, Any]) -> frozenset[str]:
    """The keys of a mapping, and those of the mappings in it as ``outer.inner``."""
    inner = {f"{key}.{name}" for key, value in tree.items() if isinstance(value, Mapping) for name in value}
    return frozenset(tree) | frozenset(inner)


def first_line(error: BaseException) -> str:
    """What an error of another library says, without the lines that follow."""
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
