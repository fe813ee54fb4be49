"""Responses that are being generated, those of a later step among them, and how much of these fits in one step.

Host data only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import FinishReason, Request, Rollout, SampleKey, SamplingParams
from tlt_hpc.rollout.sampling import SamplingRule
from tlt_hpc.rollout.stops import StopStrings
from tlt_hpc.rollout.stored_text import StoredText


@dataclass(eq=False)
class Response:
    """One request: its text so far, the pages it holds, and how far they are filled."""

    request: Request
    params: SamplingParams
    rule: SamplingRule
    order: int
    """Arrival; earlier ones are admitted first and preempted last."""
    stops: StopStrings | None = None
    text: list[int] = field(default_factory=list)
    """Prompt and response tokens so far."""
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    """Positions from the front whose keys and values are in the pages, while it is being prefilled."""
    pass_lengths: bytearray = field(default_factory=bytearray)
    """Tokens that each pass has emitted."""
    num_learned: int = 0
    """Tokens that the n-gram table has seen."""
    num_checked: int = 0
    """Response tokens that the stop strings have seen."""
    is_ahead: bool = False
    """It belongs to a later step, in which its text is drafts."""
    is_stopped: bool = False
    """A stop string has ended it."""
    log_probs: NDArray[np.float32] | None = None
    """Log-probs [R] of the response so far, while no row holds them."""
    row: int = -1
    """The row that it has; -1: none."""
    num_read: int = 0
    """Positions whose true features the drafter has surely seen."""
    stored: StoredText | None = None
    """Its text under the weights before."""

    def __post_init__(self) -> None:
        self.prompt_length = len(self.request.prompt_tokens)
        self.prompt = self.request.prompt_tokens.astype(np.int64, copy=False).tobytes()
        """The prompt's bytes: sequences that share them share its keys and values."""
        self.longest = self.prompt_length + self.params.max_tokens
        """Length of its text at which it has its last token."""

    @property
    def num_response_tokens(self) -> int:
        """Number of response tokens so far."""
        return len(self.text) - self.prompt_length

    @property
    def num_tokens_left(self) -> int:
        """Tokens that it may still get."""
        return self.longest - len(self.text)

    @property
    def response_tokens(self) -> NDArray[np.int32]:
        """Response tokens [R] so far."""
        return np.array(self.text[self.prompt_length :], np.int32)

    def finish_reason(self, has_ended: bool) -> FinishReason | None:
        """Reason why it has ended, or None; ``has_ended``: by its last token, or a stop string."""
        if has_ended:
            return FinishReason.STOP if self.is_stopped else FinishReason.EOS
        return FinishReason.LENGTH if self.row >= 0 and self.num_tokens_left <= 0 else None

    def to_rollout(self, reason: FinishReason, log_probs: NDArray[np.float32], weight_version: int) -> Rollout:
        """The finished response, with log-probs [R]."""
        return Rollout(
            key=self.request.key,
            prompt_tokens=self.request.prompt_tokens,
            response_tokens=self.response_tokens,
            log_probs=log_probs,
            finish_reason=reason,
            weight_version=weight_version,
            num_target_passes=len(self.pass_lengths),
            finished_seconds=time.time(),
            pass_lengths=np.frombuffer(bytes(self.pass_lengths), np.uint8),
        )


Texts = dict[SampleKey, NDArray[np.int32]]

_STEP_SECONDS = 0.02
"""Longest step, prefill and round: it must not delay the end of a rollout."""
_ROWS_AT_ONCE, _MIN_PREFILL, _DEVICE_PREFILL = 8, 64, 512
"""Rows that are added at once, as long as there is time left, and tokens of prefill chunks: at least on a host, and
always on a device.
"""


class AheadQueue:
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

    def take_next_responses(self, num_free: int, has_rows: bool) -> list[Response]:
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

    def end_and_keep_texts(self) -> None:
        """Continue none of them: the weights change. The texts are kept, complete or not."""
        for response in self.waiting:
            if response.num_response_tokens:
                self.keep_text(response)
        self.waiting = []

    def take_finished_texts(self) -> Texts:
        """All texts, which are forgotten here."""
        taken, self._texts = self._texts, {}
        return taken

    def keep_text(self, response: Response) -> None:
        """Keep the text of a response."""
        self._texts[response.request.key] = response.response_tokens
