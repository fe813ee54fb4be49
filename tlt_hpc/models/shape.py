"""The sizes of a decoder, read from a Hugging Face config.json. Knows no weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tlt_hpc.config import ConfigError, UserError
from tlt_hpc.models.families import FAMILIES, NOT_YET, Family
from tlt_hpc.models.tokenizer import read_json

TAKE_CONFIG = "take the config.json that came with the weights"
"""The remedy if weights and configuration are of different models."""
_MOST = 2**31 - 1
"""Largest size: kernels count in 32 bits."""
_FLAGS = (
    *("attention_bias", "attention_out_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"),
    "norm_topk_prob",
)
_FULL, _LOCAL = "full_attention", "sliding_attention"
_KINDS = {_FULL, _LOCAL}
"""Kinds of layers, as transformers names them."""
_LLAMA3 = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"


@dataclass(frozen=True)
class ModelShape:
    """The sizes and properties of a decoder of one of the ``FAMILIES``."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_positions: int
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    head_norm: bool
    """Whether each query and key head is normed before it is rotated."""
    eos_token_ids: tuple[int, ...]
    output_norms: bool = False
    """Whether what attention and MLP add to the residual stream is normed first."""
    norm_offset: float = 0.0
    """Norms multiply by this plus their weight."""
    activation: str = "silu"
    """Of the MLP's gate, as transformers names it."""
    embedding_scale: float = 1.0
    query_gain: float = 1.0
    """Scores are multiplied by this beside the root of the head size; of families with ``head_norm``."""
    window: int = 0
    """Positions that a query sees in ``local_layers``, its own included."""
    local_layers: tuple[bool, ...] = ()
    """Which layers attend within the window; empty: none."""
    local_theta: float | None = None
    """Base of the rotary embedding in these, unscaled; None: as in all layers."""
    num_experts: int = 0
    """Of the mixture that is the MLP of each layer; 0: it is one MLP."""
    experts_per_token: int = 0
    expert_size: int = 0
    """Inner width of an expert. ``intermediate_size`` is then that of a drafter's MLP alone."""
    norm_expert_weights: bool = False
    """Whether the weights of a token's experts add up to 1."""

    @property
    def windows(self) -> tuple[int, ...]:
        """The positions that a query sees in each layer; 0: all before it."""
        return tuple(self.window if local else 0 for local in self.local_layers or (False,) * self.num_layers)

    @property
    def mlp_parameters(self) -> int:
        """Weights of a layer's MLP, or of its experts and their router."""
        if not self.num_experts:
            return 3 * self.hidden_size * self.intermediate_size
        return self.num_experts * self.hidden_size * (3 * self.expert_size + 1)

    @property
    def mlp_width(self) -> int:
        """Inner width that a token passes through in a layer's MLP or experts."""
        return self.experts_per_token * self.expert_size if self.num_experts else self.intermediate_size

    @property
    def num_parameters(self) -> int:
        """Weights of the policy, norms and biases included."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        bias = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0
        bias += self.hidden_size if self.output_bias else 0
        norms = (4 if self.output_norms else 2) * self.hidden_size + (2 * self.head_dim if self.head_norm else 0)
        layer = heads * self.hidden_size + bias + self.mlp_parameters + norms
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


def shape_per_rank(shape: ModelShape, size: int) -> ModelShape:
    """The part of a model's layers that each of ``size`` ranks has, equal on all; after ``check_sharding``."""
    return replace(
        shape,
        num_heads=shape.num_heads // size,
        num_kv_heads=max(1, shape.num_kv_heads // size),
        intermediate_size=shape.intermediate_size // size,
        expert_size=shape.expert_size // size,
    )


def num_adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Weights of adapters of this rank to all linear layers; in a mixture of experts to those of attention."""
    h, queries, keys = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention, mlp = 2 * (h + queries) + 2 * (h + keys), 3 * (h + shape.intermediate_size)
    return rank * shape.num_layers * (attention if shape.num_experts else attention + mlp)


LEAST_LAYERS = 7
"""Of an EAGLE-3 drafter's target, whose three feature layers are distinct."""


def check_eagle3_layers(shape: ModelShape, asked: str) -> None:
    """Refuse an EAGLE-3 drafter for a target whose feature layers are not distinct.

    Raises:
        UserError: it has too few layers.
    """
    if shape.num_layers < LEAST_LAYERS:
        raise UserError(
            f"{asked}: an EAGLE-3 drafter reads three layers of its target, and this one has {shape.num_layers}, of "
            f"which no three can be told apart; use a target of {LEAST_LAYERS} layers or more, or a drafter of the "
            "EAGLE form"
        )


DRAFTER_SHARDING = "the drafter's layer: rollout.tensor_parallel"
"""What ``check_sharding`` names for a drafter."""


def check_sharding(shape: ModelShape, size: int, asked: str) -> None:
    """Refuse a number of ranks that a model cannot be divided over; ``asked`` names the setting.

    Raises:
        ConfigError: with the size that it does not divide, and what would.
    """
    what = "num_attention_heads", "num_key_value_heads", "intermediate_size"
    counts = shape.num_heads, shape.num_kv_heads, shape.intermediate_size
    if shape.num_experts:
        what, counts = (*what[:2], "moe_intermediate_size"), (*counts[:2], shape.expert_size)
    fits = [n for n in range(1, size + 1) if _first_indivisible_size(counts, n) is None]
    if (index := _first_indivisible_size(counts, size)) is not None:
        raise ConfigError(
            f"{asked} = {size} does not divide the model's {what[index]} = {counts[index]}; use {fits[-1]} or another "
            "number that does"
        )


def _first_indivisible_size(counts: tuple[int, int, int], size: int) -> int | None:
    """Which of heads, key-value heads and inner width ``size`` ranks cannot share alike; None: all can."""
    heads, kv_heads, inner = counts
    shares = heads % size == 0, kv_heads % size == 0 or size % kv_heads == 0, inner % size == 0
    return next((index for index, good in enumerate(shares) if not good), None)


def read_shape(folder: Path) -> ModelShape:
    """The shape that ``folder/config.json`` describes.

    Raises:
        UserError: no config.json there, or a family or feature the decoder does not have.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"model folder {folder} has no config.json", "give a Hugging Face model folder or 'embedded:tiny'"
        )
    return shape_from(read_json(path), str(path))


def shape_from(raw: dict[str, Any], origin: str) -> ModelShape:
    """The shape described by a parsed config.json; ``origin`` names it in errors.

    Raises:
        UserError: a family or feature the decoder does not have, or a size is missing.
    """
    name = raw.get("model_type", "missing")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        reason = f" ({NOT_YET[name]})" if name in NOT_YET else ""
        raise UserError(
            f"{origin}: model_type {name!r:.80} is not supported{reason}", f"use one of {', '.join(FAMILIES)}"
        )
    _refuse_features(raw, family, origin)
    count = partial(_parse_number, raw, origin)
    hidden_size, num_heads, num_layers = count("hidden_size"), count("num_attention_heads"), count("num_hidden_layers")
    num_kv_heads = count("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise UserError(
            f"{origin}: num_attention_heads = {num_heads} is not divisible by num_key_value_heads = {num_kv_heads}",
            TAKE_CONFIG,
        )
    is_given = family.head_dim is not None or raw.get("head_dim")
    if hidden_size % num_heads and (family.heads_divide_width or not is_given):
        raise UserError(
            f"{origin}: hidden_size = {hidden_size} is not divisible by num_attention_heads = {num_heads}", TAKE_CONFIG
        )
    head_dim = count("head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise UserError(f"{origin}: head_dim = {head_dim} is odd, and a rotary embedding turns pairs", TAKE_CONFIG)
    eos, attention_bias = raw.get("eos_token_id"), bool(raw.get("attention_bias"))
    tied, gain = raw.get("tie_word_embeddings"), 1.0
    if family.query_scalar is not None:
        gain = (head_dim / _parse_number(raw, origin, "query_pre_attn_scalar", family.query_scalar, float)) ** 0.5
    return ModelShape(
        family=name,
        vocab_size=count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_epsilon=_parse_number(raw, origin, "rms_norm_eps", 1e-6, float),
        max_positions=_parse_max_positions(raw, origin),
        tied_head=family.tied_head if tied is None else bool(tied),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias and family.qkv_bias is None,
        head_norm=family.head_norm,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        output_norms=family.output_norms,
        norm_offset=family.norm_offset,
        activation=family.activation,
        embedding_scale=hidden_size**0.5 if family.scales_embedding else 1.0,
        query_gain=gain,
        **_parse_rotary_settings(raw, family, origin),
        **_parse_windows(raw, family, num_layers, origin),
        **(_parse_experts(raw, origin) if family.experts else {}),
    )


def _parse_max_positions(raw: dict[str, Any], origin: str) -> int:
    if raw.get("max_position_embeddings") is None:  # files of older transformers may leave it out
        raise UserError(
            f"{origin}: max_position_embeddings is missing",
            "add it: the longest text in tokens that the model was trained for, which its model card names",
        )
    return int(_parse_number(raw, origin, "max_position_embeddings"))


def _parse_windows(raw: dict[str, Any], family: Family, num_layers: int, origin: str) -> dict[str, Any]:
    """The sliding window, and which layers have it, by the same rules as transformers."""
    window = raw.get("sliding_window", family.default_window)
    kinds = raw.get("layer_types") if family.windows in ("upper", "pattern") else None
    is_off = family.windows == "none" or (family.windows == "upper" and not raw.get("use_sliding_window"))
    if window is None or is_off:
        kinds = [_FULL] * num_layers
    elif kinds is None:
        first = _parse_number(raw, origin, "max_window_layers", 28, minimum=0) if family.windows == "upper" else 0
        every = _parse_number(raw, origin, "sliding_window_pattern", 6) if family.windows == "pattern" else 0
        full = [layer < first or (every > 0 and (layer + 1) % every == 0) for layer in range(num_layers)]
        kinds = [_FULL if each else _LOCAL for each in full]
    if raw.get("layer_types") not in (None, kinds):  # transformers does not read it here
        raise UserError(f"{origin}: layer_types with other windows than the family's is not supported", TAKE_CONFIG)
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - _KINDS:
        raise UserError(
            f"{origin}: layer_types = {kinds!r:.80} does not give each of {num_layers} layers {_FULL!r} or {_LOCAL!r}",
            TAKE_CONFIG,
        )
    local = tuple(kind == _LOCAL for kind in kinds)
    if not any(local):
        return {}
    return {"window": _parse_number(raw, origin, "sliding_window", family.default_window), "local_layers": local}


def _parse_experts(raw: dict[str, Any], origin: str) -> dict[str, Any]:
    """The sizes of a mixture of experts; all layers have one."""
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise UserError(
            f"{origin}: layers without experts among those with them (mlp_only_layers, decoder_sparse_step) are not "
            "supported",
            "use a model whose layers all have experts",
        )
    named = "num_local_experts" if raw.get("num_local_experts") else "num_experts"  # transformers 5 writes the former
    num_experts, chosen = _parse_number(raw, origin, named), _parse_number(raw, origin, "num_experts_per_tok")
    if chosen > num_experts:
        raise UserError(f"{origin}: num_experts_per_tok = {chosen} of {named} = {num_experts}", TAKE_CONFIG)
    return {
        "num_experts": num_experts,
        "experts_per_token": chosen,
        "expert_size": _parse_number(raw, origin, "moe_intermediate_size"),
        "norm_expert_weights": bool(raw.get("norm_topk_prob")),
    }


def _parse_number(
    raw: dict[str, Any], origin: str, key: str, default: Any = None, kind: type = int, minimum: int = 1
) -> Any:
    value = default if raw.get(key) is None else raw[key]
    if value is None:
        raise UserError(f"{origin}: {key} is missing", TAKE_CONFIG)
    numeric = int if kind is int else (int, float)
    is_number = isinstance(value, numeric) and not isinstance(value, bool)
    if not is_number or not (value >= minimum if kind is int else value > 0) or value > _MOST:
        what = "whole number" if kind is int else "number"
        raise UserError(f"{origin}: {key} = {value!r:.80} is no {what} above {minimum - 1}, up to {_MOST}", TAKE_CONFIG)
    return kind(value)


def _refuse_features(raw: dict[str, Any], family: Family, origin: str) -> None:
    given = (raw.get(key) for key in ("hidden_activation", "hidden_act"))
    act = next((each for each in given if each not in (None, family.activation)), family.activation)
    for key in _FLAGS:
        if not isinstance(raw.get(key, False), bool):
            raise UserError(f"{origin}: {key} = {raw[key]!r:.80} is neither true nor false", TAKE_CONFIG)
    for found, what in (
        (raw.get("use_sliding_window") and family.windows == "none", "a sliding window in this family"),
        (raw.get("quantization_config"), "quantization (quantization_config)"),
        (raw.get("mlp_bias"), "mlp_bias = true"),
        (raw.get("partial_rotary_factor") not in (None, 1), "partial_rotary_factor"),
        (raw.get("attention_out_bias"), "attention_out_bias = true"),
        (family.qkv_bias and raw.get("attention_bias") is False, "attention_bias = false in this family"),
        (family.qkv_bias is False and raw.get("attention_bias"), "attention_bias = true in this family"),
        (raw.get("use_bidirectional_attention"), "use_bidirectional_attention = true"),
        (raw.get("attn_logit_softcapping"), "attn_logit_softcapping"),
        (raw.get("final_logit_softcapping"), "final_logit_softcapping"),
        (_has_null_head_dim(raw), "head_dim = null in this family"),
        (raw.get("is_causal", True) is not True, "attention to later positions (is_causal)"),
        (act != family.activation, f"hidden_act = {act!r:.80}"),
    ):
        if found:
            raise UserError(f"{origin}: {what} is not supported", "use a model without it")


def _has_null_head_dim(raw: dict[str, Any]) -> bool:
    """Whether it is null where transformers only takes a number or no key."""
    return raw["model_type"] in ("qwen2", "qwen3_moe") and raw.get("head_dim", 0) is None


def _parse_rotary_settings(raw: dict[str, Any], family: Family, origin: str) -> dict[str, Any]:
    """Base and scaling, by the rules of transformers: in ``rope_parameters``, or apart in older files."""
    older, newer = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    for given in (older, newer):
        if not isinstance(given, dict):
            raise UserError(f"{origin}: rope_scaling = {given!r:.80} is no object", TAKE_CONFIG)
    is_split = family.local_theta is not None
    if _KINDS & older.keys() or (newer and not (newer.keys() <= _KINDS if is_split else not _KINDS & newer.keys())):
        wanted = f'an object under "{_FULL}" and one under "{_LOCAL}"' if is_split else "one for all layers"
        raise UserError(
            f"{origin}: rope_parameters = {newer or older!r:.80} are not as this family's", f"give {wanted}"
        )
    if is_split and older and "rope_type" not in older:  # transformers would not scale
        raise UserError(f"{origin}: rope_scaling = {older!r:.80} has no rope_type", TAKE_CONFIG)
    are_both = is_split and raw.get("rope_scaling") is not None and raw.get("rope_parameters") is not None
    newer, local = (newer.get(kind) or {} for kind in (_FULL, _LOCAL)) if is_split else (newer, {})
    given = [_parse_rotary_parameters(each, raw, family, origin) for each in (older, newer) if each]
    if are_both or (len(given) == 2 and given[0] != given[1]):
        raise UserError(
            f"{origin}: rope_scaling beside other rope_parameters is not supported", "use a model without it"
        )
    full = given[0] if given else _parse_rotary_parameters({}, raw, family, origin)
    found = {"rope_theta": full.pop("rope_theta"), "rope_scaling": None if full["rope_type"] == "default" else full}
    if is_split:
        theirs = {"rope_theta": raw.get("rope_local_base_freq", family.local_theta)}
        if (turning := _parse_rotary_parameters(local, theirs, family, origin))["rope_type"] != "default":
            raise UserError(f"{origin}: a rope_type for layers with a window is not supported", "use 'default'")
        found["local_theta"] = turning["rope_theta"]
    return found


def _parse_rotary_parameters(given: Any, raw: dict[str, Any], family: Family, origin: str) -> dict[str, Any]:
    """The parameters of one rotary embedding under their names in ``rope_parameters``, of a type that is supported."""
    if not isinstance(given, dict):
        raise UserError(f"{origin}: rope_parameters = {given!r:.80} is no object", TAKE_CONFIG)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "llama3", "linear"):
        raise UserError(f"{origin}: rope_type {kind!r:.80} is not supported", "use 'default', 'llama3' or 'linear'")
    if given.get("partial_rotary_factor") not in (None, 1):
        raise UserError(f"{origin}: partial_rotary_factor is not supported", "use a model without it")
    keys = {"linear": ("factor",), "llama3": _LLAMA3}.get(kind, ())
    numbers = {key: _parse_number(given, origin, key, kind=float) for key in keys}
    theta = {"rope_theta": given.get("rope_theta", raw.get("rope_theta", family.theta))}
    if kind == "llama3":
        low, high, original = (numbers[key] for key in _LLAMA3[1:])
        if low >= high:
            raise UserError(f"{origin}: high_freq_factor = {high} is not above low_freq_factor = {low}", TAKE_CONFIG)
        if raw.get(_LLAMA3[3], original) != original:  # transformers takes it in place of the other
            raise UserError(f"{origin}: {_LLAMA3[3]} is given twice, as {raw[_LLAMA3[3]]} and {original}", TAKE_CONFIG)
    return {
        "rope_type": kind,
        **{key: given[key] for key in keys},
        "rope_theta": _parse_number(theta, origin, "rope_theta", kind=float),
    }
