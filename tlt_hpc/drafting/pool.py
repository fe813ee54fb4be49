"""What an idle rank trains on: its own finished responses of this step, and everybody's of the previous one.

Early finishers are short and the tail is long, so the previous step's long responses stand in for those that are
still being written (one step off, TLT section 4.2). Knows the feature cache, no loss and no weights.
"""

from __future__ import annotations

import logging
import random

from tlt_hpc.storage.feature_cache import Document, Documents, FeatureCache, FeatureCacheReader
from tlt_hpc.storage.hdf5 import DamagedFile

logger = logging.getLogger(__name__)

_LEAST_FEATURES = 2
"""A pair needs the feature after it."""


class TrainingPool:
    """Documents of one step's tail, drawn with chances in proportion to their response length."""

    def __init__(self, cache: FeatureCache, random_source: random.Random) -> None:
        self._random = random_source
        self._readers = [FeatureCacheReader(path) for path in sorted(cache.previous_step_files())]
        self._own: Documents = cache.own_documents()
        self._places: list[tuple[int, int]] = []
        self._weights: list[float] = []
        sources: list[Documents] = [self._own, *self._readers]
        for which, reader in enumerate(sources):
            for index, length in enumerate(reader.lengths.tolist()):
                if length >= _LEAST_FEATURES:
                    self._places.append((which, index))
                    self._weights.append(float(length))

    def __len__(self) -> int:
        return len(self._places)

    def draw(self, num_tokens: int) -> list[Document]:
        """Distinct documents of about ``num_tokens`` tokens together: never more, but at least one."""
        drawn: list[Document] = []
        taken: set[tuple[int, int]] = set()
        total = 0
        for place in self._random.choices(self._places, self._weights, k=min(len(self._places), num_tokens)):
            if place in taken:
                continue
            document = self._read(place)
            if document is None:
                continue
            if drawn and total + len(document.tokens) > num_tokens:
                break
            taken.add(place)
            drawn.append(document)
            total += len(document.tokens)
        return drawn

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def _read(self, place: tuple[int, int]) -> Document | None:
        """The document at a place; None where its bytes are damaged, for a cache file is never worth a run."""
        which, index = place
        try:
            return (self._own if which == 0 else self._readers[which - 1]).read(index)
        except DamagedFile as error:
            logger.warning("left out of the drafter's training: %s", error)
            return None
