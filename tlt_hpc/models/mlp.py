"""The second half of a layer: one gated MLP, or a mixture of them from which each token takes a few. Knows no layer.

Shapes: ``T`` tokens, ``H`` hidden, ``I`` inner width, ``E`` experts, ``k`` experts of a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.kernels.dispatch import runs_triton
from tlt_hpc.kernels.linear import expert_linear, sort_by_expert, sum_weighted_experts
from tlt_hpc.kernels.pointwise import gate_mul
from tlt_hpc.models.linear import Linear


class Mlp(ABC):
    """The part of a layer that is added to the residual stream after its attention."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""

    def forward_plus_residual(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [T, H] + the result for x [T, H] -> [T, H]."""
        return self(x).add_(residual)

    @abstractmethod
    def parts(self) -> Iterator[Linear]:
        """The weights, always in the same order."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> Mlp:
        """A copy in another precision, not packed."""


class GatedMlp(Mlp):
    """down(activation(gate x) * up x); ``gate_up`` has the rows of gate [I, H] above those of up."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str = "silu") -> None:
        self.gate_up, self.down, self._activation = gate_up, down, activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(apply_gate(self.gate_up(x), self._activation))

    def forward_plus_residual(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [T, H] + the result for x [T, H] -> [T, H], in which ``down`` adds the residual."""
        return self.down.forward_plus_residual(residual, apply_gate(self.gate_up(x), self._activation))

    def parts(self) -> Iterator[Linear]:
        """``gate_up``, then ``down``."""
        yield self.gate_up
        yield self.down

    def to(self, dtype: torch.dtype) -> GatedMlp:
        """A copy in another precision, not packed."""
        return GatedMlp(self.gate_up.to(dtype), self.down.to(dtype), self._activation)


class Stack(Linear):
    """The matrices of all experts [E, N, K], as one weight; multiplied by ``kernels.experts``."""

    __slots__ = ()

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.bias = weight, None
        self._blocked = None

    def pack_weights(self) -> None:
        """Do nothing: nothing is derived from the weight."""

    def to(self, dtype: torch.dtype) -> Stack:
        """A copy in another precision."""
        return Stack(self.weight.to(dtype))


class Experts(Mlp):
    """The sum of a token's ``num_chosen`` best experts by their probabilities; a row depends on its own input alone.

    Source: Qwen3 (arXiv 2505.09388) section 2. As in transformers, the router's logits and the weights have the
    precision of x; ties go to the first expert. With several ranks each has a part of every expert's inner width, and
    ``all_reduce`` sums.
    """

    def __init__(
        self,
        router: Linear,
        gate_up: Linear,
        down: Linear,
        num_chosen: int,
        norms_weights: bool,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.router, self.gate_up, self.down = router, gate_up, down
        self._num_chosen, self._norms_weights, self._all_reduce = num_chosen, norms_weights, all_reduce

    def __call__(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        chances = self.router(x).to(wide).softmax(-1)
        weights, experts = best_experts(chances, self._num_chosen)
        if self._norms_weights:
            total = reduce(torch.add, weights.unbind(1))  # in order: a sum over them may depend on T
            weights = weights / total.unsqueeze(1)
        weights = weights.to(x.dtype).to(wide)
        order = sort_by_expert(experts, len(self.gate_up.weight))
        inner = apply_gate(expert_linear(x, self.gate_up.weight, order, self._num_chosen), "silu")
        mixed = sum_weighted_experts(expert_linear(inner, self.down.weight, order, 1), weights)
        return mixed if self._all_reduce is None else self._all_reduce(mixed)

    def parts(self) -> Iterator[Linear]:
        """``router``, ``gate_up``, ``down``."""
        yield self.router
        yield self.gate_up
        yield self.down

    def to(self, dtype: torch.dtype) -> Experts:
        """A copy in another precision, not packed."""
        router, gate_up, down = (part.to(dtype) for part in self.parts())
        return Experts(router, gate_up, down, self._num_chosen, self._norms_weights, self._all_reduce)


def best_experts(chances: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` highest of chances [T, E] and their experts int64, [T, count] each; of equal ones the first.

    A router in bfloat16 gives equal chances at the cut to one token in twenty; ``topk`` would take any of these.
    """
    best = chances.sort(stable=True, dim=-1, descending=True)
    return best.values[:, :count], best.indices[:, :count]


def apply_gate(gate_up: Tensor, activation: str) -> Tensor:
    """The activation of the gate times up: gate_up [T, 2 I] -> [T, I]."""
    if runs_triton(gate_up) and not torch.is_grad_enabled():  # the kernel has no gradient
        return gate_mul(gate_up, activation)
    gate, up = gate_up.chunk(2, 1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)
