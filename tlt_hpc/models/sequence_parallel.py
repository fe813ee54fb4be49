"""One packed batch over the ranks of a group: each holds a slice of the tokens, and in attention a share of the heads.

Everything but attention acts on tokens alone. Before it the ranks exchange slices of all heads for all tokens of some
heads, after it back (DeepSpeed-Ulysses, arXiv 2309.14509); what is exchanged goes back the other way in the backward
pass. Knows no weights and no loss.
Shapes: ``n`` ranks of the group, ``T`` tokens of the batch, a multiple of ``n`` once padded, ``S`` = T / n tokens of a
slice, ``h`` heads, ``d`` head size, ``R`` places that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share a batch; the batch itself is the same on all of them."""

    group: ProcessGroup
    rank: int
    size: int

    def pad(self, tokens: Tensor, positions: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """The batch with a document of padding behind it, where the group's size does not divide its tokens.

        Args:
            tokens, positions: [T].
            lengths: of the documents, T together.

        Returns:
            The same three, of the next T that the size divides.
        """
        missing = -len(tokens) % self.size
        if not missing:
            return tokens, positions, tuple(lengths)
        padding = tokens.new_zeros(missing), torch.arange(missing, device=positions.device, dtype=positions.dtype)
        return torch.cat([tokens, padding[0]]), torch.cat([positions, padding[1]]), (*lengths, missing)

    def slice(self, values: Tensor) -> Tensor:
        """This rank's part [S, ...] of values [T, ...]."""
        return values.chunk(self.size)[self.rank]

    def places(self, where: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The places among ``where`` [R] in this rank's slice, counted from its start, and their indices in ``where``.

        Args:
            where: [R] int64, places in the padded batch of ``num_tokens``.

        Returns:
            Two tensors [r] int64, for the r places in this rank's slice.
        """
        each = num_tokens // self.size
        own = (where // each == self.rank).nonzero().flatten()
        return where[own] - self.rank * each, own

    def scatter_heads(self, x: Tensor) -> Tensor:
        """A slice of all heads [S, h, d] -> all tokens of this rank's heads [T, h / n, d].

        Fewer heads than ranks are repeated, so that ranks side by side have the same one.
        """
        if x.shape[1] < self.size:
            x = x.repeat_interleave(self.size // x.shape[1], 1)
        exchanged: Tensor = _Exchange.apply(x, self.group, self.size, True)  # type: ignore[no-untyped-call]
        return exchanged

    def gather_heads(self, x: Tensor) -> Tensor:
        """All tokens of this rank's heads [T, h / n, d] -> a slice of all heads [S, h, d]."""
        exchanged: Tensor = _Exchange.apply(x, self.group, self.size, False)  # type: ignore[no-untyped-call]
        return exchanged

    def total(self, values: Tensor) -> Tensor:
        """The sum of all ranks' values [N], of whose gradient each takes that of its own values."""
        return self.whole(values, torch.arange(len(values), device=values.device), len(values))

    def whole(self, values: Tensor, own: Tensor, count: int) -> Tensor:
        """All ranks' values as one [count], of which this rank gives ``values`` at the places ``own``.

        Every rank continues with the whole; of its gradient each takes its own part, so that no part counts twice.
        """
        placed: Tensor = _Whole.apply(values, own, count, self.group)  # type: ignore[no-untyped-call]
        return placed


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, size: int, to_heads: bool) -> Tensor:
        ctx.rest = group, size, to_heads
        return _exchange(x, group, size, to_heads)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        group, size, to_heads = ctx.rest
        return _exchange(gradient, group, size, not to_heads), None, None, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, count: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(own)
        placed = values.new_zeros(count)
        placed[own] = values
        torch.distributed.all_reduce(placed, group=group)  # exact where one rank alone is not zero
        return placed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return gradient[own], None, None, None


def _exchange(x: Tensor, group: ProcessGroup, size: int, to_heads: bool) -> Tensor:
    """[S, h, d] -> [T, h / n, d], or the inverse."""
    if to_heads:
        parts = torch.stack(x.chunk(size, 1))  # [n, S, h / n, d], a part for each rank
        return _all_to_all(parts, group).flatten(0, 1)
    parts = torch.stack(x.chunk(size))  # [n, S, h / n, d], a slice for each rank
    return torch.cat(_all_to_all(parts, group).unbind(), 1)


def _all_to_all(parts: Tensor, group: ProcessGroup) -> Tensor:
    """Part i of [n, ...] goes to rank i of the group; what comes back is in the order of the ranks."""
    received = torch.empty_like(parts)
    torch.distributed.all_to_all_single(received, parts, group=group)
    return received
