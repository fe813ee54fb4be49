"""Checks of a configuration that need the model's sizes and no more; a start, preflight and ``tlt plan`` make them."""

from __future__ import annotations

from dataclasses import replace

from tlt_hpc.config import Config, ConfigError, SpeculationSection, check_model_limits, check_sequence_parallel
from tlt_hpc.models.shape import DRAFTER_SHARDING, ModelShape, check_layers, check_sharding
from tlt_hpc.rollout.strategy import strategies_of

_IN_EXPERTS = {"gate_proj", "up_proj", "down_proj"}


def check_shape(config: Config, shape: ModelShape, num_ranks: int) -> None:
    """Refuse a model whose positions, heads or layers do not suit the job.

    Raises:
        UserError: with the key and the remedy.
    """
    check_model_limits(config, shape.max_positions)
    check_sharding(shape, config.rollout.tensor_parallel, "rollout.tensor_parallel")
    if config.speculation.mode == "full" and config.drafter.init == "random":  # a published one has its own width
        check_sharding(replace(shape, num_experts=0), config.rollout.tensor_parallel, DRAFTER_SHARDING)
        if config.drafter.form == "eagle3":
            check_layers(shape, "drafter.form = 'eagle3'")
    check_experts(config, shape, config.model.device)
    check_sequence_parallel(config.optimizer, shape.num_heads, shape.num_kv_heads, num_ranks)
    if config.lora.rank and shape.num_experts and _IN_EXPERTS.intersection(config.lora.targets):
        raise ConfigError(
            f"lora.targets names {sorted(_IN_EXPERTS.intersection(config.lora.targets))[0]!r}, and experts get no "
            'adapters; use lora.targets = ["q_proj", "k_proj", "v_proj", "o_proj"]'
        )


def check_experts(config: Config, shape: ModelShape, device: str) -> None:
    """Refuse a mixture of experts in float32 on a GPU, whose text would depend on the batch; and what needs a router
    where there is none.

    Args:
        device: "cuda", "cpu", or "auto" where it is not known yet.

    Raises:
        ConfigError: with the key and the remedy.
    """
    if shape.num_experts and device == "cuda" and config.model.dtype == "float32":
        raise ConfigError(
            "model.dtype = 'float32' with a mixture of experts on a GPU: rounding would choose another expert in other "
            "passes, and with it another text; use model.dtype = 'bfloat16'"
        )
    coefficient = config.algorithm.router_aux_coefficient
    for key, value in (
        ("optimizer.freeze_router = true", config.optimizer.freeze_router),
        (f"algorithm.router_aux_coefficient = {coefficient}", coefficient),
    ):
        if value and not shape.num_experts:
            raise ConfigError(f"{key} with a model of family {shape.family!r}, which has no router; leave it out")


def check_strategies(speculation: SpeculationSection) -> None:
    """Refuse strategies that do not exist, or that leave nothing to choose from.

    Raises:
        ConfigError: with the key and the remedy.
    """
    mode, names = speculation.mode, speculation.strategies
    try:
        arms = strategies_of(mode, names)
    except ValueError as error:
        raise ConfigError(f"speculation.strategies: {error}") from None
    if mode != "plain" and len(arms) == 1:
        raise ConfigError(
            f"speculation.strategies = {list(names)} leaves nothing to try in speculation.mode = {mode!r}; "
            "add e.g. 'ngram-4' or use mode 'full'"
        )
