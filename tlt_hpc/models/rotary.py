"""Rotary position embedding: angles, tables and the rotation of a fused query-key-value row.

Heads are in halves, as Hugging Face stores them: number j turns with number j + d/2.
Shapes: ``T`` tokens, ``P`` positions, ``h`` query heads, ``g`` key-value heads, ``d`` head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tlt_hpc.models.shape import ModelShape

SPARE_POSITIONS = 64
"""Rotary angles beyond the model's positions: a draft may reach past the cap before it is cut."""


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and signed sines [P, d]: the sign of the rotated half is folded into the sine."""

    cosine: Tensor
    sine: Tensor
    num_rotated: int
    num_values: int

    @property
    def num_bytes(self) -> int:
        """Bytes of both tables."""
        return self.cosine.nbytes + self.sine.nbytes

    def rows_at_positions(self, positions: Tensor) -> RotaryRows:
        """The rotation of a pass over ``positions`` [T]."""
        return RotaryRows(self, positions)

    def expand_to_heads(self, angles: Tensor, at_values: float) -> Tensor:
        """Angles [T, d] for every rotated head, and ``at_values`` for the values -> [T, h + 2g, d]."""
        rotated = angles.unsqueeze(1).expand(-1, self.num_rotated, -1)
        return torch.nn.functional.pad(rotated, (0, 0, 0, self.num_values), value=at_values)


@dataclass(frozen=True)
class RotaryRows:
    """The table and the positions [T] of a pass: a fused kernel reads these; rows are gathered only to ``rotate``."""

    table: RotaryTable
    positions: Tensor

    @cached_property
    def _cosines_and_sines(self) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [T, h + 2g, d]; 1 and 0 at the values, which pass through."""
        table = self.table
        cosine, sine = table.cosine[self.positions], table.sine[self.positions]
        return table.expand_to_heads(cosine, 1.0), table.expand_to_heads(sine, 0.0)

    def rotate(self, qkv: Tensor) -> Tensor:
        """qkv [T, (h + 2g) d] -> [T, h + 2g, d] with queries and keys rotated."""
        cosine, sine = self._cosines_and_sines
        x = qkv.view(cosine.shape)
        return torch.addcmul(x * cosine, x.roll(x.shape[-1] // 2, -1), sine)


def rotary_table(
    shape: ModelShape, num_positions: int, dtype: torch.dtype, device: torch.device, is_local: bool = False
) -> RotaryTable:
    """Rotary angles for positions 0..num_positions-1, computed in float64 and rounded once to ``dtype``.

    ``is_local``: those of the layers with a sliding window.
    """
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    # fp32 inverse frequencies, as the reference implementation rounds them: long contexts would drift apart otherwise
    theta = shape.local_theta if is_local and shape.local_theta else shape.rope_theta
    frequencies = (1.0 / theta ** half.float()).double()
    frequencies = _scale_frequencies(frequencies, None if is_local else shape.rope_scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
    heads = shape.num_heads + shape.num_kv_heads, shape.num_kv_heads
    cosine = torch.cat([angles.cos(), angles.cos()], -1)
    sine = torch.cat([-angles.sin(), angles.sin()], -1)
    return RotaryTable(cosine.to(device, dtype), sine.to(device, dtype), *heads)


class LayerRotaries:
    """The tables of all layers: those with a sliding window may turn otherwise than the rest."""

    def __init__(self, shape: ModelShape, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        self._tables = [rotary_table(shape, num_positions, dtype, device)]
        if shape.local_theta is not None and any(shape.local_layers):
            self._tables.append(rotary_table(shape, num_positions, dtype, device, is_local=True))
        self._of_layer = [int(local) % len(self._tables) for local in shape.local_layers or (False,) * shape.num_layers]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tables."""
        return sum(table.num_bytes for table in self._tables)

    def rows_at_positions(self, positions: Tensor) -> list[RotaryRows]:
        """The rotation of each layer in a pass over ``positions`` [T]."""
        rows = [table.rows_at_positions(positions) for table in self._tables]
        return [rows[index] for index in self._of_layer]


def _scale_frequencies(frequencies: Tensor, scaling: dict[str, Any] | None) -> Tensor:
    """Of Llama 3.1: long wavelengths are slowed by ``factor``, short ones kept, a ramp between; or linear: all are."""
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "linear":
        return frequencies / float(scaling["factor"])
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    turns = original * frequencies / (2 * math.pi)
    ramp: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = (1 - ramp) * frequencies / factor + ramp * frequencies
    return scaled
