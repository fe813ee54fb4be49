"""``tlt export-policy``: writes a run's policy as a Hugging Face folder, with one file of weights in memory at a time.

Everything but the weights is the start model's: configuration (with the new type of the weights), tokenizer, template
(unless the run has one of its own).
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file

from tlt_hpc.checkpoint.policy_weights import PolicyWeights, open_policy
from tlt_hpc.checkpoint.store import find_requested_step
from tlt_hpc.common.formatting import format_count
from tlt_hpc.common.records import ChatFormat
from tlt_hpc.config import ConfigError, DataSection, UserError, load_saved_config
from tlt_hpc.data.chat import read_template
from tlt_hpc.export.export_options import output_folder
from tlt_hpc.export.model_card import escape_markdown, policy_card
from tlt_hpc.export.writer import CARD, CONFIG, MARK, check_output, checkpoint_at, write_folder
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.models.folder import DTYPES
from tlt_hpc.models.lora import peft_name, peft_settings
from tlt_hpc.models.shape import read_shape
from tlt_hpc.models.tokenizer import find_model
from tlt_hpc.models.weight_check import check_sizes, check_weights
from tlt_hpc.models.weight_files import ADAPTER, ADAPTER_CONFIG
from tlt_hpc.storage.folder import RunFolder, no_run_message

SHARD_BYTES = 5_000_000_000
"""Maximum size of one file of weights, as in transformers."""
_INDEX = "model.safetensors.index.json"
_TEMPLATE = "chat_template.jinja"
"""It goes before a template in the tokenizer's configuration."""
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
        raise UserError(no_run_message(folder.path, "config.toml"))
    config = load_saved_config(folder.config)
    options.step = find_requested_step(folder, options.step)
    checkpoint = checkpoint_at(folder, options.step)
    if checkpoint is None:
        raise UserError(f"{options.place} has no checkpoint yet; train on until it has saved one")
    if options.adapter:
        export_adapter(
            options, PolicyWeights(checkpoint, config, adapter_base_folder(options.model or config.model.path))
        )
        return
    model = find_model(options.model or config.model.path)
    policy = open_policy(folder, config, checkpoint, model)
    check_model(policy)
    companions, template = companion_files(model), own_template(config.data)
    ours = {CONFIG, CARD, _INDEX, _TEMPLATE, *(path.name for path in companions)}
    output = output_folder(options, "policy")
    check_output(output, lambda name: name in ours or name.endswith(".safetensors"))

    def fill(part: Path) -> Iterator[Path]:
        for path in companions:
            shutil.copyfile(path, part / path.name)
            yield part / path.name
        if template:
            (part / _TEMPLATE).write_text(template, encoding="utf-8")
            yield part / _TEMPLATE
        yield from write_weights(part, policy, DTYPES[options.dtype])
        settings = json.loads((model / CONFIG).read_text(encoding="utf-8"))
        settings.pop("torch_dtype", None)
        (part / CONFIG).write_text(json.dumps({**settings, "dtype": options.dtype}, indent=2) + "\n")
        log = RunLog(folder.path, until=checkpoint.step) if folder.metrics.is_file() else None
        (part / CARD).write_text(policy_card(config, log, model, output, checkpoint.step), encoding="utf-8")
        yield from (part / CONFIG, part / CARD)

    num_parameters = sum(math.prod(shape) for shape in policy.shapes.values())
    steps = format_count(checkpoint.step, "step")
    what = f"the policy after {steps}, {num_parameters / 1e6:,.1f} M parameters in {options.dtype}"
    print(f"writing {output}", flush=True)  # of a large model it takes minutes
    write_folder(output, fill)
    print(f"wrote {output}: {what}")
    print(f"next: vllm serve {shlex.quote(str(output))}\n  or: AutoModelForCausalLM.from_pretrained({str(output)!r})")


def adapter_base_folder(place: str) -> Path:
    """The folder that adapters belong to, which may have moved: it is only named."""
    try:
        return find_model(place).absolute()
    except ValueError:
        return Path(place).absolute()


