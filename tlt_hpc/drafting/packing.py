"""Packs rollout documents into one flat batch without padding; documents never see each other. Pure tensors.

Shapes: ``T`` packed pairs, ``H`` hidden. Pair i of a document joins the token at i + 1 with the feature at i, and is
to predict the feature at i + 1, from which the head reads token i + 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tlt_hpc.storage.feature_cache import Document


@dataclass(frozen=True)
class PackedBatch:
    """Flat pairs of several documents."""

    next_tokens: Tensor
    """[T] int64, the token at i + 1."""
    features: Tensor
    """[T, H] the target's feature at i."""
    wanted: Tensor
    """[T, H] the target's feature at i + 1."""
    positions: Tensor
    """[T] int64, i within its document."""
    documents: Tensor
    """[T] int64, which document."""
    counts: Tensor
    """[T] bool: whether the pair predicts a response token."""

    @property
    def num_tokens(self) -> int:
        return len(self.next_tokens)


def pack(documents: Sequence[Document], device: torch.device) -> PackedBatch:
    """One flat batch of documents that have at least two features each."""
    pairs = [len(document.features) - 1 for document in documents]
    features = [_to_tensor(document.features[:, -1]) for document in documents]
    return PackedBatch(
        next_tokens=torch.cat([torch.from_numpy(d.tokens[1 : n + 1]) for d, n in zip(documents, pairs, strict=True)])
        .long()
        .to(device),
        features=torch.cat([f[:-1] for f in features]).to(device),
        wanted=torch.cat([f[1:] for f in features]).to(device),
        positions=torch.cat([torch.arange(n) for n in pairs]).to(device),
        documents=torch.repeat_interleave(torch.arange(len(pairs)), torch.tensor(pairs)).to(device),
        counts=torch.cat([torch.arange(n) + 2 >= d.prompt_length for d, n in zip(documents, pairs, strict=True)]).to(
            device
        ),
    )


def _to_tensor(bits: np.ndarray) -> Tensor:
    """bf16 bits [n, H] (uint16) as a float32 tensor."""
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.bfloat16).float()
