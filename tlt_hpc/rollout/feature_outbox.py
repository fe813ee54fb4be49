"""Hands the features of finished responses to a sink, for the training of a drafter.

A prompt's features are handed over once, with the first of its responses that finishes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_hpc.rollout.kv_cache import PagedCache
from tlt_hpc.rollout.responses import Response
from tlt_hpc.rollout.transfer import PendingHostCopy

_POSITIONS = 4096
"""Positions of one copy. Pinned memory of one size is used again, while pinning a quarter of a gigabyte for a single
long response would stop the rounds.
"""

FeatureSink = Callable[[NDArray[np.int32], int, NDArray[np.uint16], int], None]
"""sink(tokens [T], prompt length P, features [T - 1 - first, layers, H] as bf16 bits, first): a finished response.

The features are those of the positions from ``first`` on: 0, or P - 1 if the prompt's were handed over before.
"""


@dataclass(frozen=True)
class _PendingFeatures:
    tokens: NDArray[np.int32]
    prompt_length: int
    first: int
    features: list[PendingHostCopy]
    """In the order of their positions."""

    @property
    def is_ready(self) -> bool:
        return all(part.is_ready for part in self.features)

    def wait(self) -> NDArray[np.uint16]:
        parts = [part.wait().numpy() for part in self.features]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class FeatureOutbox:
    """Copies features to the host; they reach the sink in the order in which their responses finished."""

    def __init__(self, cache: PagedCache, hidden_size: int) -> None:
        self._cache, self._hidden_size = cache, hidden_size
        self._queue: deque[_PendingFeatures] = deque()
        self._seen_prompts: set[bytes] = set()
        self._sink: FeatureSink | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def set_sink(self, sink: FeatureSink | None) -> None:
        """Hand the features over to ``sink`` from now on, prompts' included; None: copy none."""
        self._sink = sink
        self.forget_prompts()

    def forget_prompts(self) -> None:
        """Hand prompts' features over again: other weights give other features."""
        self._seen_prompts.clear()

    def start_copy_to_host(self, response: Response) -> None:
        """Start to copy a finished response's features, before its pages are released."""
        if self._sink is None or self._cache.features is None:
            return
        first = response.prompt_length - 1 if response.prompt in self._seen_prompts else 0
        self._seen_prompts.add(response.prompt)
        end = len(response.text) - 1
        parts = [
            PendingHostCopy(
                self._copy_feature_rows(response.row, start, min(start + _POSITIONS, end))
                .to(torch.bfloat16)
                .view(torch.uint16),
                is_own=True,
            )
            for start in range(first, end, _POSITIONS)
        ]
        self._queue.append(_PendingFeatures(np.array(response.text, np.int32), response.prompt_length, first, parts))

    def _copy_feature_rows(self, row: int, start: int, end: int) -> Tensor:
        """A copy of a row's features [end - start, width] at positions from ``start`` on, read by whole pages."""
        assert self._cache.features is not None
        size = self._cache.page_size
        pages = self._cache.tables[row, start // size : -(-end // size)]
        by_page = self._cache.features.view(-1, size, self._cache.features.shape[1])[pages]
        offset = start // size * size
        return by_page.flatten(0, 1)[start - offset : end - offset]

    def deliver(self, wait: bool) -> None:
        """Hand over what has reached the host; with ``wait`` everything."""
        while self._queue and (wait or self._queue[0].is_ready):
            pending = self._queue.popleft()
            if self._sink is not None:
                features = pending.wait()
                rows = features.reshape(len(features), -1, self._hidden_size)
                self._sink(pending.tokens, pending.prompt_length, rows, pending.first)
