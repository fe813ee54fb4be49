"""A response in the making, and the queue of those that wait. Host data only: knows no tensor."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import Request, SampleKey, SamplingParams
from tlt_hpc.rollout.sampling import SamplingRule
from tlt_hpc.rollout.stops import StopStrings


def group_of(key: SampleKey) -> tuple[int, int, int, int]:
    """The GRPO group that a sample belongs to: all samples of one draw of a prompt."""
    return (key.seed, key.stream, key.step, key.draw)


@dataclass
class Response:
    """One request on its way: what it said so far, which pages it holds, how far they are filled."""

    request: Request
    params: SamplingParams
    rule: SamplingRule
    end_token_ids: tuple[int, ...]
    order: int
    """Arrival; earlier ones go first among equal priorities."""
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
    is_stopped: bool = False
    """A stop string has ended it."""
    log_probs: NDArray[np.float32] | None = None
    """Of the response so far, while no row holds them."""
    row: int = -1
    """The row that it has; -1: none."""
    num_read: int = 0
    """Positions whose true features the drafter has surely seen."""

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_tokens)

    @property
    def num_response(self) -> int:
        return len(self.text) - self.prompt_length

    @property
    def prompt(self) -> bytes:
        """What two sequences must share to share keys and values."""
        return self.request.prompt_tokens.astype(np.int64, copy=False).tobytes()

    @property
    def rank(self) -> tuple[int, int]:
        """Lower goes first: by priority, then by arrival."""
        return (-self.params.priority, self.order)


class WaitingQueue:
    """Sequences that hold no pages: new ones, and those that gave theirs up."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Response]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, response: Response) -> None:
        heapq.heappush(self._heap, (response.rank, response))

    def pop(self) -> Response:
        """The first in line."""
        return heapq.heappop(self._heap)[1]

    def drop(self, is_dropped: Callable[[Response], bool]) -> int:
        """Remove sequences; returns how many."""
        kept = [entry for entry in self._heap if not is_dropped(entry[1])]
        dropped = len(self._heap) - len(kept)
        self._heap = kept
        heapq.heapify(self._heap)
        return dropped
