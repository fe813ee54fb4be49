"""The learned drafter in EAGLE form: one layer over [embedding of the next token; the target's last hidden state].

Embedding and head are the current policy's: the drafter holds none of its own. Knows no cache and no optimiser.
Source: EAGLE (arXiv 2401.15077), TLT (arXiv 2511.16665) section 4. Shapes: ``T`` tokens, ``H`` hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt_hpc.models.layers import SPARE_POSITIONS, Attend, LayerWeights, rotary_table, transformer_layer
from tlt_hpc.models.shape import ModelShape


class Drafter(nn.Module):
    """Predicts from the feature at position t and the token at t + 1 the feature at t + 1, hence token t + 2."""

    def __init__(self, shape: ModelShape, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim

        def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
            values = torch.randn(rows, columns, generator=generator) * (scale * columns**-0.5)
            return nn.Parameter(values.to(device, dtype))

        h, i = shape.hidden_size, shape.intermediate_size
        self.fc = matrix(h, 2 * h)
        self.qkv = matrix(heads, h)
        self.output = matrix(h, shape.num_heads * shape.head_dim, 0.5)
        self.gate_up = matrix(2 * i, h)
        self.down = matrix(h, i, 0.5)
        self.post_norm = nn.Parameter(torch.ones(h, dtype=dtype, device=device))
        self.rotary = rotary_table(shape, shape.max_positions + SPARE_POSITIONS, dtype, device)

    def forward(self, embedded: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Predicted features [T, H] from next tokens ``embedded`` [T, H] and ``features`` [T, H] at positions [T]."""
        x = F.linear(torch.cat([embedded, features], -1), self.fc)
        table = self.rotary.at(positions)
        return transformer_layer(x, self._layer(), self.shape, table, 0, attend)

    def _layer(self) -> LayerWeights:
        return LayerWeights(None, self.qkv, None, self.output, self.post_norm, self.gate_up, self.down)
