"""What each engine loads: from a drafter and its target to named tensors and a config.json. Reads and writes no file.

Mistakes that the layouts avoid: SGLang ignores unknown names and leaves missing tensors random, and vLLM raises
KeyError, so the set of names is exact. The fc of EAGLE and SGLang has a bias, which is random if the file lacks it;
vLLM's has none. ``eagle_aux_hidden_state_layer_ids`` is never written: SGLang adds one to it, vLLM does not, and both
default to the layers that we train on. transformers 5 reads ``rope_parameters``, the engines ``rope_theta`` at top
level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tlt_hpc.config import UserError
from tlt_hpc.export.forms import AnyDrafter, Eagle3Drafter, EagleDrafter
from tlt_hpc.export.target import Target
from tlt_hpc.models.drafter_file import check_layers
from tlt_hpc.models.shape import ModelShape

SPECULATIVE_TOKENS = 5
"""Length of the chain that the speculators layout proposes as its default."""


@dataclass(frozen=True)
class Files:
    """The content of model.safetensors and of config.json."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]


@dataclass(frozen=True)
class DrafterFormat:
    """What an engine loads as a drafter; the layout of EAGLE-3 is the same for all but speculators."""

    title: str
    eagle_class: str
    """Architecture of an EAGLE drafter; empty: the engine has a layout for EAGLE-3 alone."""
    fusion_bias: bool = False
    """Whether EAGLE's fc has a bias, which ours does not: zeros."""
    qwen2_class: str = ""
    """Architecture of an EAGLE drafter for Qwen2 targets, with biases of q, k and v: zeros; empty: the usual one."""
    is_reference: bool = False
    """EAGLE's own code, which supports neither Llama 3.1's rotary scaling nor heads of another total width."""


FORMATS = {
    "sglang": DrafterFormat("SGLang", "LlamaForCausalLMEagle", True, "Qwen2ForCausalLMEagle"),
    # vLLM puts "Eagle" before the architecture, and has a Llama layer for targets of every family
    "vllm": DrafterFormat("vLLM", "LlamaForCausalLM"),
    "speculators": DrafterFormat("speculators", ""),
    "eagle": DrafterFormat("EAGLE's reference code", "LlamaForCausalLM", True, is_reference=True),
}


def lay_out(
    kind: str, drafter: AnyDrafter, target: Target, read_embedding: Callable[[], tuple[Tensor, str]]
) -> tuple[Files, str | None]:
    """An export's files in a format, and where the copy of the target's embedding is from, if the format has one.

    Raises:
        UserError: the format cannot carry this drafter.
    """
    form = FORMATS[kind]
    if form.is_reference and target.shape.rope_scaling is not None:
        raise UserError(
            f"--format {kind}: {target.name} scales its rotary embedding (llama3), which EAGLE's reference code does "
            "not know; use --format sglang or vllm"
        )
    if not isinstance(drafter, Eagle3Drafter):
        return _eagle(drafter, target, kind), None
    flat = _eagle3(drafter, target)
    if form.eagle_class:
        return flat, None
    embedding, origin = read_embedding()
    return _speculators(flat, target, embedding), origin


def _eagle(drafter: EagleDrafter, target: Target, kind: str) -> Files:
    """A Llama layer without ``input_layernorm``, behind fc."""
    form, shape = FORMATS[kind], target.shape
    if not form.eagle_class:
        raise UserError(
            f"--format {kind} has a layout for EAGLE-3 drafters alone, and this one is of the EAGLE form; use --format "
            "vllm"
        )
    if form.is_reference:
        _check_heads(target, f"--format {kind}", "use --format sglang or vllm")
    layer = _layer_tensors(drafter, shape)
    tensors = {"fc.weight": drafter.fc, **{f"layers.0.{name}": tensor for name, tensor in layer.items()}}
    if form.fusion_bias:
        tensors["fc.bias"] = torch.zeros(shape.hidden_size)
    if shape.family != "qwen2" or not form.qwen2_class:
        return _files(tensors, _config(target, form.eagle_class), target)
    for name, count in {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}.items():
        tensors[f"layers.0.self_attn.{name}_proj.bias"] = torch.zeros(count * shape.head_dim)
    config = _config(target, form.qwen2_class) | {"model_type": "qwen2", "use_sliding_window": False}
    del config["attention_bias"]  # no key of this family, whose q, k and v always have biases
    return _files(tensors, config, target)


