"""What a counter of energy gives, and why there may be none."""

from __future__ import annotations

from typing import Protocol


class NoCounterError(Exception):
    """A counter that cannot be read; its text says why, in a few words."""


class Counter(Protocol):
    """Energy as it adds up."""

    def joules(self) -> float:
        """Joules since some moment before; only differences mean something.

        Raises:
            NoCounterError: it can be read no longer.
        """

    def close(self) -> None:
        """Let go of what it holds."""
