"""One transformer layer as a pure function of its weights; where keys and values live is the caller's affair.

Shapes: ``T`` tokens (flat over sequences), ``H`` hidden, ``h`` query heads, ``g`` key-value heads, ``d`` head size.
The same function serves cached decoding, the float64 reference pass and the drafter's training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

import torch
from torch import Tensor

from tlt_hpc.kernels.pointwise import HeadNorms
from tlt_hpc.models.linear import Linear, Norm
from tlt_hpc.models.mlp import Mlp
from tlt_hpc.models.rotary import RotaryRows
from tlt_hpc.models.shape import ModelShape

# attend(layer, query [T, h, d], key_value [T, 2g, d]: rotated keys, then values) -> [T, h * d]. Both are slices of
# one contiguous [T, h + 2g, d].
Attend = Callable[[int, Tensor, Tensor], Tensor]


class FusedAttend(ABC):
    """An ``Attend`` that can norm heads, rotate and store by itself, where nothing learns."""

    @abstractmethod
    def __call__(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """As ``Attend``."""

    @abstractmethod
    def attend_fused(self, layer: int, qkv: Tensor, rotary: RotaryRows, norms: HeadNorms | None) -> Tensor:
        """qkv [T, h + 2g, d] as projected -> [T, h * d]; ``norms``, where given, come before the rotation."""


@dataclass(frozen=True)
class LayerWeights:
    """Fused weights of one layer; a norm is None where the family, or the drafter, does without it."""

    input_norm: Norm | None
    qkv: Linear
    head_norm: Norm | None
    """Weights [h + g, d] of the norm of each query and key head."""
    output: Linear
    post_norm: Norm
    """Of what the MLP reads."""
    mlp: Mlp
    after_attention: Norm | None = None
    """Of what attention adds to the residual stream."""
    after_mlp: Norm | None = None

    def to(self, dtype: torch.dtype) -> LayerWeights:
        """A copy in another precision, not packed."""
        parts: dict[str, Any] = {name: None if part is None else part.to(dtype) for name, part in vars(self).items()}
        return LayerWeights(**parts)

    def pack_weights(self) -> None:
        """Derive what the fast path reads; call after each load."""
        for part in self.parts():
            part.pack_weights()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights themselves."""
        return sum(tensor.nbytes for part in self.parts() for tensor in part.tensors)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed copies, beside the weights' own."""
        return sum(part.packed_bytes for part in self.parts() if isinstance(part, Linear))

    def parts(self) -> Iterator[Linear | Norm]:
        """The linear layers and norms that the layer has, in the order of the fields."""
        for part in (vars(self)[field.name] for field in fields(self)):
            if isinstance(part, Mlp):
                yield from part.parts()
            elif part is not None:
                yield part


def run_layers(
    x: Tensor,
    layers: Sequence[LayerWeights],
    final_norm: Norm,
    shape: ModelShape,
    rotaries: Sequence[RotaryRows],
    attend: Attend,
    tapped: Collection[int] = (),
) -> tuple[Tensor, list[Tensor]]:
    """All layers, then the final norm: x [T, H] -> [T, H]; fused where ``attend`` can and may.

    Returns also what entered each of the layers ``tapped`` [T, H], the lowest first.
    """
    if _may_fuse(attend):
        return _run_fused(x, layers, final_norm, shape, rotaries, attend, tapped)
    entering = []
    for i, (weights, rotary) in enumerate(zip(layers, rotaries, strict=True)):
        if i in tapped:
            entering.append(x)
        x = transformer_layer(x, weights, shape, rotary, i, attend)
    return final_norm(x), entering


def run_draft_layer(
    x: Tensor, reads: Tensor, weights: LayerWeights, shape: ModelShape, rotary: RotaryRows, attend: Attend
) -> Tensor:
    """One layer whose attention reads ``reads`` [T, R] as given, and whose result is added to x [T, H] -> [T, H]."""
    if _may_fuse(attend):
        x, delta = _fused_after_input_norm(x, reads, weights, shape, 0, rotary, attend)
        return x + delta
    return _layer_after_input_norm(x, reads, weights, shape, rotary, 0, attend)


