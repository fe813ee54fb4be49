"""What all learned drafters have in common: one layer that is rolled forward from the target's features.

A drafter reads what the target kept of a position (``fuse``), joins it with the next token (``forward``) and continues
from its own result. Its forms are in ``eagle`` and ``eagle3``. Knows no cache and no optimiser.
Shapes: ``T`` tokens, ``H`` hidden, ``F`` kept features of a position, ``W`` draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tlt_hpc.models.draft_layer import AS_TARGET, DraftLayer, drafter_shape
from tlt_hpc.models.layers import Attend, LayerWeights, run_draft_layer
from tlt_hpc.models.linear import Linear, Norm, refill
from tlt_hpc.models.mlp import GatedMlp
from tlt_hpc.models.rotary import SPARE_POSITIONS, rotary_table
from tlt_hpc.models.shape import DRAFTER_SHARDING, ModelShape, check_sharding
from tlt_hpc.models.sharding import WHOLE, Sharding

Form = Literal["eagle", "eagle3"]


@dataclass(frozen=True)
class DrafterParts:
    """A drafter's weights in the layout of the computation."""

    fc: Linear
    layer: LayerWeights
    norms: Mapping[str, Norm] = field(default_factory=dict)
    head: Linear | None = None

    def parts(self) -> Iterator[Linear | Norm]:
        """All linear layers and norms, always in the same order."""
        yield self.fc
        yield from self.layer.parts()
        yield from self.norms.values()
        if self.head is not None:
            yield self.head

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed copies, beside the weights' own."""
        return self.fc.packed_bytes + self.layer.packed_bytes + (self.head.packed_bytes if self.head else 0)


