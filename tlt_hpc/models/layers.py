"""One transformer layer as a pure function of its weights; where keys and values live is the caller's affair.

Shapes: ``T`` tokens (flat over sequences), ``H`` hidden, ``h`` query heads, ``g`` key-value heads, ``d`` head size.
The same function serves cached decoding, the float64 reference pass and the drafter's training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.kernels.dispatch import runs_triton
from tlt_hpc.kernels.pointwise import silu_mul
from tlt_hpc.kernels.rotary import HeadNorms
from tlt_hpc.models.linear import Linear, Norm
from tlt_hpc.models.rotary import HalvesRows, RotaryRows
from tlt_hpc.models.shape import ModelShape

# attend(layer, query [T, h, d], key_value [T, 2g, d]: rotated keys, then values) -> [T, h * d]. Both are slices of
# one contiguous [T, h + 2g, d].
Attend = Callable[[int, Tensor, Tensor], Tensor]


class FusedAttend(ABC):
    """An ``Attend`` that can norm heads, rotate and store by itself, where heads are in halves and nothing learns."""

    @abstractmethod
    def __call__(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """As ``Attend``."""

    @abstractmethod
    def fused(self, layer: int, qkv: Tensor, rotary: HalvesRows, norms: HeadNorms | None) -> Tensor:
        """qkv [T, h + 2g, d] as projected -> [T, h * d]; ``norms``, where given, come before the rotation."""


@dataclass(frozen=True)
class LayerWeights:
    """Fused weights of one layer; ``input_norm`` is absent in the drafter, ``head_norm`` outside Qwen3."""

    input_norm: Norm | None
    qkv: Linear
    head_norm: Norm | None
    """Weights [h + g, d] of the norm of each query and key head."""
    output: Linear
    post_norm: Norm
    gate_up: Linear
    down: Linear

    def to(self, dtype: torch.dtype) -> LayerWeights:
        """A copy in another precision, not packed."""
        return LayerWeights(
            None if self.input_norm is None else self.input_norm.to(dtype),
            self.qkv.to(dtype),
            None if self.head_norm is None else self.head_norm.to(dtype),
            self.output.to(dtype),
            self.post_norm.to(dtype),
            self.gate_up.to(dtype),
            self.down.to(dtype),
        )

    def pack(self) -> None:
        """Derive what the fast path reads; call after each load."""
        for part in self._parts():
            part.pack()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights themselves."""
        biases = [part.bias for part in self._parts() if isinstance(part, Linear) and part.bias is not None]
        return sum(part.weight.nbytes for part in self._parts()) + sum(bias.nbytes for bias in biases)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed copies, beside the weights' own."""
        return sum(part.packed_bytes for part in self._parts() if isinstance(part, Linear))

    def _parts(self) -> Iterator[Linear | Norm]:
        parts = (vars(self)[field.name] for field in fields(self))
        return (part for part in parts if part is not None)


def run_layers(
    x: Tensor,
    layers: Sequence[LayerWeights],
    final_norm: Norm | None,
    shape: ModelShape,
    rotary: RotaryRows,
    attend: Attend,
) -> Tensor:
    """All layers, then the final norm if there is one: x [T, H] -> [T, H]; fused where ``attend`` can and may."""
    if isinstance(rotary, HalvesRows) and isinstance(attend, FusedAttend) and not torch.is_grad_enabled():
        return _run_fused(x, layers, final_norm, shape, rotary, attend)
    for i, weights in enumerate(layers):
        x = transformer_layer(x, weights, shape, rotary, i, attend)
    return x if final_norm is None else final_norm(x)


def transformer_layer(
    x: Tensor, weights: LayerWeights, shape: ModelShape, rotary: RotaryRows, layer: int, attend: Attend
) -> Tensor:
    """One pre-norm layer (Qwen2, Qwen3, Llama): x [T, H] -> [T, H]; without ``input_norm`` attention reads x itself."""
    h, g = shape.num_heads, shape.num_kv_heads
    qkv = weights.qkv(x if weights.input_norm is None else weights.input_norm(x))
    if weights.head_norm is not None:
        qkv = _norm_heads(qkv, weights.head_norm)
    query, key_value = rotary.rotate(qkv).split_with_sizes((h, 2 * g), 1)
    x = weights.output.add_to(x, attend(layer, query, key_value))
    return weights.down.add_to(x, _gated(weights.gate_up(weights.post_norm(x)), shape.intermediate_size))


def _run_fused(
    x: Tensor,
    layers: Sequence[LayerWeights],
    final_norm: Norm | None,
    shape: ModelShape,
    rotary: HalvesRows,
    attend: FusedAttend,
) -> Tensor:
    """``run_layers`` in fewer passes over memory: what a layer adds to x is added by the norm that comes next."""
    delta = None
    for i, weights in enumerate(layers):
        x, delta = _fused_layer(x, delta, weights, shape, rotary, i, attend)
    return _norm_of_sum(final_norm, x, delta)[0]


def _fused_layer(
    x: Tensor,
    delta: Tensor | None,
    weights: LayerWeights,
    shape: ModelShape,
    rotary: HalvesRows,
    layer: int,
    attend: FusedAttend,
) -> tuple[Tensor, Tensor]:
    """``transformer_layer`` of x + delta [T, H], given and returned as these two terms."""
    normed, x = _norm_of_sum(weights.input_norm, x, delta)
    qkv = weights.qkv(normed).view(x.shape[0], -1, shape.head_dim)
    mixed = attend.fused(layer, qkv, rotary, _head_norms(weights.head_norm, shape.num_heads))
    normed, x = weights.post_norm.of_sum(weights.output(mixed), x)
    return x, weights.down(_gated(weights.gate_up(normed), shape.intermediate_size))


def _norm_of_sum(norm: Norm | None, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """The norm (none: the identity) of x + delta, and that sum; no delta is zero."""
    if norm is not None and delta is not None:
        return norm.of_sum(delta, x)
    total = x if delta is None else x + delta
    return total if norm is None else norm(total), total


def _head_norms(norm: Norm | None, num_heads: int) -> HeadNorms | None:
    """As the kernel takes them: loading gave every query head one and the same weight, and every key head another."""
    return None if norm is None else (norm.weight[0], norm.weight[num_heads], norm.epsilon)


def _gated(gate_up: Tensor, size: int) -> Tensor:
    """SiLU of the gate times up: gate_up [T, 2 size] -> [T, size]."""
    if runs_triton(gate_up) and not torch.is_grad_enabled():  # the kernel has no gradient
        return silu_mul(gate_up)
    gate, up = gate_up.split_with_sizes((size, size), 1)
    return F.silu(gate).mul_(up)


def _norm_heads(qkv: Tensor, norm: Norm) -> Tensor:
    """Norm of each query and key head of qkv [T, (h + 2g) d]; the values stay."""
    num_normed, d = norm.weight.shape
    heads = qkv.view(qkv.shape[0], -1, d)
    return torch.cat([norm(heads[:, :num_normed]), heads[:, num_normed:]], 1).view(qkv.shape)


def attend_documents(shape: ModelShape, documents: Tensor | None) -> Attend:
    """Causal attention of a flat batch over itself, each document [T] on its own (None: all one document)."""

    def attend(layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        key, value = key_value.chunk(2, 1)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        mask = None
        if documents is not None:
            same = documents.unsqueeze(0) == documents.unsqueeze(1)
            mask = same.tril_().view(1, 1, *same.shape)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1).reshape(query.shape[0], -1)

    return attend
