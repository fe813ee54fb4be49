"""What a micro-step keeps for its backward pass, measured on a batch of zeros. Knows no trainer and no device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from tlt_hpc.drafting.packing import PackedBatch, pack, whole
from tlt_hpc.storage.feature_cache import Document

_MEASURED_TOKENS = 512
"""Pairs of the batch that is measured; more cost time."""


def activation_bytes(
    loss_of: Callable[[PackedBatch], Tensor],
    kept: Iterable[Tensor],
    num_tokens: int,
    feature_shape: tuple[int, int],
    device: torch.device,
) -> int:
    """Bytes that the loss of ``num_tokens`` pairs of one response keeps until its backward pass.

    Measured on two batches of zeros, from which the part that grows with the square of a response is told apart.
    ``kept`` are weights, which are there anyway; ``feature_shape`` is (layers, hidden). What the backward pass holds
    for a moment, such as the gradient of the logits, comes on top.
    """
    pointers = {tensor.untyped_storage().data_ptr() for tensor in kept}
    sizes = [max(2, min(num_tokens, _MEASURED_TOKENS) // divisor) for divisor in (2, 1)]
    few, many = (_saved_bytes(loss_of, pointers, size, feature_shape, device) for size in sizes)
    if num_tokens <= sizes[1]:
        return many * num_tokens // sizes[1]
    square = max(0.0, (many / sizes[1] - few / sizes[0]) / (sizes[1] - sizes[0]))
    linear = many / sizes[1] - square * sizes[1]
    return int(linear * num_tokens + square * num_tokens**2)


def _saved_bytes(
    loss_of: Callable[[PackedBatch], Tensor],
    kept: set[int],
    num_tokens: int,
    feature_shape: tuple[int, int],
    device: torch.device,
) -> int:
    tokens = np.zeros(num_tokens + 2, np.int32)
    features = np.zeros((num_tokens + 1, *feature_shape), np.uint16)
    batch = pack([whole(Document(tokens, 1, features, 0))], device)
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept:
            saved[storage.data_ptr()] = tensor  # held: an address that is given back would be counted once for two
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = loss_of(batch)
    total = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    del loss
    return total
