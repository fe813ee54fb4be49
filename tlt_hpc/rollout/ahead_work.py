"""Responses that an engine generates for a later step, and how much of that fits in one step. Host data only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import SampleKey
from tlt_hpc.rollout.responses import Response

Texts = dict[SampleKey, NDArray[np.int32]]

_STEP_SECONDS = 0.02
"""Longest step, prefill and round: it must not delay the end of a rollout."""
_ROWS_AT_ONCE, _MIN_PREFILL, _DEVICE_PREFILL = 8, 64, 512
"""Rows that are added at once, as long as there is time left, and tokens of prefill chunks: at least on a host, and
always on a device.
"""


class AheadWork:
    """Responses of the next step that are generated under the weights before it."""

    def __init__(self, is_host: bool, is_alone: bool) -> None:
        """``is_alone``: no other rank decodes the same responses. Those that do must not decide by their own clocks."""
        self.waiting: list[Response] = []
        """Begun or not, without a row."""
        self._texts: Texts = {}
        """Texts of those that are complete or were ended."""
        self.round_seconds = 0.0
        """Seconds of the last round that was read."""
        self._prefill_rate = 0.0
        """Positions per second, of the last chunk."""
        self._is_alone, self._times_prefill = is_alone, is_host and is_alone  # a device's chunks are not timed here
        self._min_prefill = _MIN_PREFILL if is_host else _DEVICE_PREFILL

    def next_rows(self, num_free: int, has_rows: bool) -> list[Response]:
        """Take those that may have rows now: a few at a time, so that prefill and round stay short."""
        if self._is_alone:
            num_free = min(num_free, _ROWS_AT_ONCE * (self.round_seconds < _STEP_SECONDS or not has_rows))
        chosen = self.waiting[:num_free]
        del self.waiting[:num_free]
        return chosen

    def prefill_tokens(self, most: int, has_rows: bool) -> int:
        """Tokens of the next prefill chunk, at most ``most``."""
        left = _STEP_SECONDS - (self.round_seconds if has_rows else 0.0)
        fitting = int(left * self._prefill_rate) if self._times_prefill else 0
        return min(most, max(self._min_prefill, fitting))

    def note_prefill(self, num_read: int, seconds: float) -> None:
        """Learn from a chunk how long the next one takes."""
        self._prefill_rate = num_read / max(seconds, 1e-6)

    def end(self) -> None:
        """Continue none of them: the weights change. The texts are kept, complete or not."""
        for response in self.waiting:
            if response.num_response:
                self.keep(response)
        self.waiting = []

    def take(self) -> Texts:
        """All texts, which are forgotten here."""
        taken, self._texts = self._texts, {}
        return taken

    def keep(self, response: Response) -> None:
        """Keep the text of a response."""
        self._texts[response.request.key] = response.response_tokens
