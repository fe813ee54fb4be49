"""What every analysis gives: arrays, a verdict in words, and both as plain JSON. Knows no run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from tlt_hpc.common.words import count as count  # part of how analyses speak


@dataclass(frozen=True)
class Analysis:
    """A question's answer; ``verdict`` is one paragraph, ``problems`` what could not be read and was left out."""

    run: str
    verdict: str
    problems: tuple[str, ...]

    @property
    def has_data(self) -> bool:
        """Whether there is anything to draw."""
        return True

    def to_json(self) -> dict[str, Any]:
        """All fields in types of JSON; what is no number is null."""
        tree = plain(self)
        assert isinstance(tree, dict)
        return tree


def plain(value: Any) -> Any:
    """Arrays as lists, dataclasses as objects, NaN and infinity as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return plain(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def seconds(value: float) -> str:
    """A duration for people: 0.31 ms, 4.2 s, 12 min 5 s, 3 h 20 min."""
    if value < 0.0995:
        return f"{1e3 * value:.2g} ms"
    if value < 100:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def share(part: float, whole: float) -> str:
    """A percentage; of nothing, nothing."""
    if whole <= 0:
        return "0 %"
    percent = 100 * part / whole
    return f"{percent:.0f} %" if percent >= 9.5 or percent == 0 else f"{percent:.1f} %"


def span_of(steps: np.ndarray) -> str:
    """``step 3``, or ``steps 0 to 11``."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def listed(names: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
