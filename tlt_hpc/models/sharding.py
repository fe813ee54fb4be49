"""Which part of every layer one rank of a replica computes, and how the parts are summed. Knows no library to do it.

Tensor parallelism as in Megatron-LM (arXiv 1909.08053): a rank has some of the heads and some of the MLP's inner width,
so a layer needs two sums over the ranks. Embedding, head and norms are whole on each, and so are hidden states.
Shapes: ``T`` tokens, ``N`` outputs, ``K`` inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_hpc.models.linear import Linear
from tlt_hpc.models.shape import ModelShape, part_of


@dataclass(frozen=True)
class Sharding:
    """This rank's place ``index`` among the ``size`` ranks that compute every pass together."""

    index: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = lambda x: x
    """The sum of all ranks' tensors, in place or not, and the same bits on all: they sample for themselves."""

    def part(self, shape: ModelShape) -> ModelShape:
        """The sizes of what this rank computes of a model that ``check_sharding`` let pass."""
        return part_of(shape, self.size)

    def heads(self, shape: ModelShape) -> slice:
        """This rank's query heads."""
        return self._share(shape.num_heads)

    def kv_heads(self, shape: ModelShape) -> slice:
        """The key-value heads that its query heads read; of more ranks than heads several have the same."""
        if shape.num_kv_heads >= self.size:
            return self._share(shape.num_kv_heads)
        first = self.index * shape.num_kv_heads // self.size
        return slice(first, first + 1)

    def inner(self, shape: ModelShape) -> slice:
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

    def pack(self) -> None:
        """Derive the copy that this rank's product reads; call after each load."""
        self._product.pack()

    @property
    def packed_bytes(self) -> int:
        """Bytes of the copy that this rank's product reads."""
        return self._product.packed_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K / size] -> [T, N], equal on all ranks; every rank of the replica calls it."""
        summed = self._all_reduce(self._product(x))
        return summed if self.bias is None else summed.add_(self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [T, N] + the sum over ranks for x [T, K / size] -> [T, N]; every rank of the replica calls it."""
        return self(x).add_(residual)

    def to(self, dtype: torch.dtype) -> Linear:
        """A copy in another precision, not packed."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return SummedLinear(self.weight.to(dtype), bias, self._all_reduce)
