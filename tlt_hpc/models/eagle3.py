"""The drafter in EAGLE-3 form: three of the target's layers in, a head over a vocabulary of its own out.

Source: EAGLE-3 (arXiv 2503.01840). Shapes: ``T`` tokens, ``H`` hidden, ``V`` target vocabulary, ``W`` draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_hpc.models.draft_layer import AS_TARGET, DraftLayer
from tlt_hpc.models.drafter import Drafter, DrafterParts
from tlt_hpc.models.layers import Attend
from tlt_hpc.models.linear import Linear
from tlt_hpc.models.shape import LEAST_LAYERS, ModelShape


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """The target's layers whose inputs, the residual stream entering them, are an EAGLE-3 drafter's features."""
    return 2, num_layers // 2, num_layers - 3


class Eagle3(Drafter):
    """The EAGLE-3 drafter: its state is first ``fc`` of three layers' features, then its output before ``final_norm``.

    Attention reads [norm(embedding); norm(state)], and what comes of it is added to the state, in some
    published heads to norm(state).
    """

    form = "eagle3"
    token_ids: Tensor

    def __init__(
        self,
        target: ModelShape,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        token_ids: Tensor,
        own: DraftLayer = AS_TARGET,
    ) -> None:
        """``token_ids`` [W] int64 ascending: the target's tokens it may draft."""
        assert target.num_layers >= LEAST_LAYERS, f"{target.num_layers} layers"
        super().__init__(target, seed, dtype, device, own)
        self._init_layer(3 * target.hidden_size, 2 * target.hidden_size)
        self.input_norm, self.hidden_norm, self.post_norm, self.final_norm = (self._ones() for _ in range(4))
        self.head = self._matrix(len(token_ids), target.hidden_size)
        self.register_buffer("token_ids", token_ids.to(device))

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The three layers of the function ``feature_layers``."""
        return feature_layers(self.shape.num_layers)

    @torch.no_grad()
    def read_like(self, head: Tensor, final_norm: Tensor) -> None:
        """Initialise the output from the target's: from its head [V, H], the drafted rows, and final norm [H]."""
        self.head.copy_(head.index_select(0, self.token_ids))
        self.final_norm.copy_(final_norm)

    def fuse(self, features: Tensor) -> Tensor:
        """The state [T, H]: ``fc`` of the three layers' part of the features [T, 4 H]."""
        return self._now().fc(features[:, : 3 * self.shape.hidden_size])

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Next states [T, H] of embedded tokens [T, H] and states [T, H] at positions [T]."""
        parts = self._now()
        normed = parts.norms["hidden"](states)
        reads = torch.cat([parts.norms["input"](embedded), normed], -1)
        return self._run(normed if self.own.norm_before_residual else states, reads, parts, positions, attend)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [T, W] of states [T, H], over the draft vocabulary."""
        parts = self._now()
        assert parts.head is not None
        return parts.head(parts.norms["final"](states))

    def _parts(self) -> DrafterParts:
        weights = {"input": self.input_norm, "hidden": self.hidden_norm, "final": self.final_norm}
        norms = {name: self._norm(weight) for name, weight in weights.items()}
        return DrafterParts(Linear(self.fc), self._layer(), norms, Linear(self.head))
