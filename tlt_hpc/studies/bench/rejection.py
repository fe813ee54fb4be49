"""Multi-round rejection, the rule that shared noise is held against: the algorithm itself, and its exact acceptance.

SpecInfer (arXiv 2305.09781, section 4.3) with EAGLE's recursive residual: candidates are drawn from the drafter without
replacement; each is accepted with probability min(1, p / q), else p becomes the normalised positive part of p - q and
the next one is tried; after the last a token is drawn from what is left of p. Knows distributions only: no model, no
tree. Shapes: ``M`` positions, ``N`` draws, ``K`` candidates, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_TINY = 1e-30


@dataclass(frozen=True)
class Acceptance:
    """Chances that one of the first 1..K candidates is accepted."""

    of_token: Tensor
    """[K, M] given that the token emitted is the one asked about."""
    overall: Tensor
    """[K, M] whatever the token."""


def reject_rounds(
    target: Tensor, draft: Tensor, num_candidates: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The algorithm, literally: tokens emitted [M] and the round that accepted each [M] (0-based; -1: none did).

    ``target`` and ``draft`` [M, V] are distributions. The tokens follow ``target``, whatever the drafter.
    """
    left, proposal = target.double(), draft.double()
    token = torch.zeros(len(left), dtype=torch.int64)
    accepted_in = torch.full_like(token, -1)
    for k in range(num_candidates):
        candidate = draw(proposal, generator).unsqueeze(1)
        chance = left.gather(1, candidate) / proposal.gather(1, candidate).clamp(min=_TINY)
        coin = torch.rand(len(left), 1, generator=generator, dtype=left.dtype)
        now = ((coin < chance) & (accepted_in.unsqueeze(1) < 0)).squeeze(1)
        token = torch.where(now, candidate.squeeze(1), token)
        accepted_in = torch.where(now, k, accepted_in)
        residual = (left - proposal).clamp(min=0)
        # where nothing is left p lay below q nowhere: the candidate was accepted for certain
        left = torch.where(residual.sum(1, keepdim=True) > 0, normalised(residual), left)
        proposal = normalised(proposal.scatter(1, candidate, 0.0))
    return torch.where(accepted_in < 0, draw(left, generator), token), accepted_in


def acceptance(
    target: Tensor, draft: Tensor, tokens: Tensor, num_candidates: int, num_draws: int, generator: torch.Generator
) -> Acceptance:
    """Chances of acceptance under ``target`` and ``draft`` [M, V], given that ``tokens`` [M] are emitted, and overall.

    With s the part of ``target`` that no round has accounted for and w its sum, a round leaves the positive part of
    s - w q; which candidate a round rejected is drawn from the positive part of w q - s. So the coins are summed
    over exactly and only rejected candidates are drawn: no draw at all for K = 1, and every draw gives a chance in
    [0, 1] whose expectation is exact, independent of all others.
    """
    left, proposal = target.unsqueeze(1), draft.unsqueeze(1)  # [M, 1 or N, V]
    index = tokens.view(-1, 1, 1)
    emitted = target.gather(1, tokens.unsqueeze(1)).clamp(min=_TINY)  # [M, 1]
    of_token, overall = [], []
    for k in range(num_candidates):
        offered = left.sum(-1, keepdim=True) * proposal
        after = (left - offered).clamp(min=0)
        unexplained = after.gather(-1, index.expand(-1, after.shape[1], 1)).squeeze(-1)
        of_token.append((1 - unexplained / emitted).mean(1))
        overall.append(1 - after.sum(-1).mean(1))
        if k + 1 < num_candidates:
            excess = (offered - left).clamp(min=0).expand(-1, num_draws, -1)
            rejected = draw(excess, generator).unsqueeze(-1)
            proposal = normalised(proposal.expand(-1, num_draws, -1).scatter(-1, rejected, 0.0))
            left = after.expand(-1, num_draws, -1)
    return Acceptance(torch.stack(of_token), torch.stack(overall))


def draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """One index of the last dimension, with chances in proportion to ``weights`` [..., V]."""
    clocks = torch.empty(weights.shape, dtype=weights.dtype).exponential_(generator=generator)
    return (weights / clocks).argmax(-1)


def normalised(weights: Tensor) -> Tensor:
    """``weights`` [..., V] over their sum; zeros stay zeros."""
    return weights / weights.sum(-1, keepdim=True).clamp(min=_TINY)


def overlap(target: Tensor, draft: Tensor) -> Tensor:
    """1 minus the total variation between distributions [M, V] -> [M]: what rejection accepts of one candidate."""
    return torch.minimum(target, draft).sum(-1)
