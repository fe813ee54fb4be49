"""A causal language model as training sees it: documents packed end to end in, log-probabilities of chosen tokens out.

Nothing is padded, each document attends to itself alone, and logits exist for a chunk of positions at a time.
Shapes: ``T`` tokens of the batch, ``R`` positions whose next token counts, ``V`` vocabulary, ``H`` hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tlt_hpc.models.documents import attend_documents
from tlt_hpc.models.sequence_parallel import SequenceGroup

_ATTENTION = "tlt_documents"
_CHUNK_LOGITS = 1 << 26
"""Logits in memory at once, in float32 a quarter of a gigabyte; the backward pass makes them again."""


class PolicyModel(torch.nn.Module):
    """Wraps a causal language model of transformers, whose parameters stay its own under their own names.

    With ``repeats_layers`` a layer keeps its input alone for the backward pass, which computes the layer again.
    """

    def __init__(self, model: Any, repeats_layers: bool = False, sequence: SequenceGroup | None = None) -> None:
        """``sequence``: the ranks that compute each batch together; all of them give and get the whole of it."""
        super().__init__()
        self.inner = model
        self._sequence = sequence
        if repeats_layers:  # no layer draws at random, so there is no state of a generator to keep
            settings = {"use_reentrant": False, "preserve_rng_state": False}
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
        self.head = _Head(model.get_output_embeddings().weight)
        _attend_by_document(model)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        lengths: Sequence[int],
        where: Tensor,
        targets: Tensor,
        temperature: float,
        entropy_has_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target under the temperature-scaled softmax, and that softmax's entropy in nats.

        Args:
            tokens, positions: [T] int64, positions counted from each document's start.
            lengths: of the documents, T together.
            where: [R] int64, the places in ``tokens`` after which the targets stand.
            targets: [R] int64.
            temperature: above 0.

        Returns:
            [R] float32 each, computed in float32 whatever the weights are in.
        """
        group, count, own = self._sequence, len(where), None
        if group is not None:  # each of its ranks holds a slice of the tokens
            tokens, positions, lengths = group.pad(tokens, positions, lengths)
            where, own = group.places(where, len(tokens))
            tokens, positions, targets = group.slice(tokens), group.slice(positions), targets[own]
        output = self.inner.base_model(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            documents=lengths,
            sequence=group,
        )
        hidden = output.last_hidden_state[0][where]
        log_probs, entropy = self.head(hidden, targets, temperature, entropy_has_gradient)
        if group is None or own is None:
            return log_probs, entropy
        return group.whole(log_probs, own, count), group.whole(entropy, own, count)


class _Head(torch.nn.Module):
    """The output layer, in chunks. One call a pass, whatever their number: ZeRO 3 gathers the weight once for all."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(
        self, hidden: Tensor, targets: Tensor, temperature: float, entropy_has_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        most = max(1, _CHUNK_LOGITS // len(self.weight))
        again = len(hidden) > most and torch.is_grad_enabled()
        parts = []
        for rows, wanted in zip(torch.split(hidden, most), torch.split(targets, most), strict=True):
            inputs = rows, self.weight, wanted, temperature, entropy_has_gradient
            parts.append(checkpoint(_read, *inputs, use_reentrant=False) if again else _read(*inputs))
        log_probs, entropies = zip(*parts, strict=True)
        return torch.cat(log_probs), torch.cat(entropies)


def _read(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy_has_gradient: bool
) -> tuple[Tensor, Tensor]:
    """hidden [R, H], weight [V, H] -> log-probabilities of the targets [R], entropy [R]."""
    logits = torch.nn.functional.linear(hidden, weight)
    with torch.set_grad_enabled(entropy_has_gradient and torch.is_grad_enabled()):
        entropy = token_entropy(logits, temperature)
    return token_log_probs(logits, targets, temperature), entropy


def token_log_probs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Log-probability of each target token under the temperature-scaled softmax, before top-k, top-p and min-p.

    Args:
        logits: [R, V], any floating dtype; computed in float32.
        targets: [R] int64.
        temperature: above 0.

    Returns:
        [R] float32.
    """
    assert temperature > 0, f"temperature = {temperature}"
    scaled = logits.float() / temperature
    chosen = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(-1)


def token_entropy(logits: Tensor, temperature: float) -> Tensor:
    """Entropy [R] in nats of the temperature-scaled softmax of ``logits`` [R, V]."""
    log_probs = (logits.float() / temperature).log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


# -- attention by document --------------------------------------------------------------------------------------------


def _attend_by_document(model: Any) -> None:
    """Have every layer of a model of transformers attend within the documents that a forward pass is told of."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_ATTENTION, _attention)
    AttentionMaskInterface.register(_ATTENTION, _no_mask)
    model.config._attn_implementation = _ATTENTION


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    *,
    documents: Sequence[int],
    sequence: SequenceGroup | None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, h, T, d], key and value [1, g, T, d] -> [1, T, h, d], as transformers asks its layers' attention to."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if sequence is not None:
        q, k, v = (sequence.scatter_heads(x) for x in (q, k, v))
    out = attend_documents(documents)(0, q, torch.cat([k, v], 1)).view(q.shape)
    return (out if sequence is None else sequence.gather_heads(out)).unsqueeze(0), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Documents are told apart by their lengths."""
