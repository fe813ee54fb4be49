"""Finds the drafter that a user names, its target, and what the run recorded of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tlt_hpc.checkpoint.manifest import Checkpoint, CheckpointError
from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.config import EMBEDDED_MODEL, Config, UserError, load_saved_config
from tlt_hpc.export.export_options import ExportOptions
from tlt_hpc.export.formats import Target, read_target
from tlt_hpc.models.drafter_file import DRAFTER_FILE, TOKEN_IDS, checked_drafter
from tlt_hpc.models.folder import embedded
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.records import DrafterFacts, read_facts
from tlt_hpc.storage.step_lines import Line, read_lines

_ACCEPT_LENGTH = "drafter/spec_decode/mean_acceptance_length"
_DRAFTER_FOLDER = "drafter"
_NUM_UPDATES = "num_steps"
_ABSENT = "not recorded"


@dataclass(frozen=True)
class Source:
    """A drafter, its target, and where both come from."""

    origin: Path
    drafter: Mapping[str, Tensor]
    """Its tensors by name; with ``token_ids`` it is of the EAGLE-3 form."""
    target: Target
    num_steps: int | None
    """RL steps behind the weights; None: not recorded."""
    rows: list[tuple[str, str]]
    """What was recorded of its training, in words."""


@dataclass(frozen=True)
class _Found:
    """A drafter's tensors by their stored names, its run if there is one, and the RL steps that it was trained for."""

    origin: Path
    stored: Mapping[str, Tensor]
    run: RunFolder | None
    num_steps: int | None = None


def open_source(options: ExportOptions) -> Source:
    """The drafter that the options name.

    Raises:
        ValueError: there is none, a file is broken, or the target is unknown; one line with the remedy.
    """
    found = _find(options)
    config = config_of(found.run)
    target = _target(options, config)
    drafter = checked_drafter(found.stored, target.shape, str(found.origin))
    for name, tensor in drafter.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise UserError(
                f"{found.origin}: drafter tensor {name!r} holds values that are no numbers; take an earlier --step"
            )
    facts = read_facts(found.origin.parent) if found.num_steps is None else None
    if facts is not None:
        return Source(found.origin, drafter, target, 0, _describe_warmup(facts, target))
    lines = [] if found.run is None else list(read_lines(found.run.metrics).values())
    num_steps = found.num_steps
    if num_steps is None and lines:
        num_steps = int(lines[-1]["training/global_step"]) + 1
    behind = [line for line in lines if num_steps is not None and line["training/global_step"] < num_steps]
    rows = _describe_training(config, target, num_steps, found.stored.get(_NUM_UPDATES), behind)
    return Source(found.origin, drafter, target, num_steps, rows)


def _find(options: ExportOptions) -> _Found:
    folder = embedded("tiny_drafter") if options.place == EMBEDDED_MODEL else Path(options.place)
    if (folder / DRAFTER_FILE).is_file():
        if options.step is not None:
            raise UserError(
                f"--step {options.step}: {options.place} holds one drafter, not checkpoints; leave --step out"
            )
        return _from_file(folder / DRAFTER_FILE, _run_around(folder))
    if not folder.is_dir():
        raise UserError(f"{options.place}: no such folder; give a run's folder, or one that has a {DRAFTER_FILE}")
    return _in_run(options, RunFolder(folder))


def _in_run(options: ExportOptions, run: RunFolder) -> _Found:
    """The drafter of the newest or the requested checkpoint; of a finished run's file if its checkpoints are gone."""
    checkpoint = checkpoint_at(run, options.step)
    if checkpoint is not None and checkpoint.names("drafter"):
        stored = {name: checkpoint.read("drafter", name) for name in checkpoint.names("drafter") if _is_read(name)}
        return _Found(checkpoint.folder, stored, run, checkpoint.step)
    path = run.path / _DRAFTER_FOLDER / DRAFTER_FILE
    if options.step is None and path.is_file():
        return _from_file(path, run)
    raise UserError(
        f"{options.place} has no drafter{'' if checkpoint is None else f' in {checkpoint.folder.name}'}; give a run "
        f"with speculation.mode = 'full' that has saved a checkpoint, or a folder that has a {DRAFTER_FILE}"
    )


