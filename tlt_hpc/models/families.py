"""The model families that the decoder computes, as data: what sets their layers apart, and their config.json.

A new family that is made of parts that are here already is one more entry of ``FAMILIES`` (docs/models.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Windows = Literal["none", "upper", "all", "pattern"]
"""Which layers attend within a sliding window where ``layer_types`` does not say: no layer, those from
``max_window_layers`` on if ``use_sliding_window`` is set, all if ``sliding_window`` is set, or all but each
``sliding_window_pattern``-th.
"""


@dataclass(frozen=True)
class Family:
    """The properties of a family's layers that its config.json does not give, and the defaults of those it may omit."""

    head_dim: int | None = None
    """None: the width over the heads."""
    heads_divide_width: bool = False
    """transformers refuses another width, whatever ``head_dim`` is."""
    qkv_bias: bool | None = None
    """Biases of queries, keys and values, and none of the output; None: both by ``attention_bias``."""
    head_norm: bool = False
    """Each query and key head is normed before it is rotated."""
    output_norms: bool = False
    """What attention and MLP add to the residual stream is normed first."""
    norm_offset: float = 0.0
    """Norms multiply by this plus their weight."""
    activation: str = "silu"
    query_scalar: float | None = None
    """Scores are divided by the root of ``query_pre_attn_scalar``, by default this one; None: of the head size."""
    scales_embedding: bool = False
    """Embeddings are multiplied by the root of the width."""
    tied_head: bool = False
    windows: Windows = "none"
    default_window: int | None = None
    local_theta: float | None = None
    """Base of the rotary embedding in layers with a window; None: that of the others."""
    theta: float = 10_000.0
    experts: bool = False
    """The MLP of each layer is a mixture of experts."""


FAMILIES = {
    "qwen2": Family(qkv_bias=True, windows="upper"),
    "qwen3": Family(head_dim=128, head_norm=True, windows="upper"),
    "qwen3_moe": Family(head_norm=True, experts=True),
    "llama": Family(heads_divide_width=True),
    "mistral": Family(qkv_bias=False, windows="all", default_window=4096),
    "seed_oss": Family(head_dim=128, qkv_bias=True),
    "gemma3_text": Family(
        heads_divide_width=True,
        head_dim=256,
        head_norm=True,
        output_norms=True,
        norm_offset=1.0,
        activation="gelu_pytorch_tanh",
        query_scalar=256.0,
        scales_embedding=True,
        tied_head=True,
        windows="pattern",
        default_window=4096,
        local_theta=10_000.0,
        theta=1_000_000.0,
    ),
}
NOT_YET = {
    "gemma3": "it reads images; use a text model of the family (model_type 'gemma3_text')",
    "mixtral": "its experts are stored in another way than those of 'qwen3_moe'",
    "gemma2": "it caps logits by a tanh",
    "phi3": "its linear layers are fused in the file",
}
"""Families that users ask for, and what is missing."""
