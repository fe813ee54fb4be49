"""The documents that an idle rank trains on: its finished responses of this step, and all ranks' of the previous one.

Early finishers are short and the tail is long, so the previous step's long responses stand in for those that are
still being written (one step off, TLT section 4.2). Knows the feature cache, no loss and no weights.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_hpc.storage.feature_cache import FeatureCache
from tlt_hpc.storage.feature_file import Document, FeatureCacheReader
from tlt_hpc.storage.feature_writer import OpenDocuments
from tlt_hpc.storage.folder import WriteError
from tlt_hpc.storage.hdf5 import DamagedFile

logger = logging.getLogger(__name__)

LEAST_LENGTH = 2
"""Shortest response to learn from, in tokens: a pair that predicts one of its tokens needs the feature after it."""
_COVERED = 0.25
"""Weight of an earlier response of a length that this step has finished itself: its features are of older weights."""
_LISTING_SECONDS = 2.0
"""How often a shared folder is asked for files of the step before; they appear while slower ranks release."""
_OPENED_AT_ONCE, _MOST_FILES = 8, 64
"""Files opened in one micro-step, and in all: with hundreds of ranks, a sample of them suffices."""


@dataclass(frozen=True)
class _Place:
    """Where a document is."""

    source: OpenDocuments | FeatureCacheReader
    index: int
    prompt_length: int
    num_pairs: int


def sampling_weights(
    own: NDArray[np.int64], previous: Sequence[NDArray[np.int64]]
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """Return the chances, up to a factor, with which each response is drawn.

    Args:
        own: lengths [n] of this step's responses, in tokens.
        previous: by file, the lengths of the previous step's.

    In proportion to length, as tokens come in a rollout. Of the previous step those longer than all that this step has
    finished count in full, since they alone tell of the tail; the others a quarter, since there are newer ones.
    """
    reach = own.max(initial=0)
    weights = [np.where(lengths > reach, 1.0, _COVERED) * lengths.astype(np.float64) for lengths in previous]
    return own.astype(np.float64), weights


class TrainingPool:
    """Documents of one step's tail, drawn with the chances of ``sampling_weights``.

    It grows: own responses come in as they finish, files of the previous step as they appear, a few at a time.
    """

    def __init__(self, cache: FeatureCache, random_source: random.Random) -> None:
        """Read what ``cache`` has of this rank's responses; files of the previous step follow in ``refresh``."""
        self._cache, self._random = cache, random_source
        self._own = cache.own_documents()
        self._readers: dict[Path, FeatureCacheReader] = {}
        self._unopened: list[Path] = []
        self._next_listing = 0.0
        self._damaged: set[_Place] = set()
        self._places: list[_Place] = []
        self._chances: list[float] = []
        self._update_sampling_weights()

    def __len__(self) -> int:
        """Return the number of documents to draw from, as of the last ``refresh``."""
        return len(self._places)

    def refresh(self) -> None:
        """Take in own responses that have finished, and open files that have appeared; once in a micro-step."""
        has_changed = self._open_more_files()
        if not self._own.is_current:
            self._own, has_changed = self._cache.own_documents(), True
        if has_changed:
            self._update_sampling_weights()

    def draw_excerpts(self, num_tokens: int) -> list[Excerpt]:
        """Return excerpts of distinct documents, at most ``num_tokens`` pairs, drawn until the next would not fit.

        The first is cut to a random window where it is longer than that; the others are whole. They are those that
        ``refresh`` last found.
        """
        drawn: list[Excerpt] = []
        taken: set[_Place] = set()
        room = num_tokens
        for _ in range(min(len(self._places), num_tokens)):
            (place,) = self._random.choices(self._places, cum_weights=self._chances)
            if place in taken or place in self._damaged:
                continue
            if min(place.num_pairs, num_tokens) > room:
                break
            taken.add(place)
            excerpt = self._read(place, num_tokens)
            if excerpt is not None:
                drawn.append(excerpt)
                room -= excerpt.num_pairs
        return drawn

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _open_more_files(self) -> bool:
        """Open some files of the step before; whether there were any."""
        if time.monotonic() >= self._next_listing:
            self._next_listing = time.monotonic() + _LISTING_SECONDS
            own_first = [path for path in self._cache.previous_step_files() if path not in self._readers]
            others = own_first[1:]
            self._random.shuffle(others)
            self._unopened = [*own_first[:1], *others]
        count = min(_OPENED_AT_ONCE, _MOST_FILES - len(self._readers))
        now, self._unopened = self._unopened[:count], self._unopened[count:]
        readers = {path: self._cache.open_file(path) for path in now}
        opened = {path: reader for path, reader in readers.items() if reader is not None}
        self._readers.update(opened)
        return bool(opened)

    def _update_sampling_weights(self) -> None:
        """Update the documents and their chances."""
        sources: list[OpenDocuments | FeatureCacheReader] = [self._own, *self._readers.values()]
        own, *previous = [source.lengths for source in sources]
        first, others = sampling_weights(own, previous)
        self._places, weights = [], []
        for source, chances in zip(sources, [first, *others], strict=True):
            prompts, lengths = source.prompt_lengths.tolist(), source.lengths.tolist()
            for index in np.flatnonzero(source.lengths >= LEAST_LENGTH).tolist():
                pairs = prompts[index] + lengths[index] - 2
                self._places.append(_Place(source, index, prompts[index], pairs))
                weights.append(float(chances[index]))
        self._chances = list(accumulate(weights))

    def _read(self, place: _Place, most: int) -> Excerpt | None:
        """A document, or a window of at most so many pairs that begins in the response or just before it.

        None where it gave way meanwhile, or its bytes are damaged, for a cache file is never worth a run.
        """
        spare = max(0, place.num_pairs - most)
        start = self._random.randint(min(spare, max(0, place.prompt_length - 2)), spare) if spare else 0
        num_pairs = place.num_pairs - spare
        try:
            document: Document | None = place.source.read(place.index, start, num_pairs + 1)
        except DamagedFile as error:
            logger.warning("left out of the drafter's training: %s", error)
            self._damaged.add(place)
            return None
        except WriteError as error:  # of the own open file
            self._cache.drop_file_with_warning(error)
            return None
        return Excerpt(document, start, num_pairs) if document is not None else None


