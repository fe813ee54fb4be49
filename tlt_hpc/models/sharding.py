"""A model over several ranks: the part of every layer that a rank of a replica computes, and slices of a long batch.

Tensor parallelism as in Megatron-LM (arXiv 1909.08053): a rank has some of the heads and some of the MLP's inner width,
so a layer needs two sums over the ranks. Embedding, head and norms are whole on each, and so are hidden states.
Shapes: ``T`` tokens, ``N`` outputs, ``K`` inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tlt_hpc.models.linear import Linear
from tlt_hpc.models.shape import ModelShape, shape_per_rank


@dataclass(frozen=True)
class Sharding:
    """This rank's place ``index`` among the ``size`` ranks that compute every pass together."""

    index: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = lambda x: x
    """The sum of all ranks' tensors, in place or not, and the same bits on all: they sample for themselves."""

    def shape_of_rank(self, shape: ModelShape) -> ModelShape:
        """The sizes of what this rank computes of a model that ``check_sharding`` let pass."""
        return shape_per_rank(shape, self.size)

    def heads(self, shape: ModelShape) -> slice:
        """This rank's query heads."""
        return self._share(shape.num_heads)

    def kv_heads(self, shape: ModelShape) -> slice:
        """The key-value heads that its query heads read; of more ranks than heads several have the same."""
        if shape.num_kv_heads >= self.size:
            return self._share(shape.num_kv_heads)
        first = self.index * shape.num_kv_heads // self.size
        return slice(first, first + 1)

    def inner_range(self, shape: ModelShape) -> slice:
        """This rank's part of the inner width of the MLP, or of each expert."""
        return self._share(shape.expert_size or shape.intermediate_size)

    def qkv_rows(self, shape: ModelShape, device: torch.device) -> Tensor:
        """This rank's rows of a fused qkv weight [(h + 2g) d], in their order: int64."""
        keys, d = self.kv_heads(shape), shape.head_dim
        groups = (self.heads(shape), 0), (keys, shape.num_heads), (keys, shape.num_heads + shape.num_kv_heads)
        return torch.cat([torch.arange((at + s.start) * d, (at + s.stop) * d, device=device) for s, at in groups])

    def row_linear(self, weight: Tensor, bias: Tensor | None = None, kind: type[Linear] = Linear) -> Linear:
        """The linear layer whose inputs are divided over the ranks: ``weight`` [N, K / size], ``bias`` [N] whole."""
        return kind(weight, bias) if self.size == 1 else SummedLinear(weight, bias, self.all_reduce, kind)

    def _share(self, count: int) -> slice:
        each = count // self.size
        return slice(self.index * each, (self.index + 1) * each)


WHOLE = Sharding()
"""One rank computes everything."""


class SummedLinear(Linear):
    """y = the sum over ranks of x W^T, + b, for this rank's columns W [N, K / size] and inputs x."""

    __slots__ = ("_all_reduce", "_product")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        all_reduce: Callable[[Tensor], Tensor],
        kind: type[Linear] = Linear,
    ) -> None:
        super().__init__(weight, bias)
        self._product, self._all_reduce = kind(weight), all_reduce

    def detach_(self) -> None:
        """Read the weights without their gradients from now on, in this rank's product too."""
        super().detach_()
        self._product = type(self._product)(self.weight)

    def pack_weights(self) -> None:
        """Derive the copy that this rank's product reads; call after each load."""
        self._product.pack_weights()

    @property
    def packed_bytes(self) -> int:
        """Bytes of the copy that this rank's product reads."""
        return self._product.packed_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K / size] -> [T, N], equal on all ranks; every rank of the replica calls it."""
        summed = self._all_reduce(self._product(x))
        return summed if self.bias is None else summed.add_(self.bias)

    def forward_plus_residual(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [T, N] + the sum over ranks for x [T, K / size] -> [T, N]; every rank of the replica calls it."""
        return self(x).add_(residual)

    def to(self, dtype: torch.dtype) -> Linear:
        """A copy in another precision, not packed."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return SummedLinear(self.weight.to(dtype), bias, self._all_reduce)


# -- one packed batch over the ranks of a group: each holds a slice of the tokens -------------------------------------
#
# In attention each has a share of the heads. Everything else acts on tokens alone. Before it the ranks exchange
# slices of all heads for all tokens of some heads, after it back (DeepSpeed-Ulysses, arXiv 2309.14509); what is
# exchanged goes back the other way in the backward pass. Shapes: ``n`` ranks of the group, ``T`` tokens of the batch, a
# multiple of ``n`` once padded, ``S`` = T / n tokens of a slice, ``h`` heads, ``d`` head size, ``R`` places that are
# read.


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

    def own_slice(self, values: Tensor) -> Tensor:
        """This rank's part [S, ...] of values [T, ...]."""
        return values.chunk(self.size)[self.rank]

    def places_in_own_slice(self, where: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
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

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """The sum of all ranks' values [N], of whose gradient each takes that of its own values."""
        return self.gather_whole(values, torch.arange(len(values), device=values.device), len(values))

    def gather_whole(self, values: Tensor, own: Tensor, count: int) -> Tensor:
        """All ranks' values as one [count], of which this rank gives ``values`` at the places ``own``.

        Every rank continues with the whole; of its gradient each takes its own part, so that no part counts twice.
        """
        placed: Tensor = _Whole.apply(values, own, count, self.group)  # type: ignore[no-untyped-call]
        return placed


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, size: int, to_heads: bool) -> Tensor:
        ctx.rest = group, size, to_heads
        return _all_to_all_heads(x, group, size, to_heads)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        group, size, to_heads = ctx.rest
        return _all_to_all_heads(gradient, group, size, not to_heads), None, None, None


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


def _all_to_all_heads(x: Tensor, group: ProcessGroup, size: int, to_heads: bool) -> Tensor:
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
