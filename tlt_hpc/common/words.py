"""Numbers in sentences."""

from __future__ import annotations


def count(number: int | float, noun: str) -> str:
    """``1 step``, ``2,000 steps``, ``2 passes``; the number is rounded to a whole one."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{number:,.0f} {noun if round(number) == 1 else noun + ending}"
