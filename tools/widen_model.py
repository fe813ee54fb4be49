"""Write a small model as one that computes the same function and costs what a large one does: padded with zeros.

    python tools/widen_model.py models/SmolLM2-135M-Instruct models/SmolLM2-wide-7B --size 7B
    python tools/widen_model.py embedded:tiny models/tiny-wide-7B --size 7B --drafter embedded:tiny

For timing at the cost of a large model with text of a real one. The head size stays the source's, and so do the layers
if it has more. A drafter in EAGLE form is widened alike and written to FOLDER/drafter.
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
from tlt_hpc.models.draft_layer import layer_of as layer_of_drafter
from tlt_hpc.models.drafter_file import drafter_sizes, read_drafter, write_drafter
from tlt_hpc.models.folder import DTYPES
from tlt_hpc.models.shape import ModelShape, read_shape, shape_from
from tlt_hpc.models.tokenizer import embedded, read_json
from tlt_hpc.models.weight_files import EMBEDDING, INDEX, UNREADABLE, read_heads, reading_files
from tlt_hpc.storage.folder import apply_umask

EMBEDDED = "embedded:"
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
SIZES = {"7B": (3584, 18_944, 512, 152_064, 28), "3B": (2048, 11_008, 256, 152_064, 36)}
"""Of Qwen2.5: hidden and inner size, width of the keys, vocabulary and layers."""


def sizes_of(name: str, shape: ModelShape) -> dict[str, int]:
    """Keys of config.json for a size and a source."""
    hidden, inner, keys, vocabulary, layers = SIZES[name]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocabulary}
    heads = {"num_attention_heads": hidden // shape.head_dim, "num_key_value_heads": keys // shape.head_dim}
    return {**sizes, **heads, "num_hidden_layers": max(layers, shape.num_layers)}


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

    Added layers are zeros: their input passes through.

    Raises:
        ValueError: the source cannot be read, is of another family, has other weights or larger sizes.
    """
    shape, found = read_shape(source), read_heads(source)
    if shape.family not in FAMILIES:
        raise UserError(f"{source} is of the family {shape.family}; use a model of {', '.join(FAMILIES)}")
    share = shape.hidden_size / sizes["hidden_size"]  # what zeros leave of the mean square that a norm divides by
    config: dict[str, Any] = read_json(source / "config.json") | sizes
    config |= {"head_dim": shape.head_dim, "rms_norm_eps": shape.norm_epsilon * share, "tie_word_embeddings": False}
    config |= dict.fromkeys(("dtype", "torch_dtype"), str(dtype).removeprefix("torch."))
    config.pop("layer_types", None)  # of as many layers as the source has; the family's rule gives the same
    wide = shape_from(config, "the wide model")
    places, lengths = places_in(wide, shape), lengths_of(wide)
    axes = {name: _AXES.get(name.split(".")[-2], ())[: 1 if name.endswith("bias") else 2] for name in found}
    count = shape.num_layers * (9 + 3 * shape.qkv_bias + shape.output_bias) + (2 if shape.tied_head else 3)
    wrong = [name for name in found if [len(places[axis]) for axis in axes[name]] != list(found[name].sizes)]
    if wrong or len(found) != count:
        raise UserError(f"{source}: {len(found)} weights, not {count} as in its config.json; misfits: {wrong[:3]}")
    folder.mkdir(parents=True)
    files: dict[str, str] = {}
    with reading_files(UNREADABLE) as read:
        for layer, names in groupby(sorted(found, key=layer_of), layer_of):
            tensors = {}
            for name in names:
                weight = read(found[name].file, name) * (share**0.5 if "norm" in name else 1)
                tensors[name] = torch.zeros([lengths[axis] for axis in axes[name]], dtype=dtype)
                tensors[name][torch.meshgrid(*(places[axis] for axis in axes[name]), indexing="ij")] = weight.to(dtype)
            if shape.tied_head and EMBEDDING in tensors:
                tensors["lm_head.weight"] = tensors[EMBEDDING].clone()
            files |= save(tensors, folder, layer, wide.num_layers)
    first = [name for name in found if layer_of(name) == 1]
    for layer in range(shape.num_layers, wide.num_layers):
        sizes_there = {name.replace(".0.", f".{layer}.", 1): [lengths[axis] for axis in axes[name]] for name in first}
        zeros = {name: torch.zeros(size, dtype=dtype) for name, size in sizes_there.items()}
        files |= save(zeros, folder, layer + 1, wide.num_layers)
    for path in {path for pattern in _TEXTS for path in source.glob(pattern) if path.is_file()}:
        shutil.copyfile(path, folder / path.name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}, indent=2))
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def save(tensors: dict[str, torch.Tensor], folder: Path, layer: int, num_layers: int) -> dict[str, str]:
    """Write a layer's file; returns the file of each tensor."""
    file = f"model-{layer + 1:05d}-of-{num_layers + 1:05d}.safetensors"
    save_file(tensors, folder / file, metadata={"format": "pt"})
    apply_umask(folder / file)
    return dict.fromkeys(tensors, file)


