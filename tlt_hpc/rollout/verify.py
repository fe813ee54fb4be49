"""The walk that accepts a chain: how many drafts are what the target samples, and where a response ends. Pure tensors.

Shapes: ``B`` rows, ``k`` draft length.
"""

from __future__ import annotations

import torch
from torch import Tensor


def num_matching(chosen: Tensor, drafts: Tensor) -> Tensor:
    """Drafts [B, k] accepted from the front: those equal to the target's own choices [B, k + 1] -> [B]."""
    return (chosen[:, :-1] == drafts).long().cumprod(1).sum(1)


def emitted_counts(chosen: Tensor, accepted: Tensor, room: Tensor, eos: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that a row emits, and whether the last of them ends its response by an end token.

    Accepted drafts and the bonus token are emitted, cut after the first end token and at the row's ``room`` [B].
    """
    columns = torch.arange(chosen.shape[1], device=chosen.device)
    count = torch.minimum(accepted + 1, room)
    is_end = torch.isin(chosen, eos) & (columns < count.unsqueeze(1))
    ended = is_end.any(1)
    first_end = is_end.long().argmax(1)
    return torch.where(ended, first_end + 1, count), ended
