"""Plans a warm-up: its configuration completed, checked and described, before any rank starts or writes."""

from __future__ import annotations

from tlt_hpc.common.formatting import format_count
from tlt_hpc.config import Config, ConfigError, to_toml
from tlt_hpc.plan.inputs import ModelAssets, describe_model
from tlt_hpc.rollout.strategy import parse_strategy

SUFFIX = "-warmup"
VALIDATION = parse_strategy("drafter-5")
"""How validation speculates: with the learned drafter alone, in chains longer than most runs draft."""


def warmup_config(config: Config) -> Config:
    """Return a job's configuration as its warm-up has it, with a folder of its own.

    Raises:
        ConfigError: there is no drafter to warm up.
    """
    if not config.speculation.has_drafter:
        raise ConfigError(
            f"speculation.mode = {config.speculation.mode!r} has no learned drafter to warm up; "
            "use speculation.mode = 'full'"
        )
    run = config.run.model_copy(update={"name": config.run.name + SUFFIX})
    return config.model_copy(update={"run": run})


def describe(config: Config, assets: ModelAssets, num_ranks: int) -> str:
    """Return the plan in words, then the resolved configuration as TOML."""
    warmup = config.warmup
    origin = f"logged in {', '.join(warmup.sources)}" if warmup.sources else f"to prompts of {config.data.source_name}"
    lines = [
        f"warm-up     {config.folder}: on {format_count(num_ranks, 'rank')}, seed {config.run.seed}; "
        f"drafter from {config.drafter.init}",
        *describe_model(config.model, assets),
        f"responses   up to {warmup.responses:,} {origin}; features within "
        f"{config.drafter.cache_bytes / 1e9:g} GB a rank",
        f"training    up to {format_count(warmup.updates, 'update')} of {format_count(warmup.batch_tokens, 'token')}; "
        f"learning rate {config.drafter.learning_rate:g}",
        f"validation  every {format_count(warmup.validation_interval, 'update')}: {VALIDATION.name} on up to "
        f"{format_count(warmup.validation_prompts, 'prompt')}; ends after {warmup.patience} without a new best",
    ]
    return "\n".join([*lines, "", to_toml(config)])
