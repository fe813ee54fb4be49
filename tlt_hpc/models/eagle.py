"""The two forms of the drafter, each one layer over [embedding of the next token; the target's hidden states].

Shapes: ``T`` tokens, ``H`` hidden, ``V`` target vocabulary, ``W`` draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tlt_hpc.models.drafter import AS_TARGET, Drafter, DrafterParts, DraftLayer
from tlt_hpc.models.layers import Attend
from tlt_hpc.models.linear import Linear
from tlt_hpc.models.shape import LEAST_LAYERS, ModelShape


class Eagle(Drafter):
    """EAGLE (arXiv 2401.15077): its state is a prediction of the target's last hidden state, after the final norm.

    Embedding and head are the current policy's: it holds none of its own.
    """

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
        """The tokens [W] int64 of ``set_draft_vocabulary``; None: all."""
        return self._served_ids

    def set_draft_vocabulary(self, token_ids: Tensor) -> None:
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
        parts = self._packed_or_current_parts()
        x = parts.fc(torch.cat([embedded, states], -1))
        return self._run(x, x, parts, positions, attend)

    def _parts(self) -> DrafterParts:
        return DrafterParts(Linear(self.fc, self.fc_bias), self._layer())


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """The target's layers whose inputs, the residual stream entering them, are an EAGLE-3 drafter's features."""
    return 2, num_layers // 2, num_layers - 3


class Eagle3(Drafter):
    """EAGLE-3 (arXiv 2503.01840), with a head over a vocabulary of its own.

    Its state is free: at first ``fc`` of three layers' features, then the layer's own output before ``final_norm``.

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
    def init_output_from_target(self, head: Tensor, final_norm: Tensor) -> None:
        """Initialise the output from the target's: from its head [V, H], the drafted rows, and final norm [H]."""
        self.head.copy_(head.index_select(0, self.token_ids))
        self.final_norm.copy_(final_norm)

    def fuse(self, features: Tensor) -> Tensor:
        """The state [T, H]: ``fc`` of the three layers' part of the features [T, 4 H]."""
        return self._packed_or_current_parts().fc(features[:, : 3 * self.shape.hidden_size])

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Next states [T, H] of embedded tokens [T, H] and states [T, H] at positions [T]."""
        parts = self._packed_or_current_parts()
        normed = parts.norms["hidden"](states)
        reads = torch.cat([parts.norms["input"](embedded), normed], -1)
        return self._run(normed if self.own.norm_before_residual else states, reads, parts, positions, attend)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [T, W] of states [T, H], over the draft vocabulary."""
        parts = self._packed_or_current_parts()
        assert parts.head is not None
        return parts.head(parts.norms["final"](states))

    def _parts(self) -> DrafterParts:
        weights = {"input": self.input_norm, "hidden": self.hidden_norm, "final": self.final_norm}
        norms = {name: self._norm(weight) for name, weight in weights.items()}
        return DrafterParts(Linear(self.fc), self._layer(), norms, Linear(self.head))
