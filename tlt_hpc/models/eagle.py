"""The drafter in EAGLE form: one layer over [embedding of the next token; the target's last hidden state].

Embedding and head are the current policy's: the drafter holds none of its own.
Source: EAGLE (arXiv 2401.15077), TLT (arXiv 2511.16665) section 4. Shapes: ``T`` tokens, ``H`` hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tlt_hpc.models.draft_layer import AS_TARGET, DraftLayer
from tlt_hpc.models.drafter import Drafter, DrafterParts
from tlt_hpc.models.layers import Attend
from tlt_hpc.models.linear import Linear
from tlt_hpc.models.shape import ModelShape


class Eagle(Drafter):
    """The EAGLE drafter: its state predicts the target's last hidden state, after the final norm."""

    form = "eagle"
    token_ids = None
    fc_bias: nn.Parameter | None

    def __init__(
        self, target: ModelShape, seed: int, dtype: torch.dtype, device: torch.device, own: DraftLayer = AS_TARGET
    ) -> None:
        super().__init__(target, seed, dtype, device, own)
        self._init_layer(2 * target.hidden_size, target.hidden_size)
        self.post_norm = self._ones()
        self.register_parameter("fc_bias", nn.Parameter(torch.zeros_like(self.post_norm)) if own.fc_bias else None)
        self._served_ids: Tensor | None = None

    @property
    def served_ids(self) -> Tensor | None:
        """The tokens [W] int64 of ``draft_among``; None: all."""
        return self._served_ids

    def draft_among(self, token_ids: Tensor) -> None:
        """Serve with these tokens alone [W] int64, ascending: a draft then reads W rows of the target's head.

        Source: FR-Spec (arXiv 2502.14856). Training reads the whole head.
        """
        self._served_ids = token_ids.to(self._device)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """None of the layers: the last hidden state alone is kept."""
        return ()

    def fuse(self, features: Tensor) -> Tensor:
        """Return the features [T, H] as they are -> [T, H]."""
        return features

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Next states [T, H]: ``fc`` of [embedded; states], then one layer; arguments as ``Drafter.forward``."""
        parts = self._now()
        x = parts.fc(torch.cat([embedded, states], -1))
        return self._run(x, x, parts, positions, attend)

    def _parts(self) -> DrafterParts:
        return DrafterParts(Linear(self.fc, self.fc_bias), self._layer())
