"""Drafts from texts that were generated ahead: a response under the weights before, with the same noise.

The noise of a response is fixed by its key, and one update changes the weights little, so long stretches of the two
texts are equal. Each response has a cursor into its stored text: it moves on with the response, and after a difference
to where the last tokens occur again.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

SURE = 16
"""Tokens in agreement from which on a cursor is taken to stand in the right place."""
_UNSURE_DRAFTS = 8
_MIN_DRAFTS = 3
"""Fewer are left to the other sources."""
_CONTEXT = 4
"""Tokens that must agree where a lost cursor is placed again."""
_MAX_PLACES = 64
"""Places that are compared there, the nearest ones: a text that repeats itself to its end has thousands."""
_GIVEN_UP = 64
"""Tokens after which a cursor that is lost stays so."""


class StoredText:
    """A text that was generated ahead, and the cursor of a response in it."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._next = 0
        """Index of the token that is expected next; -1: lost."""
        self._num_agreed = SURE
        """Tokens in a row, before the cursor, that were equal."""
        self._num_seen = self._shift = self._lost_at = 0
        self._places: dict[tuple[int, ...], list[int]] | None = None
        self.num_drafts = 0
        """Drafts that it has for the next round, as ``follow_response`` found."""

    @property
    def is_sure(self) -> bool:
        """True if the last ``SURE`` tokens of the response stand before the cursor."""
        return self._num_agreed >= SURE

    @property
    def is_spent(self) -> bool:
        """True if it has no further drafts."""
        if self._next < 0:
            return self._num_seen - self._lost_at > _GIVEN_UP
        return self._next >= len(self._tokens)

    def follow_response(self, text: Sequence[int], start: int, room: int) -> None:
        """Follow a response that begins at ``start`` of its ``text`` and may get ``room`` more tokens."""
        self._advance(text, start)
        left = len(self._tokens) - self._next if self._next >= 0 else 0
        count = min(left, room, len(self._tokens) if self.is_sure else _UNSURE_DRAFTS)
        self.num_drafts = count if count >= _MIN_DRAFTS else 0

    def next_drafts(self, most: int) -> list[int]:
        """The next tokens of the text, at most so many and no more than ``num_drafts``."""
        return self._tokens[self._next : self._next + min(most, self.num_drafts)]

    def _advance(self, text: Sequence[int], start: int) -> None:
        new = text[start + self._num_seen :]
        self._num_seen += len(new)
        if self._next >= 0:
            expected = self._tokens[self._next : self._next + len(new)]
            if expected == new:
                self._next += len(new)
                self._num_agreed += len(new)
                return
            self._shift, self._lost_at = self._next - (self._num_seen - len(new)), self._num_seen
        self._place_cursor(text)

    def _place_cursor(self, text: Sequence[int]) -> None:
        """Put the cursor where most of the last tokens occur, nearest to where it would have been; else nowhere."""
        self._next, self._num_agreed = -1, 0
        if self._num_seen < _CONTEXT:
            return
        if self._places is None:
            self._places = {}
            for end in range(_CONTEXT, len(self._tokens)):
                self._places.setdefault(tuple(self._tokens[end - _CONTEXT : end]), []).append(end)
        found = self._places.get(tuple(text[-_CONTEXT:]))
        if found is None:
            return
        expected = self._num_seen + self._shift
        middle = bisect(found, expected)
        near = found[max(0, middle - _MAX_PLACES // 2) : middle + _MAX_PLACES // 2]
        agreed = [(self._num_equal_tokens(text, end), end) for end in near]
        self._num_agreed, self._next = max(agreed, key=lambda one: (one[0], -abs(one[1] - expected)))

    def _num_equal_tokens(self, text: Sequence[int], end: int) -> int:
        """Number of tokens before ``end`` that are the last of the response, up to ``SURE``."""
        most = min(end, self._num_seen, SURE)
        return next((i for i in range(_CONTEXT, most) if self._tokens[end - 1 - i] != text[-1 - i]), most)
