"""The sizes of a decoder, read from a Hugging Face config.json. Knows no weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tlt_hpc.config import ConfigError
from tlt_hpc.models.json_file import read_json

FAMILIES = ("qwen2", "qwen3", "llama")
_MOST = 2**31 - 1
"""Of any size: kernels count in 32 bits."""
_SHOWN_CHARACTERS = 80
_REMEDY = "take the config.json that came with the weights"
_HEAD_DIM = {"qwen3": 128}
"""Where a config.json leaves it out; other families derive it from the width."""


@dataclass(frozen=True)
class ModelShape:
    """What a decoder of the Qwen2, Qwen3 or Llama family is made of."""

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

    @property
    def num_parameters(self) -> int:
        """Weights of the policy, norms and biases included."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        bias = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0
        bias += self.hidden_size if self.output_bias else 0
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.head_norm else 0)
        layer = heads * self.hidden_size + bias + 3 * self.hidden_size * self.intermediate_size + norms
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


def part_of(shape: ModelShape, size: int) -> ModelShape:
    """What each of ``size`` ranks has of the layers, whichever it is, of a model that ``check_sharding`` let pass."""
    return replace(
        shape,
        num_heads=shape.num_heads // size,
        num_kv_heads=max(1, shape.num_kv_heads // size),
        intermediate_size=shape.intermediate_size // size,
    )


def check_sharding(shape: ModelShape, size: int, asked: str) -> None:
    """Refuse a number of ranks that a model cannot be divided over; ``asked`` names the setting.

    Raises:
        ConfigError: with the size that it does not divide, and what would.
    """
    what = "num_attention_heads", "num_key_value_heads", "intermediate_size"
    counts = shape.num_heads, shape.num_kv_heads, shape.intermediate_size
    fits = [n for n in range(1, size + 1) if _misfit(counts, n) is None]
    if (index := _misfit(counts, size)) is not None:
        raise ConfigError(
            f"{asked} = {size} does not divide the model's {what[index]} = {counts[index]}; use {fits[-1]} or another "
            "number that does"
        )


def _misfit(counts: tuple[int, int, int], size: int) -> int | None:
    """Which of heads, key-value heads and inner width ``size`` ranks cannot share alike; None: all can."""
    heads, kv_heads, inner = counts
    shares = heads % size == 0, kv_heads % size == 0 or size % kv_heads == 0, inner % size == 0
    return next((index for index, good in enumerate(shares) if not good), None)


def read_shape(folder: Path) -> ModelShape:
    """The shape that ``folder/config.json`` describes.

    Raises:
        ValueError: no config.json there, or a family or feature the decoder does not have.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"model folder {folder} has no config.json; give a Hugging Face model folder or 'embedded:tiny'"
        )
    return shape_from(read_json(path), str(path))


def shape_from(raw: dict[str, Any], origin: str) -> ModelShape:
    """The shape described by a parsed config.json; ``origin`` names it in errors.

    Raises:
        ValueError: a family or feature the decoder does not have, or a size is missing.
    """
    family = raw.get("model_type", "missing")
    if family not in FAMILIES:
        raise ValueError(f"{origin}: model_type {_shown(family)} is not supported; use one of {', '.join(FAMILIES)}")
    _refuse_features(raw, origin)
    hidden_size, (num_heads, num_kv_heads) = _size(raw, "hidden_size", origin), _heads(raw, origin)
    head_dim = _size(raw, "head_dim", origin) if raw.get("head_dim") else _HEAD_DIM.get(family)
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(
            f"{origin}: hidden_size = {hidden_size} is not divisible by num_attention_heads = {num_heads}; {_REMEDY}"
        )
    theta, scaling = _rope(raw, origin)
    eos = raw.get("eos_token_id")
    attention_bias = _switch(raw, "attention_bias", origin)
    return ModelShape(
        family=family,
        vocab_size=_size(raw, "vocab_size", origin),
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size", origin),
        num_layers=_size(raw, "num_hidden_layers", origin),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim or hidden_size // num_heads,
        norm_epsilon=_number(raw, "rms_norm_eps", 1e-6, origin),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=_size(raw, "max_position_embeddings", origin),
        tied_head=_switch(raw, "tie_word_embeddings", origin),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        head_norm=family == "qwen3",
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )


def _size(raw: dict[str, Any], key: str, origin: str) -> int:
    if key not in raw:
        raise ValueError(f"{origin}: {key} is missing; {_REMEDY}")
    value = raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise ValueError(f"{origin}: {key} = {_shown(value)} is no count from 1 to {_MOST}; {_REMEDY}")
    return value


def _number(raw: dict[str, Any], key: str, default: float, origin: str) -> float:
    value = raw.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < _MOST:
        raise ValueError(f"{origin}: {key} = {_shown(value)} is no number above 0 to {_MOST}; {_REMEDY}")
    return float(value)


def _switch(raw: dict[str, Any], key: str, origin: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{origin}: {key} = {_shown(value)} is neither true nor false; {_REMEDY}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _heads(raw: dict[str, Any], origin: str) -> tuple[int, int]:
    """Heads, and key-value heads, which each serve as many of them."""
    heads = _size(raw, "num_attention_heads", origin)
    kv_heads = _size(raw, "num_key_value_heads", origin) if raw.get("num_key_value_heads") is not None else heads
    if heads % kv_heads:
        raise ValueError(
            f"{origin}: num_attention_heads = {heads} is not divisible by num_key_value_heads = {kv_heads}; {_REMEDY}"
        )
    return heads, kv_heads


def _refuse_features(raw: dict[str, Any], origin: str) -> None:
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list):
        raise ValueError(f"{origin}: layer_types = {_shown(kinds)} is no list; {_REMEDY}")
    slides = raw.get("sliding_window") and "sliding_attention" in kinds
    if raw.get("use_sliding_window") or slides:
        key = "use_sliding_window = true" if raw.get("use_sliding_window") else "layer_types with 'sliding_attention'"
        raise ValueError(f"{origin}: {key} is not supported; use a model without sliding windows")
    if raw.get("mlp_bias"):
        raise ValueError(f"{origin}: mlp_bias = true is not supported; use a model without MLP biases")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{origin}: hidden_act {_shown(raw['hidden_act'])} is not supported; use a model with 'silu'")


def _rope(raw: dict[str, Any], origin: str) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling; newer files keep both under ``rope_parameters``, older ones apart."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"{origin}: rope_scaling = {_shown(parameters)} is no object; {_REMEDY}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"{origin}: rope_type {_shown(kind)} is not supported; use 'default' or 'llama3'")
    theta = _number({**raw, **parameters}, "rope_theta", 10000.0, origin)
    return theta, (parameters if kind == "llama3" else None)
