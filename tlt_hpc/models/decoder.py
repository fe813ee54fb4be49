"""The rollout's decoder for the Qwen2 and Llama families: flat tokens in, hidden states out. Knows no cache, no batch.

Shapes: ``T`` tokens flat over sequences, ``H`` hidden, ``V`` vocabulary (padding rows included).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.models.layers import (
    SPARE_POSITIONS,
    Attend,
    LayerWeights,
    RotaryTable,
    attend_documents,
    rotary_table,
    transformer_layer,
)
from tlt_hpc.models.shape import ModelShape

_PARTS = {
    "input_layernorm.weight": "input_norm",
    "post_attention_layernorm.weight": "post_norm",
    "self_attn.o_proj.weight": "output",
    "mlp.down_proj.weight": "down",
}


class Decoder:
    """Weights of the policy in the layout that decodes fastest, refreshed in place after every policy step."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.version = -1
        """Counts weight loads; -1 before the first."""
        self.embedding = self._empty(shape.vocab_size, shape.hidden_size)
        self.head = self.embedding if shape.tied_head else self._empty(shape.vocab_size, shape.hidden_size)
        self.final_norm = self._empty(shape.hidden_size)
        self.layers = [self._empty_layer() for _ in range(shape.num_layers)]
        self.rotary = rotary_table(shape, shape.max_positions + SPARE_POSITIONS, dtype, device)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights under their Hugging Face names into place; addresses do not change.

        Raises:
            ValueError: a name is missing or unknown, or a shape differs.
        """
        views = self._views()
        missing = set(views)
        for name, tensor in weights:
            if name == "lm_head.weight" and self.shape.tied_head:
                continue
            if name not in views:
                raise ValueError(
                    f"weight {name!r} is not part of a {self.shape.family} decoder of this shape; check config.json"
                )
            if views[name].shape != tensor.shape:
                raise ValueError(
                    f"weight {name!r} has shape {list(tensor.shape)}, config.json asks for {list(views[name].shape)}"
                )
            views[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise ValueError(
                f"weights lack {sorted(missing)[0]!r} and {len(missing) - 1} more; the model folder is incomplete"
            )
        self.version = version

    @torch.inference_mode()
    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm: tokens [T], positions [T] -> [T, H]."""
        x = F.embedding(tokens, self.embedding)
        table = self.rotary.at(positions)
        for i, layer in enumerate(self.layers):
            x = transformer_layer(x, layer, self.shape, table, i, attend)
        return F.rms_norm(x, (x.shape[-1],), self.final_norm, self.shape.norm_epsilon)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in at least fp32: hidden [T, H] -> [T, V]."""
        return F.linear(hidden, self.head).float()

    @torch.inference_mode()
    def reference_logits(self, tokens: Tensor, last: int) -> Tensor:
        """Float64 logits of the ``last`` positions of one sequence, computed alone: tokens [T] -> [last, V].

        A pure function of weights and tokens: no cache, no batch, no strategy. Layers are cast one at a time, so it
        needs little memory beside the weights.
        """
        positions = torch.arange(len(tokens), device=self.device)
        rotary = rotary_table(self.shape, len(tokens), torch.float64, self.device)
        table: RotaryTable = rotary.at(positions)
        attend = attend_documents(self.shape, None)
        x = F.embedding(tokens, self.embedding).double()
        for i, layer in enumerate(self.layers):
            x = transformer_layer(x, layer.to(torch.float64), self.shape, table, i, attend)
        x = F.rms_norm(x[-last:], (x.shape[-1],), self.final_norm.double(), self.shape.norm_epsilon)
        return F.linear(x, self.head.double())

    @property
    def weight_bytes(self) -> int:
        return 0

    @property
    def packed_bytes(self) -> int:
        return 0

    def _empty(self, *sizes: int) -> Tensor:
        return torch.zeros(*sizes, dtype=self.dtype, device=self.device)

    def _empty_layer(self) -> LayerWeights:
        s = self.shape
        width = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
        return LayerWeights(
            input_norm=self._empty(s.hidden_size),
            qkv=self._empty(width, s.hidden_size),
            qkv_bias=self._empty(width) if s.qkv_bias else None,
            output=self._empty(s.hidden_size, s.num_heads * s.head_dim),
            post_norm=self._empty(s.hidden_size),
            gate_up=self._empty(2 * s.intermediate_size, s.hidden_size),
            down=self._empty(s.hidden_size, s.intermediate_size),
        )

    def _views(self) -> dict[str, Tensor]:
        """Hugging Face name -> the part of a fused tensor it is copied to."""
        s = self.shape
        views = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        if not s.tied_head:
            views["lm_head.weight"] = self.head
        q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        for i, layer in enumerate(self.layers):
            prefix = f"model.layers.{i}."
            for name, field in _PARTS.items():
                views[prefix + name] = vars(layer)[field]
            for part, rows in zip("qkv", torch.split(layer.qkv, [q, kv, kv]), strict=True):
                views[f"{prefix}self_attn.{part}_proj.weight"] = rows
            if layer.qkv_bias is not None:
                for part, rows in zip("qkv", torch.split(layer.qkv_bias, [q, kv, kv]), strict=True):
                    views[f"{prefix}self_attn.{part}_proj.bias"] = rows
            views[prefix + "mlp.gate_proj.weight"], views[prefix + "mlp.up_proj.weight"] = layer.gate_up.chunk(2)
        return views
