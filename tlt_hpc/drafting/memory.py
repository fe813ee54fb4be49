"""What a micro-step keeps for its backward pass, measured on a batch of zeros. Knows no trainer and no device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from tlt_hpc.drafting.packing import PackedBatch, pack, whole
from tlt_hpc.storage.feature_cache import Document

_MEASURED_TOKENS = 512
"""Pairs of the batch that is measured; more cost time and hardly another number of bytes a pair."""


def activation_bytes(
    loss_of: Callable[[PackedBatch], Tensor],
    kept: Iterable[Tensor],
    num_tokens: int,
    feature_shape: tuple[int, int],
    device: torch.device,
) -> int:
    """Bytes that the loss of ``num_tokens`` pairs keeps until its backward pass, in proportion to a batch of zeros.

    ``kept`` are weights, which are there anyway; ``feature_shape`` is (layers, hidden). What the backward pass holds
    for a moment, such as the gradient of the logits, comes on top.
    """
    num_measured = min(num_tokens, _MEASURED_TOKENS)
    tokens = np.zeros(num_measured + 2, np.int32)
    features = np.zeros((num_measured + 1, *feature_shape), np.uint16)
    batch = pack([whole(Document(tokens, 1, features, 0))], device)
    weights = {tensor.untyped_storage().data_ptr() for tensor in kept}
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = loss_of(batch)
    own = (tensor for pointer, tensor in saved.items() if pointer not in weights)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in own)
    del loss
    return measured * num_tokens // num_measured
