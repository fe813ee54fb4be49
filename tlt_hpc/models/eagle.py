"""The drafter in EAGLE form: one layer over [embedding of the next token; the target's last hidden state].

Embedding and head are the current policy's: the drafter holds none of its own.
Source: EAGLE (arXiv 2401.15077), TLT (arXiv 2511.16665) section 4. Shapes: ``T`` tokens, ``H`` hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_hpc.models.drafter import Drafter, DrafterParts
from tlt_hpc.models.layers import Attend
from tlt_hpc.models.linear import Linear
from tlt_hpc.models.shape import ModelShape


class Eagle(Drafter):
    """Its state is a prediction of the target's last hidden state, after the final norm."""

    form = "eagle"
    token_ids = None

    def __init__(self, shape: ModelShape, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, seed, dtype, device)
        h, i, d = shape.hidden_size, shape.intermediate_size, shape.head_dim
        self.fc = self._matrix(h, 2 * h)
        self.qkv = self._matrix((shape.num_heads + 2 * shape.num_kv_heads) * d, h)
        self.output = self._matrix(h, shape.num_heads * d, 0.5)
        self.gate_up = self._matrix(2 * i, h)
        self.down = self._matrix(h, i, 0.5)
        self.post_norm = self._ones()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return ()

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        parts = self._now()
        x = parts.fc(torch.cat([embedded, states], -1))
        return self._run(x, x, parts, positions, attend)

    def _parts(self) -> DrafterParts:
        layer = self._layer_of(self.qkv, self.output, self.post_norm, self.gate_up, self.down)
        return DrafterParts(Linear(self.fc), layer)