def _may_fuse(attend: Attend) -> TypeGuard[FusedAttend]:
    """Whether the fused layers can and may run."""
    return isinstance(attend, FusedAttend) and not torch.is_grad_enabled()


def transformer_layer(
    x: Tensor, weights: LayerWeights, shape: ModelShape, rotary: RotaryRows, layer: int, attend: Attend
) -> Tensor:
    """One pre-norm layer: x [T, H] -> [T, H]."""
    assert weights.input_norm is not None, "only a drafter goes without"
    return _layer_after_input_norm(x, weights.input_norm(x), weights, shape, rotary, layer, attend)


def _layer_after_input_norm(
    x: Tensor, reads: Tensor, weights: LayerWeights, shape: ModelShape, rotary: RotaryRows, layer: int, attend: Attend
) -> Tensor:
    """A layer after its input norm: what attention reads [T, R], and x [T, H] that it adds to."""
    h, g = shape.num_heads, shape.num_kv_heads
    qkv = weights.qkv(reads)
    if weights.head_norm is not None:
        qkv = _norm_heads(qkv, weights.head_norm)
    query, key_value = rotary.rotate(qkv).split_with_sizes((h, 2 * g), 1)
    mixed = attend(layer, query, key_value)
    if weights.after_attention is None:
        x = weights.output.forward_plus_residual(x, mixed)
    else:
        x = x + weights.after_attention(weights.output(mixed))
    if weights.after_mlp is None:
        return weights.mlp.forward_plus_residual(x, weights.post_norm(x))
    return x + weights.after_mlp(weights.mlp(weights.post_norm(x)))


def _run_fused(
    x: Tensor,
    layers: Sequence[LayerWeights],
    final_norm: Norm,
    shape: ModelShape,
    rotaries: Sequence[RotaryRows],
    attend: FusedAttend,
    tapped: Collection[int],
) -> tuple[Tensor, list[Tensor]]:
    """``run_layers`` in fewer passes over memory: what a layer adds to x is added by the norm that comes next."""
    delta, entering = None, []
    for i, (weights, rotary) in enumerate(zip(layers, rotaries, strict=True)):
        assert weights.input_norm is not None, "only a drafter goes without"
        reads, x = _norm_of_sum(weights.input_norm, x, delta)
        if i in tapped:
            entering.append(x)
        x, delta = _fused_after_input_norm(x, reads, weights, shape, i, rotary, attend)
    return _norm_of_sum(final_norm, x, delta)[0], entering


def _fused_after_input_norm(
    x: Tensor,
    reads: Tensor,
    weights: LayerWeights,
    shape: ModelShape,
    layer: int,
    rotary: RotaryRows,
    attend: FusedAttend,
) -> tuple[Tensor, Tensor]:
    """``_layer_after_input_norm``, whose result [T, H] is given as two terms."""
    qkv = weights.qkv(reads).view(x.shape[0], -1, shape.head_dim)
    mixed = attend.attend_fused(layer, qkv, rotary, _head_norms(weights.head_norm, shape.num_heads))
    added = weights.output(mixed)
    if weights.after_attention is not None:
        added = weights.after_attention(added)
    normed, x = weights.post_norm.add_and_norm(added, x)
    added = weights.mlp(normed)
    return x, added if weights.after_mlp is None else weights.after_mlp(added)


def _norm_of_sum(norm: Norm, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """The norm of x + delta, and that sum; no delta is zero."""
    return (norm(x), x) if delta is None else norm.add_and_norm(delta, x)


def _head_norms(norm: Norm | None, num_heads: int) -> HeadNorms | None:
    """As the kernel takes them: loading gave every query head one and the same weight, and every key head another."""
    return None if norm is None else (norm.weight[0], norm.weight[num_heads], norm.epsilon)


def _norm_heads(qkv: Tensor, norm: Norm) -> Tensor:
    """Norm of each query and key head of qkv [T, (h + 2g) d]; the values stay."""
    num_normed, d = norm.weight.shape
    heads = qkv.view(qkv.shape[0], -1, d)
    return torch.cat([norm(heads[:, :num_normed]), heads[:, num_normed:]], 1).view(qkv.shape)
