"""RMSNorm with the residual sum, and the gate of an MLP: one pass over memory each. Knows no layer.

Shapes: ``T`` tokens, ``H`` hidden, ``I`` intermediate. Arithmetic is float32 (float64 for float64), rounded once at the
end, on every path.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.kernels.dispatch import runs_triton


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm of the last dimension: x [..., H], weight [H] -> [..., H]."""
    assert weight.shape == x.shape[-1:]
    if not runs_triton(x):
        return rms_norm_reference(x, weight, epsilon)
    from tlt_hpc.kernels.programs import pointwise

    return pointwise.rms_norm(_rows(x), weight, epsilon).view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The residual sum and its norm: x, residual [T, H], weight [H] -> (normed, x + residual), both [T, H]."""
    assert x.shape == residual.shape and x.dtype == residual.dtype and weight.shape == x.shape[-1:]
    if not runs_triton(x):
        return add_rms_norm_reference(x, residual, weight, epsilon)
    from tlt_hpc.kernels.programs import pointwise

    return pointwise.add_rms_norm(_rows(x), residual.contiguous(), weight, epsilon)


def gate_mul(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """An activation of the first half of each row times the second: gate_up [T, 2I] -> [T, I]."""
    assert gate_up.shape[-1] % 2 == 0 and activation in ("silu", "gelu_pytorch_tanh")
    if not runs_triton(gate_up):
        return gate_mul_reference(gate_up, activation)
    from tlt_hpc.kernels.programs import pointwise

    return pointwise.gate_mul(gate_up.contiguous(), activation == "silu")


def rms_norm_reference(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """``rms_norm`` in plain PyTorch: x [..., H], weight [H] -> [..., H]."""
    return F.rms_norm(_wide(x), (x.shape[-1],), _wide(weight), epsilon).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """``add_rms_norm`` in plain PyTorch: x, residual [T, H], weight [H] -> (normed, x + residual), both [T, H].

    The norm reads the sum as the residual stream keeps it, rounded.
    """
    total = x + residual
    return rms_norm_reference(total, weight, epsilon), total


def gate_mul_reference(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """``gate_mul`` in plain PyTorch: gate_up [T, 2I] -> [T, I]."""
    gate, up = _wide(gate_up).chunk(2, -1)
    return ((F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up).to(gate_up.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
