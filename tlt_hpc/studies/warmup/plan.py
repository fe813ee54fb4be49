"""What a warm-up would do: its configuration completed, checked and said in words, before any rank starts or writes."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from tlt_hpc.common.words import count
from tlt_hpc.config import Config, ConfigError, UserError, load_saved_config, to_toml
from tlt_hpc.models.folder import find_model, load_tokenizer
from tlt_hpc.models.shape import ModelShape
from tlt_hpc.rollout.strategy import strategy_named
from tlt_hpc.storage.folder import RunFolder

SUFFIX = "-warmup"
VALIDATION = strategy_named("drafter-5")
"""How validation speculates: with the learned drafter alone, in chains longer than most runs draft."""


def config_of(config: Config) -> Config:
    """A job's configuration as its warm-up has it: a folder of its own, and what the warm-up begins from.

    Raises:
        ConfigError: there is no drafter to warm up.
    """
    if config.speculation.mode != "full":
        raise ConfigError(
            f"speculation.mode = {config.speculation.mode!r} has no learned drafter to warm up; "
            "use speculation.mode = 'full'"
        )
    run = config.run.model_copy(update={"name": config.run.name + SUFFIX})
    drafter = config.drafter.model_copy(update={"init": config.warmup.init, "average_merges": 1})  # nothing is merged
    return config.model_copy(update={"run": run, "drafter": drafter})


def check_sources(config: Config, tokenizer: Tokenizer) -> None:
    """Refuse sources that hold no rollouts, or rollouts written with another vocabulary.

    Raises:
        UserError: with the folder and the remedy.
    """
    for source in config.warmup.sources:
        folder = RunFolder(Path(source))
        if not any(folder.rollout_logs(step) for step in folder.rollout_steps()):
            raise UserError(
                f"--from {source}: no rollouts/step-*/rank-*.h5 there; give the folder of a run that took a step"
            )
        _check_vocabulary(source, folder, tokenizer)


def _check_vocabulary(source: str, folder: RunFolder, tokenizer: Tokenizer) -> None:
    """By the model that the run names; where that is no longer at hand, the tokens themselves are checked later."""
    if not folder.config.is_file():
        return
    path = load_saved_config(folder.config).model.path
    try:
        theirs = load_tokenizer(find_model(path))
    except ValueError:
        return
    if theirs.get_vocab(with_added_tokens=True) != tokenizer.get_vocab(with_added_tokens=True):
        raise UserError(
            f"--from {source}: written with the tokenizer of {path}, which is not this model's; "
            "give runs of the model in model.path"
        )


def describe(config: Config, shape: ModelShape, num_ranks: int) -> str:
    """The plan in words, then the resolved configuration as TOML."""
    warmup, rollout = config.warmup, config.rollout
    origin = f"logged in {', '.join(warmup.sources)}" if warmup.sources else f"to prompts of {config.data.source_name}"
    lines = [
        f"warm-up     {config.folder}: on {count(num_ranks, 'rank')}, seed {config.run.seed}; "
        f"drafter from {warmup.init}",
        f"model       {config.model.path}: {shape.family}, {shape.num_layers} layers of width {shape.hidden_size}, "
        f"{shape.num_parameters / 1e6:.1f} M parameters, {config.model.dtype}",
        f"responses   up to {warmup.responses:,} {origin}; features within "
        f"{config.drafter.cache_bytes / 1e9:g} GB a rank",
        f"training    up to {count(warmup.updates, 'update')} of {count(warmup.batch_tokens, 'token')}; "
        f"learning rate {warmup.learning_rate:g}, noise {warmup.noise:g}",
        f"validation  every {count(warmup.validate_every, 'update')}: {VALIDATION.name} on up to "
        f"{count(warmup.validation_prompts, 'prompt')}, {count(validation_tokens(config), 'token')} each, temperature "
        f"{rollout.temperature:g}; ends after {warmup.patience} without a new best",
    ]
    return "\n".join([*lines, "", to_toml(config)])


def validation_tokens(config: Config) -> int:
    """Most tokens of a validation response."""
    return min(config.warmup.validation_tokens, config.rollout.max_new_tokens)
