"""What SGLang, vLLM and its speculators load: from a drafter and its target to named tensors and a config.json.

Mistakes that the layouts avoid: SGLang ignores unknown names and leaves missing tensors random, and vLLM raises
KeyError, so the set of names is exact. SGLang's fc of an EAGLE drafter has a bias, which is random if the file lacks
it; vLLM's has none. ``eagle_aux_hidden_state_layer_ids`` is not written where SGLang may read it: SGLang adds one to
it, vLLM does not, and both default to the layers that we train on. SGLang does not read ``norm_before_residual``.
transformers 5 reads ``rope_parameters``, the engines ``rope_theta`` at top level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt_hpc.config import EMBEDDED_MODEL, UserError
from tlt_hpc.models.drafter import TOKEN_IDS, DraftLayer, drafter_shape, parse_layer_settings
from tlt_hpc.models.eagle import feature_layers
from tlt_hpc.models.shape import ModelShape, check_eagle3_layers, shape_from
from tlt_hpc.models.tokenizer import find_model, read_json

SPECULATIVE_TOKENS = 5
"""Length of the chain of drafts that is proposed."""


@dataclass(frozen=True)
class Target:
    """A model folder, and what its config.json says of it."""

    name: str
    """As the user named it."""
    folder: Path
    shape: ModelShape
    dtype: torch.dtype
    """What floats of its drafter are exported in: float16 if the model has it, bfloat16 otherwise."""
    token_ids: dict[str, Any]
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id``: an id, ids or None."""

    @property
    def path(self) -> str:
        """The path or name by which an engine finds it."""
        return str(self.folder) if self.name == EMBEDDED_MODEL else self.name


def read_target(name: str) -> Target:
    """The target in a folder, or ``embedded:tiny``.

    Raises:
        ValueError: there is no model, or none that a drafter of ours fits.
    """
    folder = find_model(name)
    raw = read_json(folder / "config.json")
    return Target(
        name=name,
        folder=folder,
        shape=shape_from(raw, str(folder / "config.json")),
        dtype=torch.float16 if raw.get("dtype", raw.get("torch_dtype")) == "float16" else torch.bfloat16,
        token_ids={key: raw.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


@dataclass(frozen=True)
class Files:
    """The content of model.safetensors and of config.json."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]


def convert_drafter(kind: str, drafter: Mapping[str, Tensor], target: Target) -> Files:
    """An export's files for ``sglang``, ``vllm`` or ``speculators``; tensors as ``read_drafter`` gives them.

    Of EAGLE-3 the first two formats are the same.

    Raises:
        UserError: the format cannot carry this drafter.
    """
    own = parse_layer_settings(drafter)
    target = replace(target, shape=drafter_shape(target.shape, own))
    if TOKEN_IDS in drafter:
        if own.norm_before_residual and kind != "speculators":
            raise UserError(
                "this drafter adds to the normed state (norm_before_residual), which SGLang does not do; use --format "
                "speculators"
            )
        tensors, config = _eagle3_layout(drafter, target)
        if kind == "speculators":
            tensors, config = _as_speculators(tensors, config, target, own)
    else:
        if kind == "speculators" or (own.fc_bias and kind == "vllm"):
            what = "has a bias in fc" if own.fc_bias else "is of the EAGLE form"
            fitting = "sglang" if own.fc_bias else "vllm or sglang"
            raise UserError(f"this drafter {what}, which the layout {kind} does not have; use --format {fitting}")
        tensors, config = _eagle_layout(drafter, target, is_sglang=kind == "sglang")
    return Files({name: _export_tensor(name, tensor, target.dtype) for name, tensor in tensors.items()}, config)


def _eagle_layout(
    drafter: Mapping[str, Tensor], target: Target, is_sglang: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A Llama layer without ``input_layernorm``, behind fc; biases that ours does not have are zeros."""
    shape = target.shape
    layer = _layer_tensors(drafter, shape)
    tensors = {"fc.weight": drafter["fc"], **{f"layers.0.{name}": tensor for name, tensor in layer.items()}}
    if not is_sglang:  # vLLM puts "Eagle" before the name, and has a Llama layer for targets of every family
        return tensors, _llama_config(target, "LlamaForCausalLM")
    tensors["fc.bias"] = drafter.get("fc_bias", torch.zeros(shape.hidden_size))
    if shape.family != "qwen2":
        return tensors, _llama_config(target, "LlamaForCausalLMEagle")
    for name, count in {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}.items():
        tensors[f"layers.0.self_attn.{name}_proj.bias"] = torch.zeros(count * shape.head_dim)
    config = _llama_config(target, "Qwen2ForCausalLMEagle") | {"model_type": "qwen2", "use_sliding_window": False}
    del config["attention_bias"]  # no key of this family, whose q, k and v always have biases
    return tensors, config


def _eagle3_layout(drafter: Mapping[str, Tensor], target: Target) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The layout of EAGLE-3 that SGLang and vLLM share."""
    shape = target.shape
    check_eagle3_layers(shape, target.name)
    ids = drafter[TOKEN_IDS]
    layer = _layer_tensors(drafter, shape)
    layer["hidden_norm.weight"], layer["input_layernorm.weight"] = drafter["hidden_norm"], drafter["input_norm"]
    tensors = {
        "fc.weight": drafter["fc"],
        **{f"midlayer.{name}": tensor for name, tensor in layer.items()},
        "norm.weight": drafter["final_norm"],
        "lm_head.weight": drafter["head"],
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill_(0, ids, True),
    }
    return tensors, _llama_config(target, "LlamaForCausalLMEagle3") | {"draft_vocab_size": len(ids)}


def _as_speculators(
    tensors: dict[str, Tensor], config: dict[str, Any], target: Target, own: DraftLayer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The same in speculators' layout; without the embedding, which is the target's of the day."""
    layer = {key: value for key, value in config.items() if key not in ("architectures", "draft_vocab_size")}
    method = {"proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS, "verifier_accept_k": 1}
    settings = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": own.norm_before_residual,
        **dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output"), False),
        "eagle_aux_hidden_state_layer_ids": list(feature_layers(target.shape.num_layers)),
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": config["torch_dtype"],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**method, "accept_tolerance": 0.0}],
            "verifier": {"architectures": [], "name_or_path": target.path},
        },
        "transformer_layer_config": layer,
    }
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}, settings


