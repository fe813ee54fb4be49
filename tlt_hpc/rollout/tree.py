"""The drafts of a round as trees, and the walk that accepts a path in each. Pure tensors: knows no model, no cache.

Node 0 of a row is its last committed token; parents stand before their children, and siblings differ in their token.
Shapes: ``B`` rows, ``N`` nodes, ``k`` draft length, ``C`` candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EMPTY = -1
"""The token of a node that is not there: it equals no choice, so no path enters it."""


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
        return self.tokens.shape[1]


def chain(last: Tensor, drafts: Tensor) -> DraftTree:
    """Chains: last committed tokens [B] and drafts [B, k] after them."""
    return DraftTree(torch.cat([last.unsqueeze(1), drafts], 1))


def tree(tokens: Tensor, parents: Tensor, deepest: int) -> DraftTree:
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


def from_lists(rows: Sequence[Sequence[tuple[int, int]]], device: torch.device) -> DraftTree:
    """Trees from (token, parent) lists, each row's node 0 first; shorter rows are filled with empty nodes."""
    n = max(map(len, rows))
    tokens = torch.tensor([[t for t, _ in row] + [EMPTY] * (n - len(row)) for row in rows], device=device)
    parents = torch.tensor([[p for _, p in row] + [0] * (n - len(row)) for row in rows], device=device)
    deepest = 0
    for row in rows:
        depth = [0]
        for _, parent in row[1:]:
            depth.append(depth[parent] + 1)
        deepest = max(deepest, *depth)
    if all(parent == max(0, i - 1) for row in rows for i, (_, parent) in enumerate(row)):
        return DraftTree(tokens)
    return tree(tokens, parents, deepest)


def walk(chosen: Tensor, drafts: DraftTree) -> Tensor:
    """Which nodes lie on the realised path [B, N]: each drafted what the target chose [B, N] at its parent."""
    if drafts.parents is None or drafts.ancestors is None:
        matches = (chosen[:, :-1] == drafts.tokens[:, 1:]).long().cumprod(1).bool()
        return torch.cat([torch.ones_like(matches[:, :1]) if matches.shape[1] else _root(chosen), matches], 1)
    matches = drafts.tokens == chosen.gather(1, drafts.parents)
    matches[:, 0] = True
    return (matches.unsqueeze(1) | ~drafts.ancestors).all(2)


def _root(chosen: Tensor) -> Tensor:
    return torch.ones(chosen.shape[0], 1, dtype=torch.bool, device=chosen.device)


def path_of(on_path: Tensor, longest: int) -> Tensor:
    """The path's nodes in order [B, longest], then others: what stands beyond the path's length is not to be read."""
    return (~on_path).long().argsort(dim=1, stable=True)[:, :longest]


def emitted_counts(chosen: Tensor, accepted: Tensor, room: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that a row emits, and whether the last of them ends its response by an end token.

    Accepted drafts and the bonus token are emitted, cut after the first of the row's end tokens ``ends`` [B, e] and at
    its ``room`` [B]; ``chosen`` [B, m] are the choices along the path.
    """
    columns = torch.arange(chosen.shape[1], device=chosen.device)
    count = torch.minimum(accepted + 1, room)
    is_end = (chosen.unsqueeze(2) == ends.unsqueeze(1)).any(2) & (columns < count.unsqueeze(1))
    ended = is_end.any(1)
    first_end = is_end.long().argmax(1)
    return torch.where(ended, first_end + 1, count), ended
