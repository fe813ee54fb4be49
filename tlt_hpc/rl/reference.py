"""What the reference model is made of: taking over the policy's weights, and its pieces for a checkpoint.

The reference is whole, and the same bits, on every rank. Knows no loss and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from tlt_hpc.models.piece import Piece, deal


@torch.no_grad()
def renew(reference: torch.nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy the policy's weights, all of them by name, into the reference."""
    own = dict(reference.named_parameters())
    for name, weight in weights:
        own.pop(name).copy_(weight)
    assert not own, f"the policy has no {sorted(own)[0]}"


def shard(reference: torch.nn.Module, rank: int, num_ranks: int) -> Iterator[tuple[str, Piece]]:
    """This rank's share of the reference's weights; not a copy."""
    return deal(reference.named_parameters(), rank, num_ranks)


@torch.no_grad()
def load(reference: torch.nn.Module, read: Callable[[str], Tensor]) -> None:
    """Take over weights that ``shard`` gave on all ranks; ``read`` gives a whole one by name."""
    for name, parameter in reference.named_parameters():
        parameter.copy_(read(name))
