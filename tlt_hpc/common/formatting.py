"""Numbers in sentences, names and files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GB = 1_000_000_000
FIRST_STEP = 1
"""Number of the first step in all that a run writes; the code counts from 0."""


def format_count(number: int | float, noun: str) -> str:
    """``1 step``, ``2,000 steps``, ``2 passes``; the number is rounded to a whole one."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{number:,.0f} {noun if round(number) == 1 else noun + ending}"


def format_spans(numbers: Iterable[int]) -> list[str]:
    """Ascending whole numbers with runs of neighbours in one: ``["0", "20-23"]``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return [f"{first}-{last}" if first < last else str(first) for first, last in spans]


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines in which columns are aligned, without blanks at their ends."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def format_bytes(num_bytes: float) -> str:
    """Bytes in words."""
    return f"{few_digits(num_bytes / GB)} GB" if num_bytes >= GB else f"{num_bytes / GB * 1000:.0f} MB"


def few_digits(value: float) -> str:
    """A number with one or two digits after the point."""
    return f"{value:,.1f}" if value >= 9.995 or not value else f"{value:.2f}"
