"""The model-free drafter: what followed the same last tokens before, in this response, its siblings or earlier ones.

Knows no weights, no batch and no strategy; plain dictionaries over token tuples.
"""

from __future__ import annotations

from collections.abc import Sequence

_Table = dict[tuple[int, ...], tuple[int, ...]]
_MOST_CONTINUATIONS = 4


class NgramDrafter:
    """Continuations seen after contexts of several lengths, bounded by forgetting the older half."""

    def __init__(self, orders: Sequence[int], history_tokens: int) -> None:
        self.orders = tuple(sorted(set(orders), reverse=True))
        self._history_tokens = history_tokens
        self._recent: _Table = {}
        self._older: _Table = {}
        self._num_recent = 0

    def learn(self, tokens: Sequence[int], start: int) -> None:
        """Remember what followed what, for the tokens from index ``start`` on (those before are context)."""
        for end in range(max(start, 1), len(tokens)):
            following = tokens[end]
            for order in self.orders:
                if order <= end:
                    self._add(tuple(tokens[end - order : end]), following)
        self._num_recent += len(tokens) - start
        if self._num_recent > self._history_tokens // 2:
            self._older, self._recent, self._num_recent = self._recent, {}, 0

    def continuations(self, context: Sequence[int]) -> tuple[int, ...]:
        """Tokens seen after the longest known suffix of ``context``, most recent first; empty where none is known."""
        for order in self.orders:
            if order <= len(context):
                key = tuple(context[len(context) - order :])
                found = self._recent.get(key) or self._older.get(key)
                if found:
                    return found
        return ()

    def _add(self, key: tuple[int, ...], following: int) -> None:
        known = self._recent.get(key) or self._older.get(key, ())
        if not known or known[0] != following:
            known = (following, *(token for token in known if token != following))[:_MOST_CONTINUATIONS]
        self._recent[key] = known