# -- batches ----------------------------------------------------------------------------------------------------------
#
# Documents packed into one flat batch without padding; they never see each other. Pure tensors. Shapes: ``T`` packed
# pairs, ``H`` hidden, ``F`` features of a position, side by side, the last hidden state last. Pair i of a document
# joins the token at i + 1 with the features at i, and is to predict the last hidden state at i + 1, from which the head
# reads token i + 2.


@dataclass(frozen=True)
class PackedBatch:
    """Flat pairs of several documents."""

    next_tokens: Tensor
    """[T] int64, the token at i + 1."""
    features: Tensor
    """[T, F] the target's features at i."""
    wanted: Tensor
    """[T, H] the target's last hidden state at i + 1."""
    positions: Tensor
    """[T] int64, i within its document."""
    documents: Tensor
    """[T] int64, the number of the pair's document."""
    counts: Tensor
    """[T] bool, True where the pair predicts a response token."""
    lengths: tuple[int, ...]
    """Pairs of each document."""

    @property
    def num_tokens(self) -> int:
        """The number of pairs, T."""
        return len(self.next_tokens)


@dataclass(frozen=True)
class Excerpt:
    """The pairs ``start`` .. ``start + num_pairs - 1`` of a document."""

    document: Document
    start: int
    num_pairs: int


def whole_document_excerpt(document: Document) -> Excerpt:
    """Return all pairs of a document as one excerpt."""
    return Excerpt(document, 0, len(document.features) - 1)


def pack_excerpts(excerpts: Sequence[Excerpt], device: torch.device) -> PackedBatch:
    """Return one flat batch of excerpts on ``device``; they keep the positions they have in their documents."""
    starts, pairs = [e.start for e in excerpts], [e.num_pairs for e in excerpts]
    features = [_to_tensor(e.document.features[e.start : e.start + e.num_pairs + 1]) for e in excerpts]
    positions = [torch.arange(start, start + n) for start, n in zip(starts, pairs, strict=True)]
    next_tokens = [torch.from_numpy(e.document.tokens[e.start + 1 : e.start + 1 + e.num_pairs]) for e in excerpts]
    counts = [p + 2 >= e.document.prompt_length for p, e in zip(positions, excerpts, strict=True)]
    return PackedBatch(
        next_tokens=torch.cat(next_tokens).long().to(device),
        features=torch.cat([f[:-1].flatten(1) for f in features]).to(device),
        wanted=torch.cat([f[1:, -1] for f in features]).to(device),
        positions=torch.cat(positions).to(device),
        documents=torch.repeat_interleave(torch.arange(len(pairs)), torch.tensor(pairs)).to(device),
        counts=torch.cat(counts).to(device),
        lengths=tuple(pairs),
    )


def _to_tensor(bits: np.ndarray) -> Tensor:
    """bf16 bits [n, layer, H] (uint16) as a float32 tensor."""
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.bfloat16).float()
