"""Small models with random weights, one of each family, as transformers writes them."""

from __future__ import annotations

from typing import Any

NUM_TOKENS, WINDOW = 96, 32
SIZES: dict[str, Any] = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LOCAL = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3},
    "qwen3": {},
    "qwen3_moe": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "llama": {"rope_parameters": _LLAMA3, "attention_bias": True},
    "mistral": {"sliding_window": WINDOW},
    "seed_oss": {"attention_bias": True, "attention_out_bias": False, "rope_parameters": _LLAMA3},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2 + ["sliding_attention"],
        "query_pre_attn_scalar": 24,
        "rope_parameters": _LOCAL,
    },
}
"""What each model has beside the sizes of all."""


def random_model(family: str, seed: int = 0) -> Any:
    """A model of transformers in float32, whose norms differ from one another and from ones."""
    from transformers import AutoConfig

    return model_of(AutoConfig.for_model(family, **SIZES, **FAMILIES[family]), seed)


def model_of(config: Any, seed: int = 0) -> Any:
    """The same of a configuration."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.data.add_(0.3 * drawn) if "norm" in name else parameter.data.copy_(0.3 * drawn)
        else:
            parameter.data.copy_(drawn * parameter.shape[-1] ** -0.5)
    return model
