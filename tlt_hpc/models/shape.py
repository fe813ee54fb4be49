"""The sizes of a decoder, read from a Hugging Face config.json. Knows no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("qwen2", "llama")


@dataclass(frozen=True)
class ModelShape:
    """What a decoder of the Qwen2 or Llama family is made of."""

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
    eos_token_ids: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        """Weights of the policy, norms and biases included."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        bias = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0
        layer = heads * self.hidden_size + bias + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


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
    return shape_from(json.loads(path.read_text()), str(path))


def shape_from(raw: dict[str, Any], origin: str) -> ModelShape:
    """The shape described by a parsed config.json; ``origin`` names it in errors."""
    family = raw.get("model_type", "missing")
    if family not in FAMILIES:
        raise ValueError(f"{origin}: model_type {family!r} is not supported; use one of {', '.join(FAMILIES)}")
    if raw.get("use_sliding_window"):
        raise ValueError(f"{origin}: use_sliding_window = true is not supported; use a model without sliding windows")
    if raw.get("mlp_bias"):
        raise ValueError(f"{origin}: mlp_bias = true is not supported; use a model without MLP biases")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{origin}: hidden_act {raw['hidden_act']!r} is not supported; use a model with 'silu'")
    num_heads = raw["num_attention_heads"]
    theta, scaling = _rope(raw, origin)
    eos = raw.get("eos_token_id")
    return ModelShape(
        family=family,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads", num_heads),
        head_dim=raw.get("head_dim") or raw["hidden_size"] // num_heads,
        norm_epsilon=raw["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=raw["max_position_embeddings"],
        tied_head=raw.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2" or raw.get("attention_bias", False),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )


def _rope(raw: dict[str, Any], origin: str) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling; newer files keep both under ``rope_parameters``, older ones apart."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"{origin}: rope_type {kind!r} is not supported; use 'default' or 'llama3'")
    theta = float(parameters.get("rope_theta", raw.get("rope_theta", 10000.0)))
    return theta, (parameters if kind == "llama3" else None)
