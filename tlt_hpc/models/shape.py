"""The sizes of a decoder, read from a Hugging Face config.json. Knows no weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tlt_hpc.config import ConfigError
from tlt_hpc.models.json_file import read_json

TAKE_CONFIG = "take the config.json that came with the weights"
"""The remedy if weights and configuration are of different models."""
FAMILIES = ("qwen2", "qwen3", "llama")
_MOST = 2**31 - 1
"""Largest size: kernels count in 32 bits."""
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


def adapter_parameters(shape: ModelShape, rank: int, targets: Collection[str]) -> int:
    """Weights of adapters of this rank to linear layers such as ``q_proj``, in every layer."""
    h, i = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sides = {"q_proj": h + queries, "k_proj": h + keys, "v_proj": h + keys, "o_proj": queries + h}
    sides |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), h + i)
    return rank * shape.num_layers * sum(sides[target] for target in set(targets))


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
        raise ValueError(f"{origin}: model_type {family!r:.80} is not supported; use one of {', '.join(FAMILIES)}")
    _refuse_features(raw, origin)
    count = partial(_number, raw, origin)
    hidden_size, num_heads = count("hidden_size"), count("num_attention_heads")
    num_kv_heads = count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{origin}: num_attention_heads = {num_heads} is not divisible by num_key_value_heads = {num_kv_heads}; "
            f"{TAKE_CONFIG}"
        )
    default = _HEAD_DIM.get(family)
    if default is None and not raw.get("head_dim") and hidden_size % num_heads:
        raise ValueError(
            f"{origin}: hidden_size = {hidden_size} is not divisible by num_attention_heads = {num_heads}; "
            f"{TAKE_CONFIG}"
        )
    head_dim = count("head_dim", default or hidden_size // num_heads)
    theta, scaling = _rope(raw, origin)
    eos, attention_bias = raw.get("eos_token_id"), bool(raw.get("attention_bias"))
    return ModelShape(
        family=family,
        vocab_size=count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=count("intermediate_size"),
        num_layers=count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_epsilon=_number(raw, origin, "rms_norm_eps", 1e-6, float),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=count("max_position_embeddings"),
        tied_head=bool(raw.get("tie_word_embeddings")),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        head_norm=family == "qwen3",
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )


def _number(raw: dict[str, Any], origin: str, key: str, default: Any = None, kind: type = int) -> Any:
    value = default if raw.get(key) is None else raw[key]
    if value is None:
        raise ValueError(f"{origin}: {key} is missing; {TAKE_CONFIG}")
    numeric = int if kind is int else (int, float)
    if not isinstance(value, numeric) or isinstance(value, bool) or not 0 < value <= _MOST:
        what = "whole number" if kind is int else "number"
        raise ValueError(f"{origin}: {key} = {value!r:.80} is no {what} above 0, up to {_MOST}; {TAKE_CONFIG}")
    return kind(value)


def _refuse_features(raw: dict[str, Any], origin: str) -> None:
    slides = raw.get("sliding_window") and "sliding_attention" in str(raw.get("layer_types"))
    for found, what in (
        (raw.get("use_sliding_window") or slides, "a sliding window"),
        (raw.get("mlp_bias"), "mlp_bias = true"),
        (raw.get("hidden_act", "silu") != "silu", f"hidden_act = {raw.get('hidden_act')!r:.80}"),
    ):
        if found:
            raise ValueError(f"{origin}: {what} is not supported; use a model without it")


def _rope(raw: dict[str, Any], origin: str) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling; newer files keep both under ``rope_parameters``, older ones apart."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"{origin}: rope_scaling = {parameters!r:.80} is no object; {TAKE_CONFIG}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"{origin}: rope_type {kind!r:.80} is not supported; use 'default' or 'llama3'")
    theta = _number({**raw, **parameters}, origin, "rope_theta", 10000.0, float)
    return theta, (parameters if kind == "llama3" else None)
