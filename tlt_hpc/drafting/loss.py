"""The drafter's losses, and the look ahead along which they are taken. Pure functions of weights and a packed batch.

From every pair of a document the drafter continues for ``num_steps`` steps on its own states and the response's tokens,
as it does when it drafts: what it meets there is what it learns from (training-time test, EAGLE-3 section 3.2; HASS).
One step is EAGLE's training.
Shapes: ``T`` packed pairs, ``S`` paths still inside their document, ``H`` hidden, ``V`` vocabulary, ``W`` draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tlt_hpc.drafting.pool import PackedBatch
from tlt_hpc.models.documents import PathAttention
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.policy_model import CHUNK_LOGITS


@contextmanager
def allowing_tf32() -> Iterator[None]:
    """Multiply float32 matrices on a GPU with factors rounded to 10 bits (TF32) while this lasts.

    Training the drafter changes no token, and bears that; the tie guard and the policy's update stay outside.
    """
    products = torch.backends.cuda.matmul
    before, products.allow_tf32 = products.allow_tf32, True
    try:
        yield
    finally:
        products.allow_tf32 = before


@dataclass(frozen=True)
class LossSettings:
    """How far the loss looks ahead, and the factors of its terms.

    EAGLE's is ``feature_weight`` x smooth L1 on the states + ``token_weight`` x soft cross-entropy, EAGLE-3's the soft
    cross-entropy alone: its states are no features of the target.
    """

    feature_weight: float = 1.0
    token_weight: float = 0.1
    num_steps: int = 1
    decay: float = 0.8
    """Weight of each step relative to the one before (EAGLE-3: 0.8)."""


def drafter_loss(
    drafter: Drafter, batch: PackedBatch, embedding: Tensor, head: Tensor, settings: LossSettings
) -> Tensor:
    """Return the mean over paths of the weighted losses of their steps (EAGLE-3, section 3.2).

    A path begins at each pair that predicts a response token. One that has ended adds nothing, so the loss of several
    batches is their mean weighted with ``counts``.

    Args:
        embedding: [V, H] of the policy; gets no gradient.
        head: [V, H] of the policy; gets no gradient.

    Returns:
        A float32 scalar.
    """
    total = torch.zeros((), device=batch.features.device)
    for step, (states, pairs) in enumerate(_unroll(drafter, batch, embedding, settings.num_steps)):
        if len(pairs):
            term = _step_loss(drafter, states, batch.wanted[pairs], head, settings)
            total = total + settings.decay**step * len(pairs) * term
    return total / batch.counts.sum()


def _unroll(drafter: Drafter, batch: PackedBatch, embedding: Tensor, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Per step the states [S, H] of the paths that count, and the pairs [S] whose ``wanted`` they are to predict.

    A path begins at every pair that predicts a response token, and ends with its document.
    """
    path = PathAttention(batch.lengths)
    embedded = F.embedding(batch.next_tokens, embedding.detach()).to(batch.features.dtype)
    states = drafter(embedded, drafter.fuse(batch.features), batch.positions, path.attend_first_step)
    pairs = batch.counts.nonzero().flatten()
    path.keep_paths(pairs)
    states = states[pairs]
    yield states, pairs
    for _ in range(num_steps - 1):
        following = (pairs + 1).clamp(max=batch.num_tokens - 1)
        is_inside = (batch.documents[following] == batch.documents[pairs]) & (pairs + 1 < batch.num_tokens)
        kept = is_inside.nonzero().flatten()
        path.keep_paths(kept)
        pairs = pairs[kept] + 1
        if not len(pairs):
            return
        states = drafter(embedded[pairs], states[kept], batch.positions[pairs], path.attend_next_step)
        yield states, pairs


def _step_loss(drafter: Drafter, states: Tensor, wanted: Tensor, head: Tensor, settings: LossSettings) -> Tensor:
    """Mean over paths of one step's loss: states [S, H] against the target's last hidden states [S, H]."""
    token = _token_loss(drafter, states, wanted, head)
    if drafter.token_ids is not None:
        return token
    return settings.feature_weight * F.smooth_l1_loss(states, wanted) + settings.token_weight * token


def _token_loss(drafter: Drafter, states: Tensor, wanted: Tensor, head: Tensor) -> Tensor:
    rows = max(1, CHUNK_LOGITS // len(head))  # for large vocabularies, parts are recomputed in the backward pass
    total = states.new_zeros(())
    for own, true in zip(torch.split(states, rows), torch.split(wanted, rows), strict=True):
        whole = len(states) <= rows
        inputs = drafter, own, true, head
        total = total + (_token_sum(*inputs) if whole else checkpoint(_token_sum, *inputs, use_reentrant=False))
    return total / len(states)


def _token_sum(drafter: Drafter, states: Tensor, wanted: Tensor, head: Tensor) -> Tensor:
    """Sum over rows of the cross-entropy between the target's head on ``wanted`` and what the drafter says."""
    with torch.no_grad():
        target = F.linear(wanted.to(head.dtype), head).float()
    ids = drafter.token_ids
    drafted = F.linear(states.to(head.dtype), head.detach()).float() if ids is None else drafter.logits(states).float()
    return soft_cross_entropy(target, drafted, ids).sum()


def soft_cross_entropy(target: Tensor, drafted: Tensor, ids: Tensor | None = None) -> Tensor:
    """Return the cross-entropy [T], - sum_v p_v log q_v over the draft vocabulary (EAGLE, arXiv 2401.15077).

    Args:
        target: logits [T, V].
        drafted: logits [T, W].
        ids: [W] int64, the draft vocabulary; None: all tokens.

    A position counts as far as the target's choice can be drafted at all: where its mass lies outside ``ids`` [W] there
    is nothing to learn. (EAGLE-3's code leaves out positions whose likeliest token is outside, and rescales the rest.)
    """
    p = target.softmax(-1)
    return F.cross_entropy(drafted, p if ids is None else p[:, ids], reduction="none")
