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
from tlt_hpc.models.documents import PathAttention, attend_documents
from tlt_hpc.models.drafter import Drafter


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
    hidden, kept = decoder.features(tokens, positions, attend_documents(None), drafter.feature_layers)
    target = decoder.logits(hidden[first - 1 : -1])[:, :num_tokens]
    states = _roll_forward(decoder, drafter, tokens, kept, first, depth)
    draft = tuple(_draft_logits(decoder, drafter, level, num_tokens).cpu() for level in states)
    return TokenLogits(tokens[first:].cpu(), target.cpu(), draft)


def _roll_forward(
    decoder: Decoder, drafter: Drafter, tokens: Tensor, features: Tensor, first: int, depth: int
) -> list[Tensor]:
    """Per depth l the drafter's states [R - l, H] for the starts ``first`` .. n - 1 - l.

    A start c (the tokens before it are committed) reads the pair c - 2 of depth 0, then its own pairs c - 1, c, ...
    """
    path = PathAttention(None)
    pairs = torch.arange(len(tokens) - 1, device=tokens.device)
    embedded = F.embedding(tokens, decoder.embedding)
    states = drafter(embedded[1:], drafter.fuse(features[:-1]), pairs, path.first_step)[first - 2 : -1]
    path.keep(pairs[first - 2 : -1])
    levels = [states]
    for level in range(1, min(depth, len(tokens) - first)):
        left = torch.arange(len(tokens) - first - level, device=tokens.device)
        path.keep(left)
        at = left + first - 2 + level
        states = drafter(embedded[at + 1], states[left], at, path.next_step)
        levels.append(states)
    return levels


def _draft_logits(decoder: Decoder, drafter: Drafter, states: Tensor, num_tokens: int) -> Tensor:
    """Logits [S, V] over all tokens; those that the drafter cannot draft have none."""
    if drafter.token_ids is None:
        return decoder.logits(states.to(decoder.dtype))[:, :num_tokens]
    logits = states.new_full((len(states), num_tokens), -torch.inf, dtype=torch.float32)
    logits[:, drafter.token_ids] = drafter.logits(states).float()
    return logits