def check_model(policy: PolicyWeights) -> None:
    """Refuse the configuration and tokenizer of another model than the checkpoint's.

    Raises:
        ValueError: the weights are not those that the folder's configuration asks for.
    """
    shape = read_shape(policy.model)
    if policy.config.lora.rank:  # merged into the folder's weights
        check_weights(policy.model, shape)
    try:
        check_sizes(policy.shapes, shape, str(policy.checkpoint.folder))
    except UserError as error:
        raise UserError(
            f"{error.message_without_remedy} (by {policy.model / CONFIG})",
            "give --model the folder that the run began with",
        ) from None


def write_weights(folder: Path, policy: PolicyWeights, dtype: torch.dtype) -> Iterator[Path]:
    """Write the files of weights, and their index if there are several; yields each file when it is written.

    Weights are rounded from the fp32 masters that the optimiser keeps; adapters are merged in the run's own precision.
    """
    shards = split_state_dict_into_shards_factory(
        policy.shapes,
        get_storage_size=lambda shape: math.prod(shape) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    for file, names in shards.filename_to_tensors.items():
        with policy.open_weight_reader() as read:
            tensors = {name: cast_weight(name, read(name), dtype) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        yield folder / file
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        yield folder / _INDEX


def cast_weight(name: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight, of any shape, in the precision of the file.

    Raises:
        UserError: it has values that the type cannot hold.
    """
    cast = weight.to(dtype).contiguous()
    if not torch.isfinite(cast).all():
        raise UserError(f"weight {name!r} has values beyond {dtype}; take --dtype bfloat16")
    return cast


def own_template(data: DataSection) -> str:
    """The chat template that a run has in place of its model's; empty: it has none.

    Raises:
        UserError: it cannot be read.
    """
    try:
        found = read_template(data, ChatFormat())
    except ConfigError as error:
        remedy = "restore the file, for the policy was trained on prompts in its format"
        raise UserError(error.message_without_remedy, remedy) from None
    return found.text if found else ""


def companion_files(model: Path) -> list[Path]:
    """A model folder's files besides weights and configuration: tokenizer, template, generation settings, licence."""
    files = [path for path in sorted(model.iterdir()) if path.is_file() and not path.name.startswith(".")]
    return [
        path
        for path in files
        if not path.name.endswith(_WEIGHT_FILES)
        and path.name not in (CONFIG, CARD)
        and path.stat().st_size <= _LARGEST_COMPANION
    ]


def export_adapter(options: argparse.Namespace, policy: PolicyWeights) -> None:
    """Export the adapters alone, as peft writes and loads them.

    Raises:
        UserError: the run has none, or there is no place to write; nothing was written.
    """
    if not policy.config.lora.rank:
        raise UserError(f"{options.place} trains all weights, so there is no adapter; leave --adapter out")
    output, dtype = output_folder(options, "adapter"), DTYPES[options.dtype]
    check_output(output, {ADAPTER, ADAPTER_CONFIG, CARD}.__contains__)
    what = f"the adapter after {format_count(policy.checkpoint.step, 'step')}"

    def fill(part: Path) -> Iterator[Path]:
        with policy.open_adapter_reader() as read:
            tensors = {peft_name(name): cast_weight(name, read(name), dtype) for name in policy.trained_shapes}
        save_file(tensors, part / ADAPTER, metadata={"format": "pt"})
        settings = peft_settings(policy.config.lora, str(policy.model), policy.trained_shapes)
        (part / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        # by its card a later export knows that it may replace this one
        words = f"{what} of {escape_markdown(policy.config.run.name)}, for {escape_markdown(str(policy.model))}"
        (part / CARD).write_text(f"{MARK}-adapter -->\n\nLoRA: {words}.\n", encoding="utf-8")
        yield from (part / ADAPTER, part / ADAPTER_CONFIG, part / CARD)

    write_folder(output, fill)
    num_parameters = sum(math.prod(shape) for shape in policy.trained_shapes.values())
    print(f"wrote {output}: {what}, {num_parameters / 1e6:,.1f} M parameters in {options.dtype}")
    print(
        f"next: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({str(policy.model)!r}), {str(output)!r})"
    )
