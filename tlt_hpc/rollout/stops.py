"""Stop strings: the token at which one of them first stands complete in a response. Knows no engine and no batch.

A token is judged from a window of the tokens up to it, so the answer is a function of the response alone: it does not
matter how many tokens a round emitted. Work per token is bounded by the longest stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"
"""The character that decoders put for bytes that are no whole character (yet)."""
LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character."""


class StopStrings:
    """Finds where a response ends by its text; one object serves all responses with the same stop strings."""

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        """``decode`` turns token ids into text, some of them perhaps into nothing; no string is empty."""
        self._strings = tuple(strings)
        self._decode = decode
        # every token that shows has at least one byte; one token more keeps what a decoder strips from its first
        self._window = max((len(string.encode()) for string in strings), default=0) + 1
        self._reach = self._window + LONGEST_CHARACTER - 1
        self._is_silent: dict[int, bool] = {}

    def first_stop(self, tokens: Sequence[int], unchecked: int = 0, start: int = 0) -> int | None:
        """Index of the first token, from ``unchecked`` on, that completes a stop string; None where none does.

        The response begins at ``start``: a caller that cut it out would copy all of it in each round.
        """
        if not self._strings:
            return None
        shown = self._visible_tokens_before(tokens, unchecked, start)
        for index in range(unchecked, len(tokens)):
            if self._decodes_to_nothing(tokens[index]):
                continue
            shown.append(tokens[index])
            del shown[: -self._reach]
            if self._completes_stop_string(shown):
                return index
        return None

    def _visible_tokens_before(self, tokens: Sequence[int], end: int, start: int) -> list[int]:
        """The last tokens before ``end`` that show in the text, as many as the next one's window can need."""
        shown: list[int] = []
        index = end - 1
        while index >= start and len(shown) < self._reach:
            if not self._decodes_to_nothing(tokens[index]):
                shown.append(tokens[index])
            index -= 1
        return shown[::-1]

    def _decodes_to_nothing(self, token: int) -> bool:
        """True if a token decodes to nothing; asked of a pair, for decoders that strip the first token's space."""
        if token not in self._is_silent:
            self._is_silent[token] = not self._decode([token, token])
        return self._is_silent[token]

    def _completes_stop_string(self, shown: list[int]) -> bool:
        """True if a stop string ends in the text of the last token of ``shown``."""
        start, text = self._decode_window(shown)
        ends = [text.rfind(string) + len(string) for string in self._strings if string in text]
        if not ends:
            return False
        before = self._decode(shown[start:-1])
        return max(ends) > _num_common_characters(before, text)

    def _decode_window(self, shown: list[int]) -> tuple[int, str]:
        """Start of the window, up to three tokens early so as not to split a character, and its text.

        Decoders with byte fallback make nothing of a run of bytes of which one is broken. A whole character after more
        than that many broken bytes is read here, where decoding all from the start would hide it.
        """
        latest = max(0, len(shown) - self._window)
        text = ""
        for start in range(latest, max(0, latest - LONGEST_CHARACTER + 1) - 1, -1):
            text = self._decode(shown[start:])
            if not text.startswith(BROKEN):
                break
        return start, text


def _num_common_characters(before: str, after: str) -> int:
    """Characters at the front that two texts share: the last token may complete a character of the first."""
    pairs = enumerate(zip(before, after, strict=False))
    return next((index for index, (old, new) in pairs if old != new), min(len(before), len(after)))
