"""Rotary position embedding: angles, tables and the rotation of a fused query-key-value row. Knows no weights.

Two layouts of a head. *Halves*, as Hugging Face stores it: number j turns with number j + d/2; any precision, and
what the CUDA kernels read. *Pairs*: number 2j turns with 2j + 1, so that a rotation is one complex product; the rows
of the query and key weights are permuted to it at load, which leaves every score as it is.
Shapes: ``T`` tokens, ``P`` positions, ``h`` query heads, ``g`` key-value heads, ``d`` head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tlt_hpc.models.shape import ModelShape

SPARE_POSITIONS = 64
"""Rotary angles beyond the model's positions: a draft may reach past the cap before it is cut."""


def in_pairs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether heads are laid out in pairs: on CPUs, in the precisions that have complex numbers."""
    return device.type == "cpu" and dtype in (torch.float32, torch.float64)


@dataclass(frozen=True)
class HalvesRows:
    """The table and the positions [T] of a pass: a fused kernel reads these; rows are gathered only to ``rotate``."""

    table: RotaryTable
    positions: Tensor

    @cached_property
    def _turns(self) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [T, h + 2g, d]; 1 and 0 at the values, which pass through."""
        return self.table.rows(self.positions)

    def rotate(self, qkv: Tensor) -> Tensor:
        """qkv [T, (h + 2g) d] -> [T, h + 2g, d] with queries and keys rotated."""
        cosine, sine = self._turns
        x = qkv.view(cosine.shape)
        return torch.addcmul(x * cosine, x.roll(x.shape[-1] // 2, -1), sine)


@dataclass(frozen=True)
class PairsRows:
    """Unit complex numbers [T, (h + 2g) d / 2] of a pass; 1 at the values, which pass through."""

    turns: Tensor
    num_heads: int

    def rotate(self, qkv: Tensor) -> Tensor:
        """qkv [T, (h + 2g) d] -> [T, h + 2g, d] with queries and keys rotated."""
        if qkv.requires_grad:  # a view of another dtype has no gradient; the slower way round has
            pairs = torch.view_as_complex(qkv.view(qkv.shape[0], -1, 2))
            rotated = torch.view_as_real(pairs * self.turns)
        else:
            rotated = (qkv.view(self.turns.dtype) * self.turns).view(qkv.dtype)
        return rotated.view(qkv.shape[0], self.num_heads, -1)


RotaryRows = HalvesRows | PairsRows


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and signed sines [P, d] for heads in halves: the sign of the rotated half is folded into the sine."""

    cosine: Tensor
    sine: Tensor
    num_rotated: int
    num_values: int

    def at(self, positions: Tensor) -> RotaryRows:
        """What a pass over ``positions`` [T] multiplies by."""
        return HalvesRows(self, positions)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of all heads at ``positions`` [T] -> both [T, h + 2g, d]."""
        return self._all_heads(self.cosine[positions], 1.0), self._all_heads(self.sine[positions], 0.0)

    def _all_heads(self, angles: Tensor, at_values: float) -> Tensor:
        rotated = angles.unsqueeze(1).expand(-1, self.num_rotated, -1)
        return torch.nn.functional.pad(rotated, (0, 0, 0, self.num_values), value=at_values)


_MOST_TABLE_BYTES = 2**26
"""Of a table over all heads; beyond, rows are put together pass by pass."""


@dataclass(frozen=True)
class PairsTable:
    """Unit complex numbers [P, d / 2] for heads in pairs."""

    turns: Tensor
    num_rotated: int
    num_values: int
    rows: Tensor | None
    """Those of all heads [P, (h + 2g) d / 2], where they are few: one operation a pass instead of four."""

    def at(self, positions: Tensor) -> RotaryRows:
        """What a pass over ``positions`` [T] multiplies by."""
        num_heads = self.num_rotated + self.num_values
        if self.rows is not None:
            return PairsRows(self.rows.index_select(0, positions), num_heads)
        return PairsRows(_all_heads(self.turns[positions], self.num_rotated, self.num_values), num_heads)


def _all_heads(turns: Tensor, num_rotated: int, num_values: int) -> Tensor:
    """Turns [T, d / 2] for every rotated head, then ones for the values."""
    ones = torch.ones_like(turns[:, :1]).expand(-1, num_values * turns.shape[1])
    return torch.cat([turns] * num_rotated + [ones], 1)


def rotary_table(
    shape: ModelShape, num_positions: int, dtype: torch.dtype, device: torch.device, pairs: bool = False
) -> RotaryTable | PairsTable:
    """Rotary angles for positions 0..num_positions-1, computed in float64 and rounded once to ``dtype``."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    # fp32 inverse frequencies, as the reference implementation rounds them: long contexts would drift apart otherwise
    frequencies = (1.0 / shape.rope_theta ** half.float()).double()
    if shape.rope_scaling is not None:
        frequencies = _llama3_frequencies(frequencies, shape.rope_scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
    heads = shape.num_heads + shape.num_kv_heads, shape.num_kv_heads
    if pairs:
        turns = torch.polar(torch.ones_like(angles), angles)
        turns = turns.to(device, torch.complex64 if dtype == torch.float32 else torch.complex128)
        few = turns.nbytes * sum(heads) <= _MOST_TABLE_BYTES
        return PairsTable(turns, *heads, _all_heads(turns, *heads) if few else None)
    cosine = torch.cat([angles.cos(), angles.cos()], -1)
    sine = torch.cat([-angles.sin(), angles.sin()], -1)
    return RotaryTable(cosine.to(device, dtype), sine.to(device, dtype), *heads)


def _llama3_frequencies(frequencies: Tensor, scaling: dict[str, float]) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are slowed by ``factor``, short ones kept, a ramp between."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    turns = original * frequencies / (2 * math.pi)
    ramp: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - ramp) * frequencies / factor + ramp * frequencies


def pairs_order(shape: ModelShape, device: torch.device) -> Tensor:
    """Which row of a fused qkv weight in halves each row in pairs is: [(h + 2g) d] int64; values stay."""
    d, rotated = shape.head_dim, shape.num_heads + shape.num_kv_heads
    rows = torch.arange((rotated + shape.num_kv_heads) * d, device=device)
    heads = rows[: rotated * d].view(rotated, 2, d // 2).transpose(1, 2)
    return torch.cat([heads.flatten(), rows[rotated * d :]])
