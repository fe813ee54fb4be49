"""Numbers, shares, durations and lists in sentences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MAX_NAMED = 8


def format_seconds(value: float) -> str:
    """A duration in seconds as text: 0.31 ms, 4.20 s, 12 min 5 s, 3 h 20 min."""
    if value < 0.0995:
        return f"{1e3 * value:.2g} ms"
    if value < 100:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_three_digits(value: float) -> str:
    """A number of three digits: 0.0512, 12.3, 4,560."""
    return f"{float(f'{value:.3g}'):,.10g}"


def format_percent(part: float, whole: float) -> str:
    """``part`` as a percentage of ``whole``; ``0 %`` where ``whole`` is not positive."""
    if whole <= 0:
        return "0 %"
    percent = 100 * part / whole
    return f"{percent:.0f} %" if percent >= 9.5 or percent == 0 else f"{percent:.1f} %"


def format_step_range(steps: np.ndarray) -> str:
    """``step 3``, or ``steps 0 to 11``, of ascending steps [S]."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def join_names(names: Sequence[str]) -> str:
    """``a``, ``a and b``, or ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def format_first_few(numbers: Sequence[int]) -> str:
    """The first eight numbers, and ``...`` where there are more."""
    return ", ".join(map(str, numbers[:_MAX_NAMED])) + (", ..." if len(numbers) > _MAX_NAMED else "")