def _from_file(path: Path, run: RunFolder | None) -> _Found:
    try:
        return _Found(path, load_file(path), run)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is no whole safetensors file ({error}); give another drafter") from None


def _is_read(name: str) -> bool:
    """Whether a stored tensor is needed: the optimiser's moments are not, and are most of the bytes."""
    return name.endswith(".weight") or name in (TOKEN_IDS, _NUM_UPDATES)


def checkpoint_at(run: RunFolder, step: int | None) -> Checkpoint | None:
    """The checkpoint of a step, or the newest; None where there is none.

    Raises:
        UserError: no such checkpoint.
    """
    if step is None:
        return CheckpointStore(run.checkpoints, keep=1).newest()
    try:
        return CheckpointStore(run.checkpoints, keep=1).at(step)
    except CheckpointError as error:
        raise UserError(f"--step {step}: {error}") from None


def _run_around(folder: Path) -> RunFolder | None:
    """The run whose folder this is, or that it is in."""
    return next(
        (RunFolder(path) for path in (folder, folder.resolve().parent) if RunFolder(path).config.is_file()), None
    )


def config_of(run: RunFolder | None) -> Config | None:
    """A run's configuration; None where it has none.

    Raises:
        UserError: it cannot be read.
    """
    if run is None or not run.config.is_file():
        return None
    try:
        return load_saved_config(run.config)
    except UserError as error:
        raise UserError(f"{run.config}: {error}") from None


def _target(options: ExportOptions, config: Config | None) -> Target:
    if options.model is not None:
        return read_target(options.model, f"--model {options.model}")
    if options.place == EMBEDDED_MODEL:
        return read_target(EMBEDDED_MODEL, options.place)
    if config is None:
        raise UserError(f"{options.place} has no config.toml that names the target model; add --model FOLDER")
    return read_target(config.model.path, f"model.path = {config.model.path!r} of {options.place}")


def _describe_warmup(facts: DrafterFacts, target: Target) -> list[tuple[str, str]]:
    return [
        ("target", target.name),
        ("data", f"{facts.num_responses:,} responses ({facts.num_tokens:,} tokens) of {facts.target} to {facts.data}"),
        ("RL steps", "0"),
        ("drafter updates", f"{facts.num_updates:,}, begun from {facts.init}"),
        (
            "accept length",
            f"{facts.accept_length:.2f} tokens per target pass and sequence at temperature {facts.temperature:g}, by "
            f"{facts.strategy} on {facts.num_validation_prompts} held-out prompts",
        ),
    ]


def _describe_training(
    config: Config | None, target: Target, num_steps: int | None, updates: Tensor | None, lines: list[Line]
) -> list[tuple[str, str]]:
    data = temperature = begun = ""
    if config is not None:
        rollout = config.rollout
        data = f"{config.data.source_name}, {rollout.prompts_per_step} prompts x {rollout.group_size} responses a step"
        temperature, begun = f" at temperature {rollout.temperature:g}", f", begun from {config.drafter.init}"
    accept = lines[-1].get(_ACCEPT_LENGTH) if lines else None
    return [
        ("target", f"the policy after {num_steps} RL steps from {target.name}" if num_steps else target.name),
        ("data", data or _ABSENT),
        ("RL steps", _ABSENT if num_steps is None else f"{num_steps:,}"),
        ("drafter updates", _ABSENT if updates is None else f"{int(updates):,}{begun}"),
        (
            "accept length",
            _ABSENT
            if accept is None
            else f"{accept:.2f} tokens per target pass and sequence{temperature}, over the whole of the run's last "
            "rollout before these weights: rounds without drafts and drafts from n-grams are counted too",
        ),
    ]
