"""Shared noise and top-K sample-match: where the target's token ranks among the drafter's candidates.

Target and drafter add the same Gumbel noise to their logits (method: Gumbel-max coupling); the token is among the
drafter's K candidates where its rank is below K. Knows logits only: no model, no tree.
Shapes: ``M`` positions, ``N`` draws, ``V`` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw_gumbel(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Standard Gumbel noise, float32."""
    return -torch.empty(shape).exponential_(generator=generator).log()


def noise_given_winner(scaled: Tensor, tokens: Tensor, num_draws: int, generator: torch.Generator) -> Tensor:
    """Draws [M, N, V] of the noise under which ``tokens`` [M] are the argmax of ``scaled`` [M, V] plus noise.

    Top-down: the maximum is Gumbel at the logsumexp and independent of who attains it; the others are Gumbels
    truncated at it (Maddison, Tarlow, Minka: "A* sampling", 2014).
    """
    index = tokens.view(-1, 1, 1).expand(-1, num_draws, 1)
    top = draw_gumbel((len(scaled), num_draws, 1), generator) + scaled.logsumexp(-1).view(-1, 1, 1)
    free = draw_gumbel((len(scaled), num_draws, scaled.shape[1]), generator) + scaled.unsqueeze(1)
    perturbed = -torch.logaddexp(-free, -top)
    return perturbed.scatter(-1, index, top) - scaled.unsqueeze(1)


def ranks(scores: Tensor, tokens: Tensor) -> Tensor:
    """How many entries of ``scores`` [..., V] beat that of ``tokens`` [...]."""
    own = scores.gather(-1, tokens.unsqueeze(-1))
    return (scores > own).sum(-1)


def hits(rank: Tensor, num_candidates: int) -> Tensor:
    """Shares [K, M] of the draws [M, N] whose rank is below 1..K."""
    counts = torch.arange(1, num_candidates + 1).view(-1, 1, 1)
    return (rank.unsqueeze(0) < counts).float().mean(-1)
