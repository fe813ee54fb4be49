"""Shapes of well-known models by name, so that a login node without their files can plan for them.

Sizes from the models' own config.json; a test holds the parameter counts against the published ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tlt_hpc.config import EMBEDDED_MODEL, ConfigError
from tlt_hpc.models.shape import ModelShape, read_shape, shape_from
from tlt_hpc.models.tokenizer import find_model

_FIELDS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
_KNOWN: dict[str, tuple[Any, ...]] = {
    "Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, True),
    "Qwen2.5-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 151936, 131072, True),
    "Qwen2.5-3B": ("qwen2", 2048, 11008, 36, 16, 2, 151936, 32768, True),
    "Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072, False),
    "Qwen2.5-14B": ("qwen2", 5120, 13824, 48, 40, 8, 152064, 131072, False),
    "Qwen2.5-32B": ("qwen2", 5120, 27648, 64, 40, 8, 152064, 131072, False),
    "DeepSeek-R1-Distill-Qwen-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 151936, 131072, False),
    "DeepSeek-R1-Distill-Qwen-7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072, False),
    "DeepSeek-R1-Distill-Qwen-32B": ("qwen2", 5120, 27648, 64, 40, 8, 152064, 131072, False),
    "Qwen3-8B": ("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, False),
    "Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, 128256, 131072, False),
    "Llama-3.1-70B": ("llama", 8192, 28672, 80, 64, 8, 128256, 131072, False),
    "Llama-3.3-70B": ("llama", 8192, 28672, 80, 64, 8, 128256, 131072, False),
    "DeepSeek-R1-Distill-Llama-70B": ("llama", 8192, 28672, 80, 64, 8, 128256, 131072, False),
}
_WITH_MORE: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
    "Mistral-7B-v0.3": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768, "max_position_embeddings": 32768,
        "sliding_window": None,
    },
    "gemma-3-270m": {
        "model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144, "max_position_embeddings": 32768,
        "sliding_window": 512,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144, "max_position_embeddings": 32768,
        "sliding_window": 512,
    },
}  # fmt: skip
"""Those whose family needs other fields as well."""
_SUFFIXES = ("-Instruct", "-Base", "-it", "-pt")


def find_shape_by_name(name: str) -> ModelShape | None:
    """The shape of a model of this name; None where it is not known."""
    for suffix in _SUFFIXES:
        name = name.replace(suffix, "")
    listed = {key: dict(zip(_FIELDS, values, strict=True)) for key, values in _KNOWN.items()} | _WITH_MORE
    known = {key.lower(): values for key, values in listed.items()}.get(name.lower())
    return None if known is None else shape_from(known, name)


def find_shape(path: str, given: str | None) -> ModelShape:
    """The shape of ``model.path``, or the one ``given`` by name or as a config.json or its folder.

    Raises:
        ValueError: there is no such file, and the name is not known.
    """
    if path == EMBEDDED_MODEL and given is None:
        return read_shape(find_model(path))
    place = Path(given or path)
    folder = place.parent if place.name == "config.json" else place
    shape = read_shape(folder) if (folder / "config.json").is_file() else find_shape_by_name(place.name)
    if shape is None:
        what = f"model.path = {path!r}" if given is None else f"--shape {given}"
        raise ConfigError(
            f"{what} is not the folder of a model on this machine, and not the name of a known one; give "
            f"--shape CONFIG.json, or one of {', '.join((*_KNOWN, *_WITH_MORE))}"
        )
    return shape