def widen_drafter(place: str, shape: ModelShape, folder: Path, dtype: torch.dtype) -> None:
    """Write the drafter of a model of this shape for the wide model in ``folder``, below it.

    Raises:
        ValueError: there is none, it is of another model, or not in EAGLE form.
    """
    weights, wide = read_drafter(place, shape, "--drafter"), read_shape(folder)
    places, lengths = places_in(wide, shape), lengths_of(wide)
    hidden, queries, keys, inner = (places[axis] for axis in ("hidden", "queries", "keys", "inner"))
    start, width, half = lengths["queries"], lengths["keys"], lengths["inner"]
    rows = {
        "qkv": torch.cat([queries, start + keys, start + width + keys]),
        "gate_up": torch.cat([inner, half + inner]),
    }
    columns = {"fc": torch.cat([hidden, wide.hidden_size + hidden]), "output": queries, "down": inner}
    sizes = {f"{name}.weight": size for name, size in drafter_sizes(wide, layer_of_drafter(weights)).items()}
    if weights.keys() != sizes.keys():
        raise UserError(f"--drafter {place} is not in EAGLE form; use one that is")
    out = {}
    for name, weight in weights.items():
        part = name.removesuffix(".weight")
        out[name] = torch.zeros(sizes[name], dtype=dtype)
        if weight.ndim == 1:
            share = shape.hidden_size / wide.hidden_size if "norm" in name else 1
            out[name][hidden] = (weight.float() * share**0.5).to(dtype)
        else:
            at = torch.meshgrid(rows.get(part, hidden), columns.get(part, hidden), indexing="ij")
            out[name][at] = weight.to(dtype)
    (folder / "drafter").mkdir()
    write_drafter(folder / "drafter", out)


def layer_of(name: str) -> int:
    """A weight's layer, from 1; 0: it is in none."""
    return int(name.split(".")[2]) + 1 if name.startswith("model.layers.") else 0


def main() -> None:
    """Write the wider model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("source")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=list(SIZES), required=True)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--drafter", metavar="PLACE", help="a drafter of the source, as drafter.init names it")
    arguments = parser.parse_args()
    is_own = arguments.source.startswith(EMBEDDED)
    source = embedded(arguments.source.removeprefix(EMBEDDED)) if is_own else Path(arguments.source)
    folder, dtype = arguments.folder, DTYPES[arguments.dtype]
    try:
        shape = read_shape(source)
        widen(source, folder, sizes_of(arguments.size, shape), dtype)
        if arguments.drafter is not None:
            widen_drafter(arguments.drafter, shape, folder, dtype)
    except ValueError as error:
        raise UserError(str(error)) from None


if __name__ == "__main__":
    sys.exit(ending("widen_model", main))
