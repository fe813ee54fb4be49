"""A causal language model as training sees it: documents packed end to end in, log-probabilities of chosen tokens out.

Nothing is padded, each document attends to itself alone, and logits exist for a chunk of positions at a time.
Shapes: ``T`` tokens of the batch, ``R`` positions whose next token counts, ``V`` vocabulary, ``H`` hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from tlt_hpc.common.formatting import format_count
from tlt_hpc.config import UserError
from tlt_hpc.models.documents import attend_documents
from tlt_hpc.models.linear import mask_excluded_tokens
from tlt_hpc.models.mlp import best_experts
from tlt_hpc.models.sharding import SequenceGroup

_ATTENTION = "tlt_documents"
_ROUTER = "Qwen3MoeTopKRouter"
CHUNK_LOGITS = 1 << 26
"""Logits in memory at once, in float32 a quarter of a gigabyte; the backward pass makes them again."""


class PolicyModel(torch.nn.Module):
    """Wraps a causal language model of transformers, whose parameters stay its own under their own names.

    With ``repeats_layers`` a layer keeps its input alone for the backward pass, which computes the layer again.
    """

    def __init__(
        self,
        model: Any,
        repeats_layers: bool = False,
        sequence: SequenceGroup | None = None,
        excluded: Sequence[int] = (),
    ) -> None:
        """``sequence``: the ranks that compute each batch together; all of them give and get the whole of it.
        ``excluded``: ids without a probability, as those of ``Decoder``.
        """
        super().__init__()
        self.inner = model
        self._sequence = sequence
        if repeats_layers:  # no layer draws at random, so there is no state of a generator to keep
            settings = {"use_reentrant": False, "preserve_rng_state": False}
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
        self.head = _Head(model.get_output_embeddings().weight, excluded)
        _set_document_attention(model)
        _set_decoder_routing(model)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        lengths: Sequence[int],
        where: Tensor,
        targets: Tensor,
        temperature: float,
        entropy_has_gradient: bool = False,
        balances_experts: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability of each target, entropy of its softmax in nats, and the load-balancing loss of all tokens.

        The softmax is scaled by ``temperature``; the loss is 0 unless ``balances_experts``.

        Args:
            tokens, positions: [T] int64, positions counted from each document's start.
            lengths: of the documents, T together.
            where: [R] int64, the places in ``tokens`` after which the targets stand.
            targets: [R] int64.
            temperature: above 0.

        Returns:
            [R] float32 twice and a number, computed in float32 whatever the weights are in.
        """
        group, count, num_tokens, own = self._sequence, len(where), len(tokens), None
        if group is not None:  # each of its ranks holds a slice of the tokens
            tokens, positions, lengths = group.pad(tokens, positions, lengths)
            where, own = group.places_in_own_slice(where, len(tokens))
            tokens, positions, targets = group.own_slice(tokens), group.own_slice(positions), targets[own]
        output = self.inner.base_model(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            documents=lengths,
            sequence=group,
            **({"output_router_logits": True} if balances_experts else {}),
        )
        hidden = output.last_hidden_state[0][where]
        log_probs, entropy = self.head(hidden, targets, temperature, entropy_has_gradient)
        imbalance = log_probs.new_zeros(())
        if balances_experts:
            num_chosen = self.inner.config.num_experts_per_tok
            imbalance = _router_loss(output.router_logits, num_chosen, num_tokens, group)
        if group is None or own is None:
            return log_probs, entropy, imbalance
        return group.gather_whole(log_probs, own, count), group.gather_whole(entropy, own, count), imbalance


