"""One transformer layer as a pure function of its weights; where keys and values live is the caller's affair.

Shapes: ``T`` tokens (flat over sequences), ``H`` hidden, ``h`` query heads, ``g`` key-value heads, ``d`` head size.
The same function serves cached decoding, the float64 reference pass and the drafter's training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.models.shape import ModelShape

# attend(layer, query [T, h, d], key [T, g, d], value [T, g, d]) -> [T, h * d]
Attend = Callable[[int, Tensor, Tensor], Tensor]

SPARE_POSITIONS = 64
"""Rotary angles beyond the model's positions: a draft may reach past the cap before it is cut."""


@dataclass(frozen=True)
class LayerWeights:
    """Fused weights of one layer; ``input_norm`` is absent in the drafter, biases in most Llamas."""

    input_norm: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor

    def to(self, dtype: torch.dtype) -> LayerWeights:
        """A copy in another precision."""

        def cast(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(dtype)

        return LayerWeights(
            cast(self.input_norm),
            self.qkv.to(dtype),
            cast(self.qkv_bias),
            self.output.to(dtype),
            self.post_norm.to(dtype),
            self.gate_up.to(dtype),
            self.down.to(dtype),
        )


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and signed sines [positions, d]: the sign of the rotated half is folded into the sine."""

    cosine: Tensor
    sine: Tensor

    def at(self, positions: Tensor) -> RotaryTable:
        """The rows of ``positions`` [T], shaped [T, 1, d] to multiply heads."""
        return RotaryTable(self.cosine[positions].unsqueeze(1), self.sine[positions].unsqueeze(1))


def rotary_table(shape: ModelShape, num_positions: int, dtype: torch.dtype, device: torch.device) -> RotaryTable:
    """Rotary angles for positions 0..num_positions-1, computed in float64 and rounded once to ``dtype``."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    # fp32 inverse frequencies, as the reference implementation rounds them: long contexts would drift apart otherwise
    frequencies = (1.0 / shape.rope_theta ** half.float()).double()
    if shape.rope_scaling is not None:
        frequencies = _llama3_frequencies(frequencies, shape.rope_scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
    cosine = torch.cat([angles.cos(), angles.cos()], -1)
    sine = torch.cat([-angles.sin(), angles.sin()], -1)
    return RotaryTable(cosine.to(device, dtype), sine.to(device, dtype))


def _llama3_frequencies(frequencies: Tensor, scaling: dict[str, float]) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are slowed by ``factor``, short ones kept, a ramp between."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    turns = original * frequencies / (2 * math.pi)
    ramp = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - ramp) * frequencies / factor + ramp * frequencies


def rotate(x: Tensor, table: RotaryTable) -> Tensor:
    """Rotary embedding of x [T, heads, d]."""
    return torch.addcmul(x * table.cosine, x.roll(x.shape[-1] // 2, -1), table.sine)


def transformer_layer(
    x: Tensor, weights: LayerWeights, shape: ModelShape, table: RotaryTable, layer: int, attend: Attend
) -> Tensor:
    """One pre-norm layer (Qwen2, Llama): x [T, H] -> [T, H]; without ``input_norm`` attention reads x itself."""
    h, g, d = shape.num_heads, shape.num_kv_heads, shape.head_dim
    normed = x if weights.input_norm is None else F.rms_norm(x, (x.shape[-1],), weights.input_norm, shape.norm_epsilon)
    qkv = F.linear(normed, weights.qkv, weights.qkv_bias).view(-1, h + 2 * g, d)
    rotated = rotate(qkv[:, : h + g], table)
    mixed = attend(layer, rotated[:, :h], torch.cat([rotated[:, h:], qkv[:, h + g :]], 1))
    x = torch.addmm(x, mixed, weights.output.t())
    normed = F.rms_norm(x, (x.shape[-1],), weights.post_norm, shape.norm_epsilon)
    gate, up = F.linear(normed, weights.gate_up).chunk(2, -1)
    return torch.addmm(x, F.silu(gate) * up, weights.down.t())


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