def _layer_tensors(drafter: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """The matrices that both forms have, split as Hugging Face names them."""
    queries, pairs = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    q, k, v = drafter["qkv"].split_with_sizes((queries, pairs, pairs))
    gate, up = drafter["gate_up"].chunk(2)
    return {
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": drafter["output"],
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": drafter["down"],
        "post_attention_layernorm.weight": drafter["post_norm"],
    }


def _llama_config(target: Target, architecture: str) -> dict[str, Any]:
    """The config.json of a Llama of one layer, with the target's sizes and rotary embedding."""
    s = target.shape
    scaling = None
    if s.rope_scaling is not None:
        scaling = {key: value for key, value in s.rope_scaling.items() if key not in ("rope_theta", "type")}
        scaling["rope_type"] = s.rope_scaling["rope_type"]
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": s.num_heads,
        "num_key_value_heads": s.num_kv_heads,
        "head_dim": s.head_dim,
        "vocab_size": s.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": s.norm_epsilon,
        # a context is no longer than the target's positions: some engines drop drafts near the end of the drafter's
        "max_position_embeddings": 2 * s.max_positions,
        "rope_theta": s.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": s.rope_theta},
        "tie_word_embeddings": False,
        "attention_bias": False,
        **target.token_ids,
        "torch_dtype": str(target.dtype).removeprefix("torch."),
    }


def _export_tensor(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As the file holds it: floats in the export's type, ids and masks as they are."""
    cast = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
    if cast.is_floating_point() and not torch.isfinite(cast).all():
        raise UserError(
            f"tensor {name!r} holds values beyond {dtype}; give --model a copy of the target's folder whose "
            'config.json has "dtype": "bfloat16"'
        )
    return cast
