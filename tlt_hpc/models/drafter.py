"""What all learned drafters have in common: one layer that is rolled forward from the target's features.

A drafter reads what the target kept of a position (``fuse``), joins it with the next token (``forward``) and continues
from its own result. Its forms are in ``eagle`` and ``eagle3``. ``DraftLayer`` says how its layer differs from the
target's: a published head may have an MLP, a rotary embedding, an epsilon and a residual of its own, but its heads are
the target's, whose paged cache they use. Knows no cache and no optimiser.
Shapes: ``T`` tokens, ``H`` hidden, ``F`` kept features of a position, ``W`` draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor, nn

from tlt_hpc.config import Section, UserError
from tlt_hpc.config.fields import PositiveInt
from tlt_hpc.models.layers import Attend, LayerWeights, run_draft_layer
from tlt_hpc.models.linear import Linear, Norm, copy_and_pack_parts
from tlt_hpc.models.mlp import GatedMlp
from tlt_hpc.models.rotary import SPARE_POSITIONS, rotary_table
from tlt_hpc.models.shape import DRAFTER_SHARDING, ModelShape, check_sharding
from tlt_hpc.models.sharding import WHOLE, Sharding

TOKEN_IDS = "token_ids"
"""The tensor whose presence tells a drafter of the EAGLE-3 form: its vocabulary."""
SETTINGS = "settings"
"""The tensor that holds a ``DraftLayer`` as JSON, in files and checkpoints: only where the layer differs at all."""
_Scale = Annotated[float, Field(gt=0, le=1e12)]


class RopeScaling(Section):
    """Llama 3.1's scaling of the rotary embedding; with the factor alone it is linear."""

    factor: _Scale
    low_freq_factor: _Scale | None = None
    high_freq_factor: _Scale | None = None
    original_max_position_embeddings: PositiveInt | None = None

    @model_validator(mode="after")
    def _check_fields_complete(self) -> RopeScaling:
        rest = self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings
        if None in rest and any(rest):
            raise ValueError("Llama 3.1's scaling has all of these fields, a linear one the factor alone")
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """The fields as config.json names them."""
        kind = "linear" if self.low_freq_factor is None else "llama3"
        return {"rope_type": kind, **self.model_dump(exclude_none=True)}


class DraftLayer(Section):
    """The settings in which a drafter's layer differs from its target's layers; with the defaults it has none."""

    intermediate_size: PositiveInt | None = None
    norm_epsilon: Annotated[float, Field(gt=0, le=1)] | None = None
    rope_theta: _Scale | None = None
    """None: theta and scaling are the target's."""
    rope_scaling: RopeScaling | None = None
    norm_before_residual: bool = False
    """EAGLE-3: the layer adds to the normed state, not to the state."""
    fc_bias: bool = False
    """EAGLE: ``fc`` has a bias."""

    def to_tensors(self) -> dict[str, Tensor]:
        """The settings as a tensor by its name, to be written to a file: [bytes] uint8; empty if all are defaults."""
        if self == AS_TARGET:
            return {}
        return {SETTINGS: torch.tensor(list(self.changed_settings_json.encode()), dtype=torch.uint8)}

    @property
    def changed_settings_json(self) -> str:
        """The settings that differ from the defaults, as JSON."""
        return self.model_dump_json(exclude_defaults=True)


AS_TARGET = DraftLayer()


def drafter_shape(target: ModelShape, layer: DraftLayer) -> ModelShape:
    """The sizes of a drafter's layer, which is a plain one whatever its target's are."""
    theta, scaling = target.rope_theta, target.rope_scaling
    if layer.rope_theta is not None:
        own = layer.rope_scaling
        theta, scaling = layer.rope_theta, own.parameters if own else None
    return replace(
        target,
        intermediate_size=layer.intermediate_size or target.intermediate_size,
        norm_epsilon=layer.norm_epsilon or target.norm_epsilon,
        rope_theta=theta,
        rope_scaling=scaling,
        local_layers=(),
        num_experts=0,
        experts_per_token=0,
        expert_size=0,
    )


