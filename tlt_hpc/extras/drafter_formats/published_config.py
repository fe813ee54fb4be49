"""The config.json of a published EAGLE or EAGLE-3 head: its layer's sizes, and the refusal of other architectures.

Flat in the layout of SGLang, vLLM and EAGLE's reference; nested in that of vLLM's speculators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tlt_hpc.config import UserError
from tlt_hpc.models.eagle import feature_layers
from tlt_hpc.models.shape import ModelShape, shape_from

TAKE_HEAD = "give a head for this model"
_DEFAULTS = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
"""Of transformers' Llama: speculators leaves them out of a layer's settings."""
_OFF = (
    *("norm_before_fc", "fc_norm", "norm_output", "add_para_norm", "layernorms", "use_mtp_layernorm"),
    *("parallel_drafting", "use_sliding_window"),
)
"""Switches that add to the architecture; those below take from it."""
_ON = ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm", "is_causal")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class HeadConfig:
    """The settings in a head's config.json that a drafter here can have."""

    shape: ModelShape
    """Of its layer; the vocabulary is the target's."""
    norm_before_residual: bool
    num_drafted: int | None
    """Tokens that it drafts among, where the file says."""


def refusal_error(what: str) -> UserError:
    """The error that refuses a head: what it has, and the remedy."""
    return UserError(f"{what}; {TAKE_HEAD}")


def parse_head_config(config: Mapping[str, Any], target: ModelShape, target_name: str) -> HeadConfig:
    """A head's settings, checked against its target.

    Raises:
        UserError: another architecture than EAGLE's, other sizes than the target's, or a setting that changes what is
            computed.
    """
    kind, layer = config.get("speculators_model_type", "eagle3"), config.get("transformer_layer_config", config)
    nested = config.get("eagle_config") or {}
    if kind != "eagle3":
        raise refusal_error(f"speculators_model_type = {kind!r:.80} is not supported, only 'eagle3'")
    if not isinstance(layer, dict) or not isinstance(nested, dict):
        raise refusal_error("transformer_layer_config or eagle_config of its config.json is no object")
    settings = {**_DEFAULTS, **layer}
    if (number := settings["num_hidden_layers"]) != 1:
        raise refusal_error(f"num_hidden_layers = {number!r:.80}, and a drafter has one layer")
    _refuse_switches({**settings, **nested, **config})
    try:
        shape = shape_from(settings, "config.json")
    except UserError as error:
        raise refusal_error(error.message_without_remedy) from None
    plain = replace(shape, activation="silu", norm_offset=0.0, output_norms=False, embedding_scale=1.0, query_gain=1.0)
    if plain != shape or any(shape.windows) or shape.num_experts:
        raise refusal_error(f"model_type = {shape.family!r:.80} with layers that a drafter here does not have")
    _check_target(shape, target, f"{head_target_text(config)}, and the target is {target_name}")
    _check_features(config, nested, target)
    return HeadConfig(shape, _norm_before_residual(config), config.get("draft_vocab_size"))


def head_target_text(config: Mapping[str, Any]) -> str:
    """The words of an error on which target a head was trained for, as far as its config.json says."""
    recorded = config.get("speculators_config")
    verifier = recorded.get("verifier") if isinstance(recorded, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return f"it is a head for {name!r:.80}" if name else "the head does not name its target"


def _refuse_switches(settings: Mapping[str, Any]) -> None:
    changed = [key for key in _OFF if settings.get(key)] + [key for key in _ON if not settings.get(key, True)]
    changed += [key for key in ("logit_scale", "partial_rotary_factor") if settings.get(key) not in (None, 1)]
    if settings.get("target_hidden_size") not in (None, settings["hidden_size"]):
        changed.append("target_hidden_size")
    if "sliding_attention" in str(settings.get("layer_types")):
        changed.append("layer_types")
    if changed:
        raise refusal_error(f"{changed[0]} = {settings[changed[0]]!r:.80} is not supported")


def _check_target(shape: ModelShape, target: ModelShape, pair: str) -> None:
    """Its heads are the target's, whose paged cache they use."""
    sizes = {
        "hidden_size": (shape.hidden_size, target.hidden_size),
        "vocab_size": (shape.vocab_size, target.vocab_size),
        "num_attention_heads": (shape.num_heads, target.num_heads),
        "num_key_value_heads": (shape.num_kv_heads, target.num_kv_heads),
        "head_dim": (shape.head_dim, target.head_dim),
    }
    for name, (own, wanted) in sizes.items():
        if own != wanted:
            raise refusal_error(f"{name} = {own}, and the target's is {wanted}: {pair}")


def _check_features(config: Mapping[str, Any], nested: Mapping[str, Any], target: ModelShape) -> None:
    """Refuse other feature layers than ours.

    At the top of the file they are those that the features enter, as vLLM counts; in ``eagle_config`` those that they
    leave, to which SGLang adds one.
    """
    for place, name, shift in ((config, _LAYER_IDS, 0), (nested, f"eagle_config.{_LAYER_IDS}", 1)):
        ids, ours = place.get(_LAYER_IDS), [layer - shift for layer in feature_layers(target.num_layers)]
        if ids is not None and ids != ours:
            verb = "leave" if shift else "enter"
            raise refusal_error(f"{name} = {ids!r:.80}, and the features of a drafter here {verb} the layers {ours}")


def _norm_before_residual(config: Mapping[str, Any]) -> bool:
    """Whether the layer adds to the normed state; where the key is missing vLLM and speculators differ."""
    found = config.get("norm_before_residual", None if "speculators_model_type" in config else False)
    if not isinstance(found, bool):
        raise refusal_error(f"norm_before_residual = {found!r:.80} is neither true nor false")
    return found
