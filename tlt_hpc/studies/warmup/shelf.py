"""The captured documents of all parts, numbered through; the same on every rank. Reads, and trains nothing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.config import UserError
from tlt_hpc.storage.feature_file import Document, FeatureCacheReader

_LEAST_LENGTH = 2
"""Of a response: a pair that predicts one of its tokens needs the feature after it."""


class Shelf:
    """All documents with a response that can be learned from; a context manager.

    Raises:
        UserError: there is none.
        DamagedFile: a file is truncated or corrupted; its text has the remedy.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._readers = [FeatureCacheReader(path) for path in files]
        lengths = [reader.lengths for reader in self._readers]
        self._starts = np.cumsum([0, *map(len, lengths)]).tolist()
        every: NDArray[np.int64] = np.concatenate([np.empty(0, np.int64), *lengths])
        self._places = np.flatnonzero(every >= _LEAST_LENGTH).tolist()
        self.lengths: list[int] = every[every >= _LEAST_LENGTH].tolist()
        """Response lengths."""
        if not self.lengths:
            self.close()
            raise UserError(
                "no response of two tokens or more to train on; raise warmup.responses or drafter.cache_bytes"
            )

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> Document:
        """One document.

        Raises:
            DamagedFile: its bytes do not match their checksum.
        """
        place = self._places[index]
        which = bisect_right(self._starts, place) - 1
        return self._readers[which].read(place - self._starts[which])

    def share(self, rank: int, num_ranks: int) -> Iterator[Document]:
        """A rank's documents, where the ranks go through all of them once."""
        return map(self.read, range(rank, len(self), num_ranks))

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
