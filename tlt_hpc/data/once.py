"""Prompts that one rank of a node reads and the others are given. Knows neither files nor MPI."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tlt_hpc.common.records import Prompt
from tlt_hpc.data.prompts import PromptSource

Once = Callable[[Callable[[], Any]], Any]
"""Calls a function on the node's first rank, and returns on all of them what it returned there."""


class ReadOnce:
    """A source of prompts as ``PromptSource``; ``batch`` and ``refill`` are collective over the node.

    Args:
        source: None on all ranks but the node's first.
        warning: its warning.
    """

    def __init__(self, source: PromptSource | None, warning: str, once: Once) -> None:
        self._source, self._once, self.warning = source, once, warning

    def batch(self, step: int) -> list[Prompt]:
        prompts: list[Prompt] = self._once(lambda: self._own.batch(step))
        return prompts

    def refill(self, step: int, count: int) -> list[Prompt]:
        prompts: list[Prompt] = self._once(lambda: self._own.refill(step, count))
        return prompts

    def fingerprints(self) -> Mapping[str, str]:
        """On a node's first rank alone, such as rank 0."""
        return self._own.fingerprints()

    @property
    def _own(self) -> PromptSource:
        assert self._source is not None, "only a node's first rank reads"
        return self._source