class _Head(torch.nn.Module):
    """The output layer. One call a pass, however many chunks: ZeRO 3 gathers the weight once for all."""

    def __init__(self, weight: torch.nn.Parameter, excluded: Sequence[int] = ()) -> None:
        super().__init__()
        self.weight = weight
        self._excluded = torch.tensor(excluded) if excluded else None

    def forward(
        self, hidden: Tensor, targets: Tensor, temperature: float, entropy_has_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        if self._excluded is not None:
            self._excluded = self._excluded.to(hidden.device)
        given = hidden, self.weight, targets, temperature, entropy_has_gradient, self._excluded
        log_probs, entropy = _Read.apply(*given)  # type: ignore[no-untyped-call]
        return log_probs, entropy


class _Read(torch.autograd.Function):
    """Log-probabilities of the targets [R] and entropy [R] of what a head [V, H] says of hidden states [R, H].

    They are of the softmax of the logits over the temperature, without tokens that are ``excluded``, before truncation.
    Logits are float32 sums, as the decoder's are, and exist for a chunk of rows at a time; the backward pass makes them
    again. The head's gradient is added up over the chunks in float32: in half precision each addition would round it.
    """

    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        entropy_has_gradient: bool,
        excluded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_probs, normalisers, entropies = (hidden.new_empty(len(hidden), dtype=wide) for _ in range(3))
        for rows in _chunks(hidden, weight):
            scaled = mask_excluded_tokens(_float32_product(hidden[rows], weight.t()).div_(temperature), excluded)
            normalisers[rows] = scaled.logsumexp(1)
            scaled -= normalisers[rows].unsqueeze(1)
            log_probs[rows] = scaled.gather(1, targets[rows].unsqueeze(1)).squeeze(1)
            entropies[rows] = -(scaled.exp() * scaled).sum(1)
        context.save_for_backward(hidden, weight, targets, normalisers, entropies)
        context.temperature, context.entropy_has_gradient, context.excluded = (
            temperature,
            entropy_has_gradient,
            excluded,
        )
        if not entropy_has_gradient:
            context.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(context: Any, *given: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        of_log_probs, of_entropy = given
        hidden, weight, targets, normalisers, entropies = context.saved_tensors
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight, dtype=normalisers.dtype) if context.needs_input_grad[1] else None
        for rows in _chunks(hidden, weight):
            log_probs = mask_excluded_tokens(
                _float32_product(hidden[rows], weight.t()).div_(context.temperature), context.excluded
            )
            log_probs -= normalisers[rows].unsqueeze(1)
            slopes = log_probs.exp()
            if context.entropy_has_gradient:
                log_probs += entropies[rows].unsqueeze(1)
                slopes *= -(of_log_probs[rows].unsqueeze(1) + of_entropy[rows].unsqueeze(1) * log_probs)
            else:
                slopes *= -of_log_probs[rows].unsqueeze(1)
            slopes.scatter_add_(1, targets[rows].unsqueeze(1), of_log_probs[rows].unsqueeze(1))
            slopes = slopes.div_(context.temperature).to(weight.dtype)
            to_hidden[rows] = torch.mm(slopes, weight)
            if to_weight is not None:  # else the head is frozen
                to_weight += _float32_product(slopes.t(), hidden[rows])
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None, None, None, None


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Rows whose logits are in memory at once."""
    most = max(1, CHUNK_LOGITS // len(weight))
    return [slice(start, start + most) for start in range(0, len(hidden), most)]


def _float32_product(left: Tensor, right: Tensor) -> Tensor:
    """A product of matrices in float32, or in float64 of such."""
    if left.dtype.itemsize >= 4:
        return torch.mm(left, right)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())


# -- attention by document --------------------------------------------------------------------------------------------


def _set_document_attention(model: Any) -> None:
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
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, h, T, d], key and value [1, g, T, d] -> [1, T, h, d], as transformers asks its layers' attention to."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if scaling != q.shape[-1] ** -0.5:  # what attention here multiplies scores by
        q = q * (scaling * q.shape[-1] ** 0.5)
    if sequence is not None:
        q, k, v = (sequence.scatter_heads(x) for x in (q, k, v))
    out = attend_documents(documents, [sliding_window or 0])(0, q, torch.cat([k, v], 1)).view(q.shape)
    return (out if sequence is None else sequence.gather_heads(out)).unsqueeze(0), None


def _set_decoder_routing(model: Any) -> None:
    """Have the routers of a model of transformers choose experts by the decoder's rule.

    Raises:
        UserError: not every layer with experts has one that is known.
    """
    routers = [module for module in model.modules() if type(module).__name__ == _ROUTER]
    num_mixtures = model.config.num_hidden_layers if getattr(model.config, "num_experts", 0) else 0
    if len(routers) != num_mixtures:
        raise UserError(
            f"transformers {version('transformers')} has a router {_ROUTER} in {len(routers)} of the model's "
            f"{format_count(num_mixtures, 'layer')} with experts, so that the update would choose other experts than "
            "the rollout; install an earlier version, such as 5.23.0"
        )
    for router in routers:
        router.forward = partial(_route, router)


def _route(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [T, H] -> the router's logits [T, E], the weights of the chosen experts and their numbers [T, k]."""
    logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    weights, experts = best_experts(
        logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)), router.top_k
    )
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights.to(logits.dtype), experts


def _router_loss(logits: Sequence[Tensor], num_chosen: int, num_tokens: int, sequence: SequenceGroup | None) -> Tensor:
    """How unevenly tokens are spread over E experts; ``num_chosen`` if evenly.

    E times the sum over experts of the share of tokens that choose it, a constant, and its mean probability (Switch
    Transformer, arXiv 2101.03961, eq. 4 to 6), both over all layers together as in transformers.

    Args:
        logits: of each layer's router, [T, E], or this rank's slice of them; rows after ``num_tokens`` are padding.
    """
    first = 0 if sequence is None else sequence.rank * len(logits[0])
    chosen = chances = torch.zeros(())
    for layer in logits:
        own = layer[: max(0, num_tokens - first)]
        own = own.softmax(-1, dtype=torch.promote_types(own.dtype, torch.float32))
        choices = torch.zeros_like(own).scatter_(1, best_experts(own.detach(), num_chosen)[1], 1.0)
        chosen, chances = chosen + choices.sum(0), chances + own.sum(0)
    sums = torch.cat([chosen, chances])
    chosen, chances = (
        (sums if sequence is None else sequence.sum_over_ranks(sums)).div(len(logits) * num_tokens).chunk(2)
    )
    return len(chosen) * (chosen * chances).sum()


def _no_mask(*_: Any, **__: Any) -> None:
    """Documents are told apart by their lengths."""
