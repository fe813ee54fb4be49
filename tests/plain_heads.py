"""Published heads read plainly, and what they draft.

Written from the layouts' description alone: nothing here imports the drafter's code.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny import NUM_TOKENS
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def frequencies_of(config: dict[str, Any]) -> Tensor:
    """Those of transformers where the rotary embedding is scaled."""
    size, scaling = config["head_dim"], config.get("rope_scaling")
    if scaling is None:
        return config["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    llama = LlamaConfig(head_dim=size, rope_parameters={**scaling, "rope_theta": config["rope_theta"]})
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](llama, torch.device("cpu"))[0]


def rotated(x: Tensor, config: dict[str, Any]) -> Tensor:
    """Heads [n, heads, d] at positions 0..n-1: number j turns with number j + d/2."""
    size = config["head_dim"]
    angles = torch.outer(torch.arange(len(x)).float(), frequencies_of(config)).unsqueeze(1)
    first, second = x[..., : size // 2], x[..., size // 2 :]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def layer_of(tensors: dict[str, Tensor], prefix: str, config: dict[str, Any], x: Tensor, read: Tensor) -> Tensor:
    """x [n, H] after a Llama layer whose attention reads ``read``, from a head's tensors."""

    def linear(name: str, value: Tensor) -> Tensor:
        return F.linear(value, tensors[f"{prefix}{name}.weight"], tensors.get(f"{prefix}{name}.bias"))

    size, heads, groups = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    q = rotated(linear("self_attn.q_proj", read).view(len(x), heads, size), config)
    k = rotated(linear("self_attn.k_proj", read).view(len(x), groups, size), config)
    v = linear("self_attn.v_proj", read).view(len(x), groups, size)
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + linear("self_attn.o_proj", mixed.transpose(0, 1).reshape(len(x), -1))
    y = F.rms_norm(x, x.shape[1:], tensors[f"{prefix}post_attention_layernorm.weight"], config["rms_norm_eps"])
    return x + linear("mlp.down_proj", F.silu(linear("mlp.gate_proj", y)) * linear("mlp.up_proj", y))


class PlainHead:
    """A head's folder read plainly, beside the target's embedding and head [V, H]; drafts greedily."""

    def __init__(self, folder: Path, embedding: Tensor, head: Tensor) -> None:
        stored = load_file(folder / "model.safetensors")
        self.tensors = {name: x.float() if x.is_floating_point() else x for name, x in stored.items()}
        raw = json.loads((folder / "config.json").read_text())
        self.config = raw.get("transformer_layer_config", raw)
        self.adds_to_normed = raw.get("norm_before_residual", False)
        self.prefix = "layers.0." if "layers.0.mlp.up_proj.weight" in self.tensors else "midlayer."
        self.embedding, self.head = embedding, head

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[1:], self.tensors[f"{name}.weight"], self.config["rms_norm_eps"])

    def eagle_step(self, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The next feature [1, H] and the scores of all tokens, after features ``hidden`` [n - 1, H]."""
        joined = torch.cat([self.embedding[tokens[1:]], hidden], -1)
        x = F.linear(joined, self.tensors["fc.weight"], self.tensors.get("fc.bias"))
        feature = layer_of(self.tensors, self.prefix, self.config, x, x)[-1:]
        return feature, (feature @ self.head.T)[0, :NUM_TOKENS]

    def eagle3_step(self, tokens: list[int], x: Tensor) -> tuple[Tensor, Tensor]:
        """The next state [1, H] and the scores of all tokens, after states ``x`` [n - 1, H]."""
        embedded = self.norm(f"{self.prefix}input_layernorm", self.embedding[tokens[1:]])
        normed = self.norm(f"{self.prefix}hidden_norm", x)
        residual = normed if self.adds_to_normed else x
        out = layer_of(self.tensors, self.prefix, self.config, residual, torch.cat([embedded, normed], -1))[-1:]
        logits = (self.norm("norm", out) @ self.tensors["lm_head.weight"].T)[0]
        if "d2t" not in self.tensors:
            return out, logits[:NUM_TOKENS]
        scores = torch.full((len(self.embedding),), -torch.inf)
        scores[self.tensors["t2d"]] = logits
        return out, scores

    def chain(self, tokens: list[int], states: Tensor, depth: int) -> tuple[list[int], float]:
        """Drafts after ``tokens`` [n] with the target's ``states`` [n - 1, ...], and the least margin of a choice."""
        tokens, drafts, margin = list(tokens), list[int](), math.inf
        is_eagle3 = "lm_head.weight" in self.tensors
        x = F.linear(states, self.tensors["fc.weight"]) if is_eagle3 else states
        for _ in range(depth):
            state, scores = (self.eagle3_step if is_eagle3 else self.eagle_step)(tokens, x)
            best = scores.topk(2)
            drafts.append(int(best.indices[0]))
            margin = min(margin, float(best.values[0] - best.values[1]))
            tokens, x = [*tokens, drafts[-1]], torch.cat([x, state])
        return drafts, margin
