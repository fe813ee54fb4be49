"""Checks of a configuration that need the model's sizes and no more; a start, preflight and ``tlt plan`` make them."""

from __future__ import annotations

from tlt_hpc.config import Config, ConfigError, check_model_limits, check_sequence_parallel
from tlt_hpc.models.shape import ModelShape, check_sharding
from tlt_hpc.rollout.strategy import strategies_of


def check_shape(config: Config, shape: ModelShape, num_ranks: int) -> None:
    """Refuse a model whose positions, heads or layers do not suit the job.

    Raises:
        ConfigError: with the key and the remedy.
    """
    check_model_limits(config, shape.max_positions)
    check_sharding(shape, config.rollout.tensor_parallel, "rollout.tensor_parallel")
    check_sequence_parallel(config, shape.num_heads, shape.num_kv_heads, num_ranks)


def check_strategies(config: Config) -> None:
    """Refuse strategies that do not exist, or that leave nothing to choose from.

    Raises:
        ConfigError: with the key and the remedy.
    """
    mode, names = config.speculation.mode, config.speculation.strategies
    try:
        arms = strategies_of(mode, names)
    except ValueError as error:
        raise ConfigError(f"speculation.strategies: {error}") from None
    if mode != "plain" and len(arms) == 1:
        raise ConfigError(
            f"speculation.strategies = {list(names)} leaves nothing to try in speculation.mode = {mode!r}; "
            "add e.g. 'ngram-4' or use mode 'full'"
        )
