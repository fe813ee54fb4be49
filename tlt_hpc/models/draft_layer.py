"""How a drafter's layer differs from its target's layers, and how that is stored with its weights.

A published head may have an MLP, a rotary embedding, an epsilon and a residual of its own. Its heads are the target's,
whose paged cache they use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from tlt_hpc.config import Section, UserError
from tlt_hpc.config.fields import PositiveInt
from tlt_hpc.models.shape import ModelShape

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
    def _is_whole(self) -> RopeScaling:
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

    def stored(self) -> dict[str, Tensor]:
        """The settings as a tensor by its name, to be written to a file: [bytes] uint8; empty if all are defaults."""
        if self == AS_TARGET:
            return {}
        return {SETTINGS: torch.tensor(list(self.changes.encode()), dtype=torch.uint8)}

    @property
    def changes(self) -> str:
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


def layer_between(target: ModelShape, own: ModelShape, **more: bool) -> DraftLayer:
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


def layer_of(state: Mapping[str, Tensor], asked: str = "the drafter") -> DraftLayer:
    """The settings of a drafter's layer among its tensors, which ``DraftLayer.stored`` wrote as [bytes] uint8.

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
