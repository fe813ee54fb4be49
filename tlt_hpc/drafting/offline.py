"""The order in which a warm-up trains on documents, how each batch is sharded and cut.

Every document is used once before any is used twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from heapq import heapreplace
from itertools import count

from tlt_hpc.drafting.packing import Excerpt
from tlt_hpc.storage.feature_file import Document


def batches_of(lengths: Sequence[int], num_tokens: int, seed: int) -> Iterator[list[int]]:
    """Indices of the documents of each update, without end: whole ones, ``num_tokens`` together unless one is longer.

    ``lengths`` are the response lengths. Each epoch has an order of its own, and a batch may span two.
    """
    assert sum(lengths) > 0, "nothing to train on"
    batch: list[int] = []
    room = num_tokens
    for index in _shuffled_epochs(len(lengths), seed):
        if batch and lengths[index] > room:
            yield batch
            batch, room = [], num_tokens
        batch.append(index)
        room -= lengths[index]


def _shuffled_epochs(num: int, seed: int) -> Iterator[int]:
    for epoch in count():
        order = list(range(num))
        random.Random(f"warm-up/{seed}/{epoch}").shuffle(order)
        yield from order


def balanced_shards(batch: Sequence[int], lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """A batch's documents by rank, so that the ranks have nearly equal tokens: the longest first, to who has fewest."""
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    tokens = [(0, rank) for rank in range(num_ranks)]  # a heap
    for index in sorted(batch, key=lambda index: -lengths[index]):
        least, rank = tokens[0]
        hands[rank].append(index)
        heapreplace(tokens, (least + lengths[index], rank))
    return hands


def passes_of(documents: Sequence[Document], most_pairs: int) -> list[list[Excerpt]]:
    """The excerpts of each forward pass, ``most_pairs`` pairs at most; longer documents are cut into windows.

    Windows that predict no response token are left out.
    """
    passes: list[list[Excerpt]] = []
    room = 0
    for document in documents:
        for excerpt in _windows(document, most_pairs):
            if excerpt.num_pairs > room:
                passes.append([])
                room = most_pairs
            passes[-1].append(excerpt)
            room -= excerpt.num_pairs
    return passes


def _windows(document: Document, most_pairs: int) -> Iterator[Excerpt]:
    """A document's pairs in consecutive windows that predict response tokens; pair i predicts token i + 2."""
    num_pairs = len(document.features) - 1
    for start in range(0, num_pairs, most_pairs):
        size = min(most_pairs, num_pairs - start)
        if start + size - 1 + 2 >= document.prompt_length:
            yield Excerpt(document, start, size)
