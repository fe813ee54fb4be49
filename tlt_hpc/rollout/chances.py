"""How likely a drafted node is what the target chooses there, counted online by its rank and margin. Knows no model.

The order in which a tree grows (method: best-first under a node budget) needs no more than this: a candidate's chance
given that its parent is on the realised path, and the product of these along a branch.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EDGES = (0.05, 0.15, 0.3, 0.6, 1.0, 1.5, 2.2, 3.0, 4.0, 6.0)
_FIRST_GUESS = (0.75, 0.12, 0.05)
"""Chance of the first, second and any further candidate, before anything is counted."""
_GUESS_WEIGHT = 4.0
_KEPT = 0.999
"""Share of the counts that a further round keeps: the drafter and the policy change."""


class ChanceTable:
    """Counts of visits and hits in cells (rank, margin): the margin is a candidate's distance to its best rival."""

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        self._edges = torch.tensor(_EDGES, device=device)
        self._bins = len(_EDGES) + 1
        guess = torch.tensor([_FIRST_GUESS[min(rank, 2)] for rank in range(num_ranks)], device=device)
        self._guess = guess.repeat_interleave(self._bins)
        self._visits = torch.zeros_like(self._guess)
        self._hits = torch.zeros_like(self._guess)

    def cells(self, scores: Tensor) -> Tensor:
        """Cells [..., K] of candidates whose perturbed scores [..., K] descend."""
        rank = torch.arange(scores.shape[-1], device=scores.device)
        rival = scores[..., 1:2] if scores.shape[-1] > 1 else scores - 1.0
        margin = torch.where(rank == 0, scores - rival, scores[..., :1] - scores)
        return rank * self._bins + torch.bucketize(margin.float().contiguous(), self._edges)

    def chances(self, cells: Tensor) -> Tensor:
        """Chance of each cell; below 1, so that a child never comes before its parent."""
        hits = self._hits + self._guess * _GUESS_WEIGHT
        return (hits / (self._visits + _GUESS_WEIGHT)).clamp(max=0.995)[cells]

    def observe(self, cells: Tensor, visited: Tensor, hit: Tensor) -> None:
        """Count nodes with these cells: ``visited`` where the parent was on the realised path, ``hit`` where it was."""
        self._visits.mul_(_KEPT).scatter_add_(0, cells.flatten(), visited.flatten().float())
        self._hits.mul_(_KEPT).scatter_add_(0, cells.flatten(), hit.flatten().float())
