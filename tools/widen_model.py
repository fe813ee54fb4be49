"""Write a small model as one that computes the same function and costs what a large one does: padded with zeros.

    python tools/widen_model.py models/SmolLM2-135M-Instruct models/SmolLM2-wide-7B --size 7B

For timing at the cost of a large model with text of a real one. Number of layers and head size stay the source's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import torch
from safetensors.torch import save_file

from tlt_hpc.config import UserError
from tlt_hpc.models.folder import DTYPES
from tlt_hpc.models.json_file import read_json
from tlt_hpc.models.shape import ModelShape, read_shape, shape_from
from tlt_hpc.models.weight_files import EMBEDDING, INDEX, UNREADABLE, reading_files, weight_shapes

FAMILIES = ("llama", "mistral", "qwen2")
_TEXTS = ("*token*.json", "tokenizer.model", "vocab.*", "merges.txt", "generation_config.json", "chat_template*")
_AXES = {
    **dict.fromkeys(("embed_tokens", "lm_head"), ("vocabulary", "hidden")),
    **dict.fromkeys(("norm", "input_layernorm", "post_attention_layernorm"), ("hidden",)),
    **dict.fromkeys(("k_proj", "v_proj"), ("keys", "hidden")),
    **dict.fromkeys(("gate_proj", "up_proj"), ("inner", "hidden")),
    "q_proj": ("queries", "hidden"),
    "o_proj": ("hidden", "queries"),
    "down_proj": ("hidden", "inner"),
}
"""Along which axes each weight extends; its bias has the first."""
_NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
SIZES = {
    "7B": dict(zip(_NAMES, (3584, 18_944, 56, 8, 152_064), strict=True)),
    "3B": dict(zip(_NAMES, (2048, 11_008, 32, 4, 152_064), strict=True)),
}


def lengths_of(shape: ModelShape) -> dict[str, int]:
    """How long each axis is."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    outer = {"vocabulary": shape.vocab_size, "hidden": shape.hidden_size, "inner": shape.intermediate_size}
    return {**outer, "queries": queries, "keys": keys}


def places_in(wide: ModelShape, shape: ModelShape) -> dict[str, torch.Tensor]:
    """Where along each axis of the wide model the source's entries lie: first, but a query head stays with its keys."""
    group, wide_group = shape.num_heads // shape.num_kv_heads, wide.num_heads // wide.num_kv_heads
    small, large = lengths_of(shape), lengths_of(wide)
    if group > wide_group or any(small[axis] > large[axis] for axis in small):
        raise UserError(f"{small}, groups of {group} heads, do not fit into {large}, {wide_group} heads; use another")
    head = torch.arange(shape.num_heads)
    first = (head // group * wide_group + head % group) * shape.head_dim
    places = {axis: torch.arange(length) for axis, length in small.items()}
    return places | {"queries": (first[:, None] + torch.arange(shape.head_dim)).ravel()}


def widen(source: Path, folder: Path, sizes: dict[str, int], dtype: torch.dtype) -> None:
    """Write the model in ``source`` to a new ``folder``, one layer at a time and config.json last.

    Raises:
        ValueError: the source cannot be read, is of another family, has other weights or larger sizes.
    """
    shape, found = read_shape(source), weight_shapes(source)
    if shape.family not in FAMILIES:
        raise UserError(f"{source} is of the family {shape.family}; use a model of {', '.join(FAMILIES)}")
    share = shape.hidden_size / sizes["hidden_size"]  # what zeros leave of the mean square that a norm divides by
    config: dict[str, Any] = read_json(source / "config.json") | sizes
    config |= {"head_dim": shape.head_dim, "rms_norm_eps": shape.norm_epsilon * share, "tie_word_embeddings": False}
    config |= dict.fromkeys(("dtype", "torch_dtype"), str(dtype).removeprefix("torch."))
    wide = shape_from(config, "the wide model")
    places, lengths = places_in(wide, shape), lengths_of(wide)
    axes = {name: _AXES.get(name.split(".")[-2], ())[: 1 if name.endswith("bias") else 2] for name in found}
    count = shape.num_layers * (9 + 3 * shape.qkv_bias + shape.output_bias) + (2 if shape.tied_head else 3)
    wrong = [name for name in found if [len(places[axis]) for axis in axes[name]] != list(found[name][1])]
    if wrong or len(found) != count:
        raise UserError(f"{source}: {len(found)} weights, not {count} as in its config.json; misfits: {wrong[:3]}")
    folder.mkdir(parents=True)
    files: dict[str, str] = {}
    with reading_files(UNREADABLE) as read:
        for layer, names in groupby(sorted(found, key=layer_of), layer_of):
            tensors = {}
            for name in names:
                weight = read(found[name][0], name) * (share**0.5 if "norm" in name else 1)
                tensors[name] = torch.zeros([lengths[axis] for axis in axes[name]], dtype=dtype)
                tensors[name][torch.meshgrid(*(places[axis] for axis in axes[name]), indexing="ij")] = weight.to(dtype)
            if shape.tied_head and EMBEDDING in tensors:
                tensors["lm_head.weight"] = tensors[EMBEDDING].clone()
            file = f"model-{layer + 1:05d}-of-{shape.num_layers + 1:05d}.safetensors"
            save_file(tensors, folder / file, metadata={"format": "pt"})
            files |= dict.fromkeys(tensors, file)
    for path in {path for pattern in _TEXTS for path in source.glob(pattern) if path.is_file()}:
        shutil.copyfile(path, folder / path.name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}, indent=2))
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def layer_of(name: str) -> int:
    """A weight's layer, from 1; 0: it is in none."""
    return int(name.split(".")[2]) + 1 if name.startswith("model.layers.") else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=list(SIZES), required=True)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    arguments = parser.parse_args()
    try:
        widen(arguments.source, arguments.folder, SIZES[arguments.size], DTYPES[arguments.dtype])
    except ValueError as error:
        raise UserError(str(error)) from None


if __name__ == "__main__":
    sys.exit(ending("widen_model", main))
