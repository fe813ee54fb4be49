"""Finds the drafter that a user names, its target, and what the run recorded of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tlt_hpc.checkpoint.manifest import Checkpoint, CheckpointError
from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.config import EMBEDDED_MODEL, Config, UserError, load_saved_config
from tlt_hpc.export.export_options import ExportOptions
from tlt_hpc.export.forms import AnyDrafter, drafter_from
from tlt_hpc.export.target import EMBEDDING, Target, embedding_of, read_target
from tlt_hpc.models.drafter_file import DRAFTER_FILE, TOKEN_IDS
from tlt_hpc.models.folder import embedded
from tlt_hpc.storage.drafter_facts import DrafterFacts, read_facts
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.step_lines import Line, read_lines

_ACCEPT_LENGTH = "drafter/spec_decode/mean_acceptance_length"
_DRAFTER_FOLDER = "drafter"
_NUM_UPDATES = "num_steps"


@dataclass(frozen=True)
class History:
    """What was recorded of a drafter's training; None: not recorded."""

    data: str | None = None
    num_steps: int | None = None
    """RL steps behind the weights."""
    num_updates: int | None = None
    """Optimiser steps behind the weights."""
    init: str | None = None
    """What the weights started from: ``random``, or another drafter, whose own steps are not counted."""
    accept_length: float | None = None
    """Tokens per target pass and sequence in the last rollout on record, whatever strategies the run chose from."""
    temperature: float | None = None
    validation: str | None = None
    """What the accept length was measured with, if that was on held-out prompts."""


@dataclass(frozen=True)
class Source:
    """A drafter, its target, and where both come from."""

    origin: Path
    drafter: AnyDrafter
    target: Target
    history: History
    embedding: Callable[[], tuple[Tensor, str]]
    """Reads the target's embedding [V, H]; also returns where it comes from."""


@dataclass(frozen=True)
class _Found:
    """A drafter's tensors by their stored names, its run if there is one, and the RL steps that it was trained for."""

    origin: Path
    stored: Mapping[str, Tensor]
    run: RunFolder | None
    num_steps: int | None = None
    checkpoint: Checkpoint | None = None


def open_source(options: ExportOptions) -> Source:
    """The drafter that the options name.

    Raises:
        ValueError: there is none, a file is broken, or the target is unknown; one line with the remedy.
    """
    found = _find(options)
    config = config_of(found.run)
    target = _target(options, config)
    drafter = drafter_from(found.stored, target.shape, str(found.origin))
    return Source(found.origin, drafter, target, _history(found, config), lambda: _embedding(found, target))


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
        return _Found(checkpoint.folder, stored, run, checkpoint.step, checkpoint)
    path = run.path / _DRAFTER_FOLDER / DRAFTER_FILE
    if options.step is None and path.is_file():
        return _from_file(path, run)
    raise UserError(
        f"{options.place} has no drafter{'' if checkpoint is None else f' in {checkpoint.folder.name}'}; give a run "
        f"with speculation.mode = 'full' that has saved a checkpoint, or a folder that has a {DRAFTER_FILE}"
    )


def _from_file(path: Path, run: RunFolder | None) -> _Found:
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if _is_read(name)]  # noqa: SIM118 (no mapping)
            return _Found(path, {name: file.get_tensor(name) for name in names}, run)
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


def _history(found: _Found, config: Config | None) -> History:
    facts = read_facts(found.origin.parent) if found.checkpoint is None else None
    if facts is not None:
        return _warmup_history(facts)
    updates = found.stored.get(_NUM_UPDATES)
    rows = _metrics(found.run)
    num_steps = found.num_steps
    if num_steps is None and rows:
        num_steps = int(rows[-1]["training/global_step"]) + 1
    behind = [row for row in rows if num_steps is not None and row["training/global_step"] < num_steps]
    return History(
        data=None if config is None else _describe_data(config),
        num_steps=num_steps,
        num_updates=None if updates is None else int(updates),
        init=None if config is None else config.drafter.init,
        accept_length=behind[-1].get(_ACCEPT_LENGTH) if behind else None,
        temperature=None if config is None else config.rollout.temperature,
    )


def _warmup_history(facts: DrafterFacts) -> History:
    return History(
        data=f"{facts.num_responses:,} responses ({facts.num_tokens:,} tokens) of {facts.target} to {facts.data}",
        num_steps=0,
        num_updates=facts.num_updates,
        init=facts.init,
        accept_length=facts.accept_length,
        temperature=facts.temperature,
        validation=f"{facts.strategy} on {facts.num_validation_prompts} held-out prompts",
    )


def _metrics(run: RunFolder | None) -> list[Line]:
    """The run's figures by step, ascending; none where it wrote none."""
    return [] if run is None else list(read_lines(run.metrics).values())


def _describe_data(config: Config) -> str:
    rollout = config.rollout
    return f"{config.data.source_name}, {rollout.prompts_per_step} prompts x {rollout.group_size} responses a step"


def _embedding(found: _Found, target: Target) -> tuple[Tensor, str]:
    """The policy's embedding if there is a checkpoint, since training changes it; else that of the model folder."""
    master = f"{EMBEDDING}.master"
    if found.checkpoint is None or master not in found.checkpoint.names("policy"):
        return embedding_of(target), f"the model folder {target.name}, before any training"
    return found.checkpoint.read("policy", master), f"the policy in {found.checkpoint.folder}"
