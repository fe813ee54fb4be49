"""Weight matrices and norms in the layout that computes fastest where they live. Knows no model and no cache.

The plain weight stays the truth: it is loaded into, exported and cast to float64. ``pack_weights`` derives from it
what the fast path reads, and is called again after each load; the object itself is kept.
Shapes: ``T`` tokens, ``N`` outputs, ``K`` inputs, ``H`` hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.kernels.dispatch import runs_triton
from tlt_hpc.kernels.linear import invariant_linear
from tlt_hpc.kernels.pointwise import add_rms_norm, rms_norm

_LEAST_PACKED = 2**18
"""Elements from which a blocked copy pays: below, its dearer call (13 us against 3) costs more than it saves."""
_HAS_ONEDNN = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
_NEVER = -(2.0**100)
"""The logit of a token that is excluded: finite, so that its product with a probability of 0 is 0, and the same number
in float32 and float64, so that the tie guard sees no difference between them.
"""
_FULL_ROWS = 4
"""Rows that the blocked product needs to reach the memory's speed; one or two are padded to it by repetition."""


def _can_block(weight: Tensor) -> bool:
    """True if oneDNN multiplies by a blocked copy of this matrix, and gains by it.

    Tensors without memory, by which a run is planned, are taken for a CPU's as long as oneDNN is enabled.
    """
    is_enabled = _HAS_ONEDNN and torch.backends.mkldnn.enabled
    if weight.device.type not in ("cpu", "meta") or weight.numel() < _LEAST_PACKED or not is_enabled:
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class Linear:
    """y = x W^T + b, for W [N, K] and b [N] or none."""

    __slots__ = ("_blocked", "_transposed", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self._transposed = weight.t()
        self._blocked: Tensor | None = None

    def pack_weights(self) -> None:
        """Derive the blocked copy again from the weight, on CPUs and for matrices where it pays."""
        if not _can_block(self.weight):
            return
        if self.weight.is_meta:
            self._blocked = torch.empty_like(self.weight)
        else:
            # any hint over 1 gives one and the same layout, which serves every number of rows without a reorder
            self._blocked = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _FULL_ROWS)

    def detach_(self) -> None:
        """Read the weights without their gradients from now on: views of them then outlive changes in place."""
        self.weight = self.weight.detach()
        self.bias = None if self.bias is None else self.bias.detach()
        self._transposed = self.weight.t()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weight [N, K], and the bias [N] where there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the blocked copy, beside the weight's own."""
        return 0 if self._blocked is None else self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        if self._blocked is not None:
            return self._multiply_blocked(x, self._blocked)
        return torch.mm(x, self._transposed) if self.bias is None else torch.addmm(self.bias, x, self._transposed)

    def multiply_in_float32(self, x: Tensor) -> Tensor:
        """The product [T, N] of x [T, K] in at least float32: not rounded to the precision of x on a GPU."""
        if x.is_cuda and x.dtype.itemsize < 4:
            assert self.bias is None
            return torch.mm(x, self._transposed, out_dtype=torch.float32)
        out = self(x)
        return out if out.dtype == torch.float64 else out.float()

    def forward_plus_residual(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [T, N] + the product of x [T, K] -> [T, N]."""
        if self._blocked is None and self.weight.numel() >= _LEAST_PACKED:
            return self(x).add_(residual)  # one rounding more, but summed apart from the residual it is nearer to exact
        if self._blocked is None:
            return torch.addmm(residual if self.bias is None else residual + self.bias, x, self._transposed)
        if x.shape[0] <= _FULL_ROWS // 2:
            return self._multiply_blocked(x, self._blocked).add_(residual)
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._blocked, self.bias, "add")
        return out

    def to(self, dtype: torch.dtype) -> Linear:
        """A copy in another precision, not packed."""
        return Linear(self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))

    def _multiply_blocked(self, x: Tensor, blocked: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if 0 < num_rows <= _FULL_ROWS // 2:
            x = torch.cat((x,) * (_FULL_ROWS // num_rows))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, blocked, self.bias, "none", [], "")
        return out[:num_rows]


class InvariantLinear(Linear):
    """A linear layer in which an output row depends on its own input row alone, to the last bit; without a gradient."""

    __slots__ = ()

    def pack_weights(self) -> None:
        """Do nothing: nothing is derived from the weight."""

    def __call__(self, x: Tensor) -> Tensor:
        return invariant_linear(x, self.weight, self.bias)

    def multiply_in_float32(self, x: Tensor) -> Tensor:
        """The product [T, N] of x [T, K] in float32."""
        return invariant_linear(x, self.weight, self.bias, torch.float32)

    def forward_plus_residual(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [T, N] + the product of x [T, K] -> [T, N]."""
        return self(x).add_(residual)


class Norm:
    """RMS norm over the last dimension, times a weight [H] (or [heads, d], one row a head)."""

    __slots__ = ("_floor", "_scaled", "epsilon", "weight")

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self.weight, self.epsilon = weight, epsilon
        self._scaled: Tensor | None = None
        self._floor: Tensor | None = None
        self.pack_weights()

    def pack_weights(self) -> None:
        """Derive from the weight what the fast path reads; call after each load."""
        if self.weight.device.type == "cpu" and self.weight.dtype in (torch.float32, torch.float64):
            size = self.weight.shape[-1]
            self._scaled = self.weight * math.sqrt(size)
            self._floor = self.weight.new_full((), math.sqrt(size * self.epsilon), requires_grad=False)

    def detach_(self) -> None:
        """Read the weight without its gradient from now on."""
        self.weight = self.weight.detach()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weight alone, [H] or [heads, d]."""
        return (self.weight,)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        if self._scaled is not None and self._floor is not None and x.dtype == self.weight.dtype:
            # sqrt(|x|^2 + H epsilon): half the time of rms_norm, which is made of six operations on a CPU
            length = torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), self._floor)
            return torch.mul(x, self._scaled).div_(length)
        if self.weight.dim() == 1 and runs_triton(x) and not torch.is_grad_enabled():  # the kernel has no gradient
            return rms_norm(x, self.weight, self.epsilon)
        if self.weight.dtype != x.dtype:
            return F.rms_norm(x.to(self.weight.dtype), (x.shape[-1],), None, self.epsilon).mul_(self.weight).to(x.dtype)
        normed = F.rms_norm(x, (x.shape[-1],), self.weight if self.weight.dim() == 1 else None, self.epsilon)
        return normed if self.weight.dim() == 1 else normed * self.weight

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum, in one pass over memory: [T, H] each; without a gradient."""
        return add_rms_norm(x, residual, self.weight, self.epsilon)

    def to(self, dtype: torch.dtype) -> Norm:
        """A copy in another precision."""
        return Norm(self.weight.to(dtype), self.epsilon)


def mask_excluded_tokens(logits: Tensor, ids: Tensor | None) -> Tensor:
    """Exclude the tokens ``ids`` [N] from a softmax of logits [R, V], changed in place -> [R, V]."""
    return logits if ids is None else logits.index_fill_(1, ids, _NEVER)


def copy_and_pack_parts(target: Iterable[Linear | Norm], source: Iterable[Linear | Norm]) -> None:
    """Copy the numbers of parts into other parts' memory and precision, and pack these; addresses do not change."""
    for part, given in zip(target, source, strict=True):
        for own, other in zip(part.tensors, given.tensors, strict=True):
            own.copy_(other)
        part.pack_weights()
