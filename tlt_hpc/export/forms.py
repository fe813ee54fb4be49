"""The two forms of drafter as they are stored: names, sizes, meaning.

A file of ours holds each parameter of a form as ``<name>.weight``, in any floating type, and ``token_ids`` under that
name; whatever else it holds (optimiser moments, counters) is not the drafter. Heads are in halves, as Hugging Face
keeps them, and the rotary embedding is the target's. Linear maps have no bias.
Shapes: ``H`` hidden, ``I`` intermediate, ``V`` target vocabulary, ``W`` draft vocabulary, ``h`` query heads, ``g``
key-value heads, ``d`` head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tlt_hpc.config import UserError
from tlt_hpc.models.drafter_file import TOKEN_IDS, check_ids, drafter_sizes, eagle3_sizes, stored_name
from tlt_hpc.models.shape import ModelShape

_REMEDY = "give the drafter of a run with this model, or --model with its own"


@dataclass(frozen=True)
class EagleDrafter:
    """One layer on fc([embedding; feature]), without norm before it or behind it; head and embedding are the target's.

    The feature is the target's last hidden state after its final norm.
    Source: EAGLE (arXiv 2401.15077), TLT (arXiv 2511.16665) section 4.
    """

    fc: Tensor
    """[H, 2H], the embedding's half first."""
    qkv: Tensor
    """[(h + 2g) d, H]: queries, keys, values."""
    output: Tensor
    """[H, h d]."""
    gate_up: Tensor
    """[2I, H]: gate, then up."""
    down: Tensor
    """[H, I]."""
    post_norm: Tensor
    """[H], before the gated part."""


@dataclass(frozen=True)
class Eagle3Drafter:
    """One layer that reads [input_norm(embedding); hidden_norm(x)] and adds to x, with a head over its own vocabulary.

    x is fc of three of the target's layers at first, then the layer's own output before ``final_norm``; logits are
    head(final_norm(output)). Layers: ``feature_layers``. Source: EAGLE-3 (arXiv 2503.01840).
    """

    fc: Tensor
    """[H, 3H], the lowest layer first."""
    qkv: Tensor
    """[(h + 2g) d, 2H]: queries, keys, values."""
    output: Tensor
    """[H, h d]."""
    gate_up: Tensor
    """[2I, H]: gate, then up."""
    down: Tensor
    """[H, I]."""
    input_norm: Tensor
    """[H], of the embedding."""
    hidden_norm: Tensor
    """[H], of x."""
    post_norm: Tensor
    """[H], before the gated part."""
    final_norm: Tensor
    """[H]."""
    head: Tensor
    """[W, H]."""
    token_ids: Tensor
    """[W] int64: the target's id of each row of the head, ascending."""


AnyDrafter = EagleDrafter | Eagle3Drafter


def drafter_from(stored: Mapping[str, Tensor], shape: ModelShape, origin: str) -> AnyDrafter:
    """The drafter among a file's tensors, of the form that they have; ``origin`` names the file in errors.

    Raises:
        UserError: a tensor is missing, or of another model.
    """
    if TOKEN_IDS not in stored:
        return EagleDrafter(**_take(EagleDrafter, stored, drafter_sizes(shape), origin))
    sizes = eagle3_sizes(shape, stored[TOKEN_IDS].numel())
    drafter = Eagle3Drafter(**_take(Eagle3Drafter, stored, sizes, origin))
    check_ids(drafter.token_ids, shape, origin)
    return drafter


def _take(
    form: type[AnyDrafter], stored: Mapping[str, Tensor], sizes: Mapping[str, tuple[int, ...]], origin: str
) -> dict[str, Tensor]:
    names = {field.name: stored_name(field.name) for field in fields(form)}
    for name, key in names.items():
        found = "missing" if key not in stored else list(stored[key].shape)
        if found != list(sizes[name]):
            raise UserError(
                f"{origin}: drafter tensor {name!r} is {found}, this model needs {list(sizes[name])}; {_REMEDY}"
            )
        if name != TOKEN_IDS and not torch.isfinite(stored[key]).all():
            raise UserError(
                f"{origin}: drafter tensor {name!r} holds values that are no numbers; take an earlier --step"
            )
    return {name: stored[key] for name, key in names.items()}
