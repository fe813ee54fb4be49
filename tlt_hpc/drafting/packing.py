"""Packs rollout documents into one flat batch without padding; documents never see each other. Pure tensors.

Shapes: ``T`` packed pairs, ``H`` hidden, ``F`` features of a position, side by side, the last hidden state last. Pair i
of a document joins the token at i + 1 with the features at i, and is to predict the last hidden state at i + 1, from
which the head reads token i + 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tlt_hpc.storage.feature_file import Document


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
    """[T] int64, which document."""
    counts: Tensor
    """[T] bool: whether the pair predicts a response token."""
    lengths: tuple[int, ...]
    """Pairs of each document."""

    @property
    def num_tokens(self) -> int:
        return len(self.next_tokens)


@dataclass(frozen=True)
class Excerpt:
    """The pairs ``start`` .. ``start + num_pairs - 1`` of a document."""

    document: Document
    start: int
    num_pairs: int


def whole(document: Document) -> Excerpt:
    """All pairs of a document."""
    return Excerpt(document, 0, len(document.features) - 1)


def pack(excerpts: Sequence[Excerpt], device: torch.device) -> PackedBatch:
    """One flat batch of excerpts, which keep the positions they have in their documents."""
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
