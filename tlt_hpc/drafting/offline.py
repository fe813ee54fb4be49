"""The training of a warm-up: the order of documents, how each batch is sharded and cut, and an update of all ranks.

Every document is used once before any is used twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapreplace
from itertools import count

import torch

from tlt_hpc.config import UserError
from tlt_hpc.drafting.loss import allowing_tf32
from tlt_hpc.drafting.merge import SumOverRanks, start_sum
from tlt_hpc.drafting.pool import Excerpt, PackedBatch
from tlt_hpc.drafting.spot_trainer import SpotTrainer
from tlt_hpc.storage.feature_file import Document


def iter_update_batches(lengths: Sequence[int], num_tokens: int, seed: int) -> Iterator[list[int]]:
    """Yield the indices of the documents of each update, without end.

    Args:
        lengths: of the responses, in tokens.
        num_tokens: most response tokens of an update; a single longer response exceeds it.

    Each epoch has an order of its own, and a batch may span two.
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
    """Return a batch's documents by rank, with nearly equal tokens: the longest first, to the rank that has fewest."""
    shards: list[list[int]] = [[] for _ in range(num_ranks)]
    tokens = [(0, rank) for rank in range(num_ranks)]  # a heap
    for index in sorted(batch, key=lambda index: -lengths[index]):
        least, rank = tokens[0]
        shards[rank].append(index)
        heapreplace(tokens, (least + lengths[index], rank))
    return shards


def pack_forward_passes(documents: Sequence[Document], most_pairs: int) -> list[list[Excerpt]]:
    """Return the excerpts of each forward pass, at most ``most_pairs`` pairs; longer documents are cut into windows.

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


def update_on_all_ranks(trainer: SpotTrainer, batches: Iterable[PackedBatch], world: SumOverRanks) -> float:
    """Take one update on the mean loss over the tokens of all ranks' batches, and return that loss. Collective.

    The ranks' drafters stay equal without a merge. A rank may have no batch.

    Raises:
        UserError: on all ranks, if the gradient is not finite.
    """
    trainer.copy_policy_head()
    trained = trainer.trained
    loss, num_tokens = 0.0, 0
    for batch in batches:
        num_counted = int(batch.counts.sum())
        with allowing_tf32():
            part = trainer.loss(batch)
            (part * num_counted).backward()  # type: ignore[no-untyped-call]
        loss, num_tokens = loss + float(part.detach()) * num_counted, num_tokens + num_counted
    parameters = trained.parameters.values()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([*(g.flatten() for g in gradients), gradients[0].new_tensor([loss, num_tokens])])
    summed = start_sum(world, flat)()
    total = summed[-1]
    means = torch.split(summed[:-2] / total, [g.numel() for g in gradients])
    for parameter, values in zip(parameters, means, strict=True):
        parameter.grad = values.view_as(parameter)
    if not trained.step():
        raise UserError(
            "the gradient of an update of the drafter is not finite: use a lower learning rate than "
            f"{trained.learning_rate:g}"
        )
    return float(summed[-2] / total)