def _speculators(flat: Files, target: Target, embedding: Tensor) -> Files:
    """The layout of the speculators library and ``vllm serve``, which holds a copy of the target's embedding.

    ``norm_before_residual`` is written because vLLM assumes that it is true if it is absent.
    """
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in flat.tensors.items()}
    layer = {key: value for key, value in flat.config.items() if key not in ("architectures", "draft_vocab_size")}
    greedy = {"proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**greedy, "accept_tolerance": 0.0, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": target.path, "architectures": list(target.architectures)},
        },
        "draft_vocab_size": flat.config["draft_vocab_size"],
        "norm_before_residual": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": flat.config["torch_dtype"],
        "transformer_layer_config": layer,
    }
    return _files({**tensors, "embed_tokens.weight": embedding}, config, target)


def _eagle3(drafter: Eagle3Drafter, target: Target) -> Files:
    """The one layout of EAGLE-3 that SGLang, vLLM and EAGLE's reference share."""
    check_layers(target.shape, target.name)
    _check_heads(target, "an EAGLE-3 drafter", "use a drafter of the EAGLE form with --format sglang or vllm")
    ids, size = drafter.token_ids, target.shape.vocab_size
    layer = _layer_tensors(drafter, target.shape)
    layer["hidden_norm.weight"], layer["input_layernorm.weight"] = drafter.hidden_norm, drafter.input_norm
    tensors = {
        "fc.weight": drafter.fc,
        **{f"midlayer.{name}": tensor for name, tensor in layer.items()},
        "norm.weight": drafter.final_norm,
        "lm_head.weight": drafter.head,
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(size, dtype=torch.bool).index_fill_(0, ids, True),
    }
    config = _config(target, "LlamaForCausalLMEagle3") | {"draft_vocab_size": len(ids)}
    return _files(tensors, config, target)


def _layer_tensors(drafter: AnyDrafter, shape: ModelShape) -> dict[str, Tensor]:
    """The matrices that both forms have, split as Hugging Face names them."""
    queries, pairs = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    q, k, v = drafter.qkv.split_with_sizes((queries, pairs, pairs))
    gate, up = drafter.gate_up.chunk(2)
    return {
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": drafter.output,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": drafter.down,
        "post_attention_layernorm.weight": drafter.post_norm,
    }


def _config(target: Target, architecture: str) -> dict[str, Any]:
    """The config.json of a Llama of one layer, with the target's sizes and rotary embedding."""
    s = target.shape
    scaling = None
    if s.rope_scaling is not None:
        scaling = {key: value for key, value in s.rope_scaling.items() if key not in ("rope_theta", "type")}
        scaling["rope_type"] = "llama3"
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


def _check_heads(target: Target, what: str, remedy: str) -> None:
    s = target.shape
    if s.num_heads * s.head_dim != s.hidden_size:
        raise UserError(
            f"{what} needs heads of hidden_size / num_attention_heads, and {target.name} has {s.num_heads} of "
            f"{s.head_dim} for a width of {s.hidden_size}; {remedy}"
        )


def _files(tensors: dict[str, Tensor], config: dict[str, Any], target: Target) -> Files:
    return Files({name: _stored(name, tensor, target.dtype) for name, tensor in tensors.items()}, config)


def _stored(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As the file holds it: floats in the export's type, ids and masks as they are."""
    cast = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
    if cast.is_floating_point() and not torch.isfinite(cast).all():
        raise UserError(
            f"tensor {name!r} holds values beyond {dtype}; give --model a copy of the target's folder whose "
            'config.json has "dtype": "bfloat16"'
        )
    return cast
