"""``tlt export-policy``: writes a run's policy as a Hugging Face folder, with one file of weights in memory at a time.

Everything but the weights is the start model's: configuration (with the new type of the weights), tokenizer, template.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from tlt_hpc.checkpoint.manifest import Checkpoint
from tlt_hpc.config import UserError, load_saved_config
from tlt_hpc.export.export_options import output_of
from tlt_hpc.export.model_card import policy_card
from tlt_hpc.export.writer import CARD, CONFIG, WEIGHTS, check_output, checkpoint_at, write_folder
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.models.folder import DTYPES
from tlt_hpc.models.shape import read_shape
from tlt_hpc.models.tokenizer import find_model
from tlt_hpc.storage.folder import RunFolder, no_run

SHARD_BYTES = 5_000_000_000
"""Maximum size of one file of weights, as in transformers."""
_MASTER = ".master"
_INDEX = "model.safetensors.index.json"
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
_LARGEST_COMPANION = 64 * 2**20
"""Largest file that is copied from the model's folder; a tokenizer is far smaller."""


def run(options: argparse.Namespace) -> None:
    """Export one policy.

    Raises:
        ValueError: nothing to export, or no place to write; nothing was written.
    """
    folder = RunFolder(Path(options.place))
    if not folder.config.is_file():
        raise UserError(no_run(folder.path, "config.toml"))
    config = load_saved_config(folder.config)
    checkpoint = checkpoint_at(folder, options.step)
    if checkpoint is None:
        raise UserError(f"{options.place} has no checkpoint yet; train on until it has saved one")
    model = find_model(options.model or config.model.path)
    check_model(checkpoint, model)
    companions = companions_of(model)
    ours = {CONFIG, CARD, _INDEX, *(path.name for path in companions)}
    output = output_of(options, "policy")
    check_output(output, lambda name: name in ours or name.endswith(".safetensors"))

    def fill(part: Path) -> Iterator[Path]:
        for path in companions:
            shutil.copyfile(path, part / path.name)
            yield part / path.name
        yield from write_weights(part, checkpoint, DTYPES[options.dtype])
        settings = json.loads((model / CONFIG).read_text(encoding="utf-8"))
        settings.pop("torch_dtype", None)
        (part / CONFIG).write_text(json.dumps({**settings, "dtype": options.dtype}, indent=2) + "\n")
        log = RunLog(folder.path, until=checkpoint.step) if folder.metrics.is_file() else None
        (part / CARD).write_text(policy_card(config, log, model, output, checkpoint.step), encoding="utf-8")
        yield from (part / CONFIG, part / CARD)

    write_folder(output, fill)
    count = sum(math.prod(shape) for shape in shapes_of(checkpoint).values())
    print(
        f"wrote {output}: the policy after {checkpoint.step} steps, {count / 1e6:,.1f} M parameters in {options.dtype}"
    )
    print(f"next: vllm serve {output}\n  or: AutoModelForCausalLM.from_pretrained({str(output)!r})")


def shapes_of(checkpoint: Checkpoint) -> dict[str, Sequence[int]]:
    """The shape of every weight, by its Hugging Face name, sorted; nothing is read."""
    parts = checkpoint.tensors.get("policy", {})
    return {n.removesuffix(_MASTER): parts[n][0][1].shape for n in sorted(parts) if n.endswith(_MASTER)}


def check_model(checkpoint: Checkpoint, model: Path) -> None:
    """Refuse the configuration and tokenizer of another model than the checkpoint's.

    Raises:
        ValueError: the number of weights is not that of the folder's configuration.
    """
    shape = read_shape(model)
    names = shapes_of(checkpoint)
    count = sum(math.prod(sizes) for name, sizes in names.items() if not (shape.tied_head and name == "lm_head.weight"))
    if count != shape.num_parameters:
        raise UserError(
            f"{model / CONFIG} asks for {shape.num_parameters:,} weights, the checkpoint has {count:,}; give --model "
            "the folder that the run began with"
        )


def plan_shards(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, list[str]]:
    """File -> the weights in it: at most ``SHARD_BYTES`` each, or a single larger tensor; named as in transformers."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes_of(checkpoint).items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and size + num_bytes > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    total = len(groups)
    return {f"model-{number:05d}-of-{total:05d}.safetensors": names for number, names in enumerate(groups, 1)}


def write_weights(folder: Path, checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[Path]:
    """Write the files of weights, and their index if there are several; yields each file when it is written.

    Weights are rounded from the fp32 masters that the optimiser keeps.
    """
    shards = plan_shards(checkpoint, dtype)
    for file, names in shards.items():
        with checkpoint.reading("policy") as read:
            tensors = {name: read(name + _MASTER).to(dtype).contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        yield folder / file
    if len(shards) > 1:
        total = sum(math.prod(shape) for shape in shapes_of(checkpoint).values()) * dtype.itemsize
        weight_map = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        yield folder / _INDEX


def companions_of(model: Path) -> list[Path]:
    """A model folder's files besides weights and configuration: tokenizer, template, generation settings, licence."""
    files = [path for path in sorted(model.iterdir()) if path.is_file() and not path.name.startswith(".")]
    return [
        path
        for path in files
        if not path.name.endswith(_WEIGHT_FILES)
        and path.name not in (CONFIG, CARD)
        and path.stat().st_size <= _LARGEST_COMPANION
    ]