def differing_layer_settings(target: ModelShape, own: ModelShape, **more: bool) -> DraftLayer:
    """The settings by which a layer of the sizes ``own`` differs from its target's; ``more``: fields without a size.

    Raises:
        ValidationError: a value that no layer has.
    """
    has_own_rope = (own.rope_theta, _scaling(own)) != (target.rope_theta, _scaling(target))
    return DraftLayer(
        intermediate_size=None if own.intermediate_size == target.intermediate_size else own.intermediate_size,
        norm_epsilon=None if own.norm_epsilon == target.norm_epsilon else own.norm_epsilon,
        rope_theta=own.rope_theta if has_own_rope else None,
        rope_scaling=RopeScaling(**own_scaling) if has_own_rope and (own_scaling := _scaling(own)) else None,
        **more,
    )


def parse_layer_settings(state: Mapping[str, Tensor], asked: str = "the drafter") -> DraftLayer:
    """The settings of a drafter's layer among its tensors, which ``DraftLayer.to_tensors`` wrote as [bytes] uint8.

    Raises:
        UserError: the tensor does not hold it.
    """
    tensor = state.get(SETTINGS)
    if tensor is None:
        return AS_TARGET
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise UserError(f"{asked}: {SETTINGS!r} is no row of bytes; take the file from where it was written")
    try:
        return DraftLayer.model_validate_json(bytes(tensor.tolist()))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{asked}: {SETTINGS!r} holds no drafter's settings ({where}: {first['msg']}); take the file from where it "
            "was written"
        ) from None


def _scaling(shape: ModelShape) -> dict[str, Any] | None:
    """What counts of a scaling: files name its type in two ways, and some repeat theta in it."""
    raw = shape.rope_scaling
    return None if raw is None else {key: raw.get(key) for key in RopeScaling.model_fields}


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

    def set_sharding(self, sharding: Sharding) -> None:
        """Serve this rank's part of the layer from now on, and the others theirs; the parameters stay whole.

        For a drafter that a replica drafts with; one that is trained is whole.

        Raises:
            ConfigError: its inner width, which need not be the target's, cannot be divided over the ranks.
        """
        assert self._packed is None, "split comes before pack"
        check_sharding(self.shape, sharding.size, DRAFTER_SHARDING)
        self._sharding, self._part = sharding, sharding.shape_of_rank(self.shape)
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
    def pack_weights(self) -> None:
        """Serve from a copy laid out for speed, from now on; ``load_state_dict`` renews it in place.

        Addresses do not change, so that graphs may read the copy. For a drafter that is loaded, not trained: a weight
        changed in place does not reach it. Where gradients are recorded the parameters themselves are read.
        """
        now = self._parts()
        if self._packed is None:
            self._packed = now
            for part in now.parts():
                part.detach_()
        copy_and_pack_parts(self._packed.parts(), now.parts())

    @property
    def packed_bytes(self) -> int:
        """Bytes of the copy that is served from, beside the parameters'."""
        if self._packed is None:
            return 0
        layer = self._packed.layer
        copied = (layer.qkv, layer.output, *layer.mlp.parts()) if self._sharding.size > 1 else ()
        return self._packed.packed_bytes + sum(part.weight.nbytes for part in copied)

    def _packed_or_current_parts(self) -> DrafterParts:
        packed = None if torch.is_grad_enabled() else self._packed
        assert packed is not None or self._sharding.size == 1, "a drafter that is split is served, not trained"
        return packed or self._parts()

    def _run(self, x: Tensor, reads: Tensor, parts: DrafterParts, positions: Tensor, attend: Attend) -> Tensor:
        """The layer at positions [T]: attention reads ``reads`` [T, R], and what comes of it is added to x [T, H]."""
        return run_draft_layer(x, reads, parts.layer, self._part, self.rotary.rows_at_positions(positions), attend)

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
            inner, heads, d = shard.inner_range(self.shape), shard.heads(self.shape), self.shape.head_dim
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
        drafter.pack_weights()
