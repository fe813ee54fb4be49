"""What an idle rank trains on: its own finished responses of this step, and everybody's of the previous one.

Early finishers are short and the tail is long, so the previous step's long responses stand in for those that are
still being written (one step off, TLT section 4.2). Knows the feature cache, no loss and no weights.
"""

from __future__ import annotations

import logging
import random

from tlt_hpc.drafting.packing import Excerpt, whole
from tlt_hpc.storage.feature_cache import Document, Documents, FeatureCache, FeatureCacheReader
from tlt_hpc.storage.hdf5 import DamagedFile

logger = logging.getLogger(__name__)

_LEAST_LENGTH = 2
"""Of a response: a pair that predicts one of its tokens needs the feature after it."""


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
                if length >= _LEAST_LENGTH:
                    self._places.append((which, index))
                    self._weights.append(float(length))

    def __len__(self) -> int:
        return len(self._places)

    def draw(self, num_tokens: int) -> list[Excerpt]:
        """Excerpts of distinct documents, at most ``num_tokens`` pairs together, drawn until the next would not fit.

        The first is cut to a random window where it is longer than that; the others are whole.
        """
        drawn: list[Excerpt] = []
        taken: set[tuple[int, int]] = set()
        room = num_tokens
        for place in self._random.choices(self._places, self._weights, k=min(len(self._places), num_tokens)):
            if place in taken:
                continue
            document = self._read(place)
            if document is None:
                continue
            excerpt = self._cut(whole(document), num_tokens)
            if excerpt.num_pairs > room:
                break
            taken.add(place)
            drawn.append(excerpt)
            room -= excerpt.num_pairs
        return drawn

    def _cut(self, excerpt: Excerpt, num_pairs: int) -> Excerpt:
        """A random window of at most ``num_pairs`` that begins in the response, or just before it."""
        spare = excerpt.num_pairs - num_pairs
        if spare <= 0:
            return excerpt
        first = min(spare, max(0, excerpt.document.prompt_length - 2))
        return Excerpt(excerpt.document, self._random.randint(first, spare), num_pairs)

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
