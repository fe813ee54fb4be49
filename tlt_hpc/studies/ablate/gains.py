"""Differences between arms with their standard errors.

Arms that have the same text are compared pair by pair: step by step, or response by response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_CLEAR = 2.0
"""Standard errors from which a difference is called one."""


@dataclass(frozen=True)
class Passes:
    """Tokens and target passes of responses [N], in the same order for all arms."""

    tokens: tuple[int, ...]
    passes: tuple[int, ...]

    @property
    def accept_length(self) -> float:
        return sum(self.tokens) / sum(self.passes)


@dataclass(frozen=True)
class Gain:
    """How much more than another an arm has, as a share of the other's, with its standard error (NaN: unknown)."""

    share: float
    error: float

    @property
    def verb(self) -> str:
        """What the arm does to the other; no difference if it lies within the noise, or that is unknown."""
        if not abs(self.share) > _CLEAR * self.error:
            return "does not differ, beyond the noise, from"
        return "beats" if self.share > 0 else "is behind"

    @property
    def text(self) -> str:
        noise = "noise unknown" if math.isnan(self.error) else f"± {100 * self.error:.1f}"
        return f"{100 * self.share:+.1f} % ({noise})"


def gain_in_passes(arm: Passes, other: Passes) -> Gain:
    """Gain in accept length on the same responses; if the arms' texts differ, as ratios of their own.

    Then nothing is taken to be common to the two: their relative errors add up as squares.
    """
    if arm.tokens == other.tokens:
        return ratio(other.passes, arm.passes)  # tokens / passes over tokens / passes: the same tokens cancel
    quotient = arm.accept_length / other.accept_length
    errors = (ratio(each.tokens, each.passes).error / each.accept_length for each in (arm, other))
    return Gain(quotient - 1.0, quotient * math.hypot(*errors))


def ratio(over: Sequence[float], under: Sequence[float]) -> Gain:
    """Sum of ``over`` [N] divided by the sum of ``under`` [N], which are pairs, minus 1 (linearised standard error)."""
    a, b = np.asarray(over, float), np.asarray(under, float)
    quotient = float(a.sum() / b.sum())
    if len(a) < 2:
        return Gain(quotient - 1.0, math.nan)
    rest = a - quotient * b
    return Gain(quotient - 1.0, float(math.sqrt(len(a)) * rest.std(ddof=1) / b.sum()))
