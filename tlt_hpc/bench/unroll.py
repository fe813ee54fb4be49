"""What target and drafter say along a response that is already there: logits at every position, at every draft depth.

At depth 1 the drafter reads the target's feature; deeper it reads its own, rolled forward along the response's tokens,
as it does on the path that verification accepts. Knows no verification and no noise.
Shapes: ``n`` tokens of prompt and response, ``R`` of the response, ``S`` starts, ``L`` depth, ``V`` vocabulary, ``H``
hidden, ``h`` query heads, ``g`` key-value heads, ``d`` head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.layers import attend_documents


@dataclass(frozen=True)
class TokenLogits:
    """Logits for the tokens of one response."""

    tokens: Tensor
    """[R] the response's own."""
    target: Tensor
    """[R, V] the target's logits for each of them."""
    draft: tuple[Tensor, ...]
    """Per depth l (0-based) [R - l, V]: entry r is the drafter's for token r + l, drafting from before token r."""


@torch.inference_mode()
def unroll(
    decoder: Decoder, drafter: Drafter, tokens: Tensor, prompt_length: int, num_tokens: int, depth: int
) -> TokenLogits:
    """Logits of ``tokens`` [n] from the prompt's end on, the vocabulary cut to ``num_tokens``.

    The first response token is left out where the prompt has one token: there is no feature to draft it from.
    """
    first = max(prompt_length, 2)
    positions = torch.arange(len(tokens), device=tokens.device)
    hidden = decoder.hidden(tokens, positions, attend_documents(decoder.shape, None))
    target = decoder.logits(hidden[first - 1 : -1])[:, :num_tokens]
    features = _roll_forward(decoder, drafter, tokens, hidden, first, depth)
    draft = tuple(decoder.logits(feature.to(decoder.dtype))[:, :num_tokens].cpu() for feature in features)
    return TokenLogits(tokens[first:].cpu(), target.cpu(), draft)


def _roll_forward(
    decoder: Decoder, drafter: Drafter, tokens: Tensor, hidden: Tensor, first: int, depth: int
) -> list[Tensor]:
    """Per depth l the drafter's features [R - l, H] for the starts ``first`` .. n - 1 - l.

    A start c (the tokens before it are committed) reads the pair c - 2 of depth 0, then its own pairs c - 1, c, ...
    """
    path = _PathAttention(len(tokens) - 1, first - 2)
    pairs = torch.arange(len(tokens) - 1, device=tokens.device)
    embedded = F.embedding(tokens, decoder.embedding)
    feature = drafter(embedded[1:], hidden[:-1], pairs, path.over_pairs)[first - 2 : -1]
    levels = [feature]
    for level in range(1, min(depth, len(tokens) - first)):
        num_starts = len(tokens) - first - level
        at = torch.arange(num_starts, device=tokens.device) + first - 2 + level
        feature = drafter(embedded[at + 1], feature[:num_starts], at, path.over_path)
        levels.append(feature)
    return levels


class _PathAttention:
    """Attention of the drafter's one layer: depth 0 over all pairs, then each start over its pairs and its own path."""

    def __init__(self, num_pairs: int, first_pair: int) -> None:
        self._num_pairs, self._first_pair = num_pairs, first_pair
        self._own: list[tuple[Tensor, Tensor]] = []
        """Keys and values [S, g, d] of the depths so far; those of depth 0 are all pairs'."""

    def over_pairs(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """Causal over the pairs themselves."""
        self._own.append(split(key_value))
        shown = torch.ones(self._num_pairs, self._num_pairs, dtype=torch.bool, device=query.device).tril()
        return self._mix(query, shown)

    def over_path(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """Start s sees the pairs up to ``first_pair + s``, and its own of every depth up to this one."""
        self._own.append(split(key_value))
        shown = torch.ones(len(query), self._num_pairs, dtype=torch.bool, device=query.device).tril(self._first_pair)
        return self._mix(query, shown)

    def _mix(self, query: Tensor, shown: Tensor) -> Tensor:
        num, heads, size = query.shape
        (keys, values), own = self._own[0], [(k[:num], v[:num]) for k, v in self._own[1:]]
        q = query.view(num, keys.shape[1], -1, size)
        scores = torch.einsum("sgud,pgd->sgup", q, keys).masked_fill(~shown[:, None, None], -torch.inf)
        scores = torch.cat([scores, *(torch.einsum("sgud,sgd->sgu", q, k).unsqueeze(-1) for k, _ in own)], -1)
        weights = (scores * size**-0.5).softmax(-1)
        out = torch.einsum("sgup,pgd->sgud", weights[..., : self._num_pairs], values)
        for i, (_, value) in enumerate(own):
            out = out + weights[..., self._num_pairs + i].unsqueeze(-1) * value.unsqueeze(2)
        return out.reshape(num, heads * size)


def split(key_value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [T, g, d] of a fused [T, 2 g, d]."""
    keys, values = key_value.chunk(2, 1)
    return keys, values
