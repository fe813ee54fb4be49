"""``tlt export-policy``: writes a run's policy as a Hugging Face folder, with one file of weights in memory at a time.

Everything but the weights is the start model's: configuration (with the new type of the weights), tokenizer, template.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tlt_hpc.checkpoint.manifest import Checkpoint
from tlt_hpc.config import Config, UserError
from tlt_hpc.export.export_options import ExportOptions, read_options
from tlt_hpc.export.source import checkpoint_at, config_of
from tlt_hpc.export.writer import CARD, CONFIG, WEIGHTS, check_output, write_folder
from tlt_hpc.models.folder import DTYPES, find_model
from tlt_hpc.models.shape import read_shape
from tlt_hpc.storage.folder import RunFolder, no_run

MARK = "<!-- written by tlt export-policy -->"
SHARD_BYTES = 5_000_000_000
"""Most bytes of one file of weights, as in transformers."""
_MASTER = ".master"
_INDEX = "model.safetensors.index.json"
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
_LARGEST_COMPANION = 64 * 2**20
"""Largest file that is copied from the model's folder; a tokenizer is far smaller."""


@dataclass(frozen=True)
class Shard:
    """One file of weights: its name and the tensors that go into it."""

    file: str
    names: tuple[str, ...]


def run(given: argparse.Namespace) -> None:
    """Export one policy.

    Raises:
        ValueError: nothing to export, or no place to write; nothing was written.
    """
    options = read_options(given)
    folder = RunFolder(Path(options.place))
    config = config_of(folder)
    if config is None:
        raise UserError(no_run(Path(options.place), "config.toml"))
    checkpoint = checkpoint_at(folder, options.step)
    if checkpoint is None:
        raise UserError(f"{options.place} has no checkpoint yet; train on until it has saved one")
    model = find_model(options.model or config.model.path)
    check_model(checkpoint, model)
    companions = companions_of(model)
    ours = {CONFIG, CARD, _INDEX, *(path.name for path in companions)}
    check_output(options.output, MARK, lambda name: name in ours or name.endswith(".safetensors"))
    dtype: torch.dtype = DTYPES[options.kind]
    shards = plan_shards(checkpoint, dtype)

    def fill(part: Path) -> Iterator[Path]:
        for path in companions:
            shutil.copyfile(path, part / path.name)
            yield part / path.name
        yield from write_weights(part, checkpoint, shards, dtype)
        (part / CONFIG).write_text(json.dumps(config_with(model / CONFIG, options.kind), indent=2) + "\n")
        (part / CARD).write_text(card(config, checkpoint, options), encoding="utf-8")
        yield from (part / CONFIG, part / CARD)

    write_folder(options.output, fill)
    count = sum(math.prod(shape) for shape in shapes_of(checkpoint).values())
    print(
        f"wrote {options.output}: the policy after {checkpoint.step} steps, {count / 1e6:,.1f} M parameters in "
        f"{options.kind}, {len(shards)} file{'s' * (len(shards) != 1)} of weights"
    )
    print(f"next: vllm serve {options.output}\n  or: AutoModelForCausalLM.from_pretrained({str(options.output)!r})")


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


def plan_shards(checkpoint: Checkpoint, dtype: torch.dtype) -> list[Shard]:
    """Files of at most ``SHARD_BYTES`` each, or of a single larger tensor; named as in transformers."""
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
        return [Shard(WEIGHTS, tuple(groups[0]))]
    return [
        Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", tuple(names))
        for number, names in enumerate(groups, 1)
    ]


def write_weights(folder: Path, checkpoint: Checkpoint, shards: Sequence[Shard], dtype: torch.dtype) -> Iterator[Path]:
    """Write the shards, and their index if there are several; yields each file when it is written."""
    for shard in shards:
        tensors = {name: weight_of(checkpoint, name, dtype) for name in shard.names}
        save_file(tensors, folder / shard.file, metadata={"format": "pt"})
        yield folder / shard.file
    if len(shards) > 1:
        total = sum(math.prod(shape) for shape in shapes_of(checkpoint).values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": {n: s.file for s in shards for n in s.names}}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        yield folder / _INDEX


def weight_of(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    """One weight, rounded from the fp32 master that the optimiser keeps."""
    return checkpoint.read("policy", name + _MASTER).to(dtype).contiguous()


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


def config_with(path: Path, dtype: str) -> dict[str, Any]:
    """A model's config.json with the type that the exported weights have."""
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    return {**config, "dtype": dtype}


def card(config: Config, checkpoint: Checkpoint, options: ExportOptions) -> str:
    """A short model card."""
    algorithm = config.algorithm
    rows: Mapping[str, str] = {
        "from": config.model.path,
        "run": f"{options.place}, step {checkpoint.step}",
        "algorithm": f"{algorithm.name} (advantage {algorithm.advantage}, loss {algorithm.loss})",
        "data": config.data.source_name,
        "samples a step": f"{config.rollout.prompts_per_step} prompts x {config.rollout.group_size}",
        "sampled at": f"temperature {config.rollout.temperature}",
        "learning rate": str(config.optimizer.learning_rate),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"{MARK}\n# {config.run.name}\n\nA policy trained with reinforcement learning.\n\n| | |\n|---|---|\n{table}\n"
    )