class Drafter(nn.Module, ABC):
    """Predicts from the target's features at position t and the token at t + 1 what leads to the token at t + 2."""

    form: ClassVar[Form]
    post_norm: nn.Parameter
    token_ids: Tensor | None
    """[W] int64, the tokens it drafts among, ascending, where it has a head of its own; None: the target's head."""

    def __init__(
        self, target: ModelShape, seed: int, dtype: torch.dtype, device: torch.device, own: DraftLayer = AS_TARGET
    ) -> None:
        """``own``: what its layer does not have of its ``target``."""
        super().__init__()
        self.own = own
        self.shape = shape = drafter_shape(target, own)
        """Of its own layer; what belongs to no layer is the target's."""
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator().manual_seed(seed)
        self.rotary = rotary_table(shape, shape.max_positions + SPARE_POSITIONS, dtype, device)
        self._packed: DrafterParts | None = None
        self._sharding, self._part = WHOLE, shape
        self.register_load_state_dict_post_hook(_pack_again)  # type: ignore[no-untyped-call]

    @property
    def served_ids(self) -> Tensor | None:
        """The tokens [W] int64, ascending, that it drafts among where it serves; None: all."""
        return self.token_ids

    def split(self, sharding: Sharding) -> None:
        """Serve this rank's part of the layer from now on, and the others theirs; the parameters stay whole.

        For a drafter that a replica drafts with; one that is trained is whole.

        Raises:
            ConfigError: its inner width, which need not be the target's, cannot be divided over the ranks.
        """
        assert self._packed is None, "split comes before pack"
        check_sharding(self.shape, sharding.size, DRAFTER_SHARDING)
        self._sharding, self._part = sharding, sharding.part(self.shape)
        num_positions = self.shape.max_positions + SPARE_POSITIONS
        self.rotary = rotary_table(self._part, num_positions, self._dtype, self._device)

    @property
    @abstractmethod
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers whose inputs are kept of every position, beside the last hidden state."""

    @property
    def num_features(self) -> int:
        """Vectors kept of a position: F = ``num_features`` H, the last hidden state last."""
        return len(self.feature_layers) + 1

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """The state [T, H] to begin from, of the target's features [T, F]."""

    @abstractmethod
    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Next states [T, H] from embeddings of the next tokens [T, H] and ``states`` [T, H] at positions [T]."""

    def logits(self, states: Tensor) -> Tensor:
        """Logits [T, W] of states [T, H]; only where the drafter has a head of its own (``token_ids``)."""
        raise AssertionError(f"the target's head reads the states of a drafter of form {self.form}")

    @abstractmethod
    def _parts(self) -> DrafterParts:
        """The parameters as they are now."""

    @torch.no_grad()
    def pack(self) -> None:
        """Serve from a copy laid out for speed, from now on; ``load_state_dict`` renews it in place.

        Addresses do not change, so that graphs may read the copy. For a drafter that is loaded, not trained: a weight
        changed in place does not reach it. Where gradients are recorded the parameters themselves are read.
        """
        now = self._parts()
        if self._packed is None:
            self._packed = now
            for part in now.parts():
                part.detach_()
        refill(self._packed.parts(), now.parts())

    @property
    def packed_bytes(self) -> int:
        """Bytes of the copy that is served from, beside the parameters'."""
        if self._packed is None:
            return 0
        layer = self._packed.layer
        copied = (layer.qkv, layer.output, *layer.mlp.parts()) if self._sharding.size > 1 else ()
        return self._packed.packed_bytes + sum(part.weight.nbytes for part in copied)

    def _now(self) -> DrafterParts:
        packed = None if torch.is_grad_enabled() else self._packed
        assert packed is not None or self._sharding.size == 1, "a drafter that is split is served, not trained"
        return packed or self._parts()

    def _run(self, x: Tensor, reads: Tensor, parts: DrafterParts, positions: Tensor, attend: Attend) -> Tensor:
        """The layer at positions [T]: attention reads ``reads`` [T, R], and what comes of it is added to x [T, H]."""
        return run_draft_layer(x, reads, parts.layer, self._part, self.rotary.at(positions), attend)

    def _matrix(self, rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
        values = torch.randn(rows, columns, generator=self._generator) * (scale * columns**-0.5)
        return nn.Parameter(values.to(self._device, self._dtype))

    def _ones(self) -> nn.Parameter:
        return nn.Parameter(torch.ones(self.shape.hidden_size, dtype=self._dtype, device=self._device))

    def _norm(self, weight: Tensor) -> Norm:
        return Norm(weight, self.shape.norm_epsilon)

    def _init_layer(self, num_fused: int, num_read: int) -> None:
        """Random weights: ``fc`` of ``num_fused`` numbers, and the layer, whose attention reads ``num_read``."""
        s, h = self.shape, self.shape.hidden_size
        self.fc = self._matrix(h, num_fused)
        self.qkv = self._matrix((s.num_heads + 2 * s.num_kv_heads) * s.head_dim, num_read)
        self.output = self._matrix(h, s.num_heads * s.head_dim, 0.5)
        self.gate_up = self._matrix(2 * s.intermediate_size, h)
        self.down = self._matrix(h, s.intermediate_size, 0.5)

    def _layer(self) -> LayerWeights:
        """This rank's part of the layer, with the parameters as they are now."""
        weights: tuple[Tensor, ...] = (self.qkv, self.output, self.gate_up, self.down)
        qkv, output, gate_up, down = weights
        shard = self._sharding
        if shard.size > 1:
            inner, heads, d = shard.inner(self.shape), shard.heads(self.shape), self.shape.head_dim
            gate_up = torch.cat([rows[inner] for rows in gate_up.chunk(2)])
            output = output[:, heads.start * d : heads.stop * d].contiguous()
            down = down[:, inner].contiguous()
            qkv = qkv[shard.qkv_rows(self.shape, self._device)]
        return LayerWeights(
            input_norm=None,
            qkv=Linear(qkv),
            head_norm=None,
            output=shard.row_linear(output),
            post_norm=self._norm(self.post_norm),
            mlp=GatedMlp(Linear(gate_up), shard.row_linear(down)),
        )


def _pack_again(drafter: nn.Module, _: object) -> None:
    assert isinstance(drafter, Drafter)
    if drafter._packed is not None:
        drafter.pack()
