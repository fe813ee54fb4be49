"""The drafts of a round as trees, and the walk that accepts a path in each. Pure tensor functions.

Node 0 of a row is its last committed token; parents come before their children, and siblings differ in their token.
Shapes: ``B`` rows, ``N`` nodes, ``k`` draft length, ``C`` candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.rollout.transfer import upload

EMPTY = -1
"""The token of a missing node: it equals no choice, so no path contains it."""


@dataclass(frozen=True)
class DraftTree:
    """Nodes [B, N]; ``parents`` and what follows from them are None where every row is a chain."""

    tokens: Tensor
    parents: Tensor | None = None
    ancestors: Tensor | None = None
    """[B, N, N] bool: node j is node i's ancestor or i itself."""
    depths: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """Number of nodes of each row, node 0 and empty ones included."""
        return self.tokens.shape[1]


def make_chains(last: Tensor, drafts: Tensor) -> DraftTree:
    """Chains: last committed tokens [B] and drafts [B, k] after them."""
    return DraftTree(torch.cat([last.unsqueeze(1), drafts], 1))


def make_tree(tokens: Tensor, parents: Tensor, deepest: int) -> DraftTree:
    """Trees from tokens [B, N] and parents [B, N] (node 0 is its own), none deeper than ``deepest``."""
    num_rows, n = tokens.shape
    reach = torch.zeros(num_rows, n, n, device=tokens.device)
    reach.scatter_(2, parents.unsqueeze(2), 1.0)
    reach += torch.eye(n, device=tokens.device)
    # squaring doubles how far up a node reaches
    for _ in range(max(1, (max(1, deepest) - 1).bit_length())):
        reach = torch.bmm(reach, reach).clamp_(max=1.0)
    ancestors = reach > 0
    ancestors[:, 1:, 0] = True
    return DraftTree(tokens, parents, ancestors, ancestors.sum(2) - 1)


def make_chains_from_rows(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> DraftTree:
    """Chains from each row's tokens, node 0 first; shorter rows are filled up to ``width`` with empty nodes."""
    return DraftTree(upload([[*row, *[EMPTY] * (width - len(row))] for row in rows], device))


def join_trees_and_chains(
    first: DraftTree | None, rows: Sequence[Sequence[int]], width: int, device: torch.device
) -> DraftTree:
    """Trees of the first rows, if any, and chains of those after them, filled up to ``width`` with empty nodes.

    Where the first ones are trees, what follows from ``parents`` is left out.
    """
    after = make_chains_from_rows(rows, width, device)
    if first is None:
        return after
    missing = width - first.num_nodes
    tokens = torch.cat([F.pad(first.tokens, (0, missing), value=EMPTY), after.tokens])
    if first.parents is None:
        return DraftTree(tokens)
    # empty nodes are no deeper than drafts: there is noise for the depth of a strategy
    deepest = max(0, max(map(len, rows)) - 2)
    before = (torch.arange(width, device=device) - 1).clamp(0, deepest).expand(len(rows), -1)
    return DraftTree(tokens, torch.cat([F.pad(first.parents, (0, missing)), before]))


def nodes_on_path(chosen: Tensor, drafts: DraftTree) -> Tensor:
    """Nodes on the realised path, a mask [B, N]: each drafted the target's choice [B, N] at its parent."""
    if drafts.parents is None or drafts.ancestors is None:
        matches = (chosen[:, :-1] == drafts.tokens[:, 1:]).long().cumprod(1).bool()
        return F.pad(matches, (1, 0), value=True)
    matches = drafts.tokens == chosen.gather(1, drafts.parents)
    matches[:, 0] = True
    return (matches.unsqueeze(1) | ~drafts.ancestors).all(2)


def path_nodes_in_order(on_path: Tensor, longest: int) -> Tensor:
    """The path's nodes in order [B, longest], then others: entries beyond the path's length are meaningless."""
    return (~on_path).long().argsort(dim=1, stable=True)[:, :longest]


def emitted_counts(chosen: Tensor, accepted: Tensor, room: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that a row emits, and whether the last of them ends its response by an end token.

    Accepted drafts and the bonus token are emitted, cut after the first of the end tokens ``ends`` [e] and at the row's
    ``room`` [B]; ``chosen`` [B, m] are the choices along the path.
    """
    columns = torch.arange(chosen.shape[1], device=chosen.device)
    count = torch.minimum(accepted + 1, room)
    is_end = (chosen.unsqueeze(2) == ends).any(2) & (columns < count.unsqueeze(1))
    ended = is_end.any(1)
    first_end = is_end.long().argmax(1)
    return torch.where(ended, first_end + 1, count), ended
