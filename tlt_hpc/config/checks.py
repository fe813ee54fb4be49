"""Checks of values that sections of a configuration, the model and the ranks share."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tlt_hpc.config.fields import ConfigError, Section
from tlt_hpc.config.recipes import GROUP_ADVANTAGES
from tlt_hpc.config.rollout_sections import RolloutSection
from tlt_hpc.config.sections import Config
from tlt_hpc.config.update_sections import OptimizerSection


def find_contradictions(config: Config) -> Iterator[str]:
    """Values that contradict each other, each as one line with the remedy."""
    for _, section in config:
        assert isinstance(section, Section)
        yield from section.problems()
    rollout, algorithm, evaluation = config.rollout, config.algorithm, config.evaluation
    if rollout.group_size < 2 and algorithm.recipe.advantage in GROUP_ADVANTAGES:
        yield (
            f"rollout.group_size = {rollout.group_size} with algorithm.name = {algorithm.name!r}, "
            "whose advantage needs a group; use rollout.group_size of 2 or more, or algorithm.name = 'reinforce++'"
        )
    if config.samples_per_step % algorithm.updates_per_step:
        yield (
            f"algorithm.updates_per_step = {algorithm.updates_per_step} does not divide the step's "
            f"{config.samples_per_step} samples; use {math.gcd(config.samples_per_step, algorithm.updates_per_step)}"
        )
    if config.optimizer.zero_stage == 0 and config.model.dtype != "float32":
        yield (
            f"optimizer.zero_stage = 0 with model.dtype = {config.model.dtype!r} has no fp32 master weights, so small "
            "updates are lost; use optimizer.zero_stage = 1"
        )
    if algorithm.router_aux_coefficient and config.lora.rank:
        yield (
            f"algorithm.router_aux_coefficient = {algorithm.router_aux_coefficient} with lora.rank = "
            f"{config.lora.rank}, which leaves the routers as they are; leave one of them out"
        )
    warmup, schedule = config.optimizer.warmup_steps, config.optimizer.schedule
    if schedule != "constant" and warmup >= config.num_optimizer_steps:
        yield (
            f"optimizer.warmup_steps = {warmup} leaves none of the run's {config.num_optimizer_steps} optimizer steps "
            f"to optimizer.schedule = {schedule!r}; lower it, or use optimizer.schedule = 'constant'"
        )
    for key, value in (
        ("algorithm.overlong", algorithm.overlong_buffer),
        # in training the engine has room for rollout.max_new_tokens
        ("evaluation.max_new_tokens", evaluation.max_new_tokens if evaluation.every_steps else 0),
    ):
        if value > rollout.max_new_tokens:
            yield f"{key} = {value} exceeds rollout.max_new_tokens = {rollout.max_new_tokens}; lower it"
    if algorithm.max_refills and (rollout.group_size < 2 or rollout.temperature == 0):
        yield (
            f"algorithm.max_refills = {algorithm.max_refills} with rollout.group_size = {rollout.group_size} and "
            f"rollout.temperature = {rollout.temperature}: the scores of every group are equal; use groups "
            "of 2 or more and a temperature above 0, or leave algorithm.max_refills out"
        )
    if evaluation.every_steps and not evaluation.data_set_sources(config.data):
        yield (
            f"evaluation.every_steps = {evaluation.every_steps} without data to evaluate on; name files in "
            "evaluation.sources"
        )


def truncation_warning(rollout: RolloutSection) -> str:
    """Return a warning for training on responses of a truncated distribution; empty if it is not truncated."""
    named = [
        f"rollout.{key} = {getattr(rollout, key)}"
        for key, off in (("top_k", 0), ("top_p", 1.0))
        if getattr(rollout, key) != off
    ]
    if not named or not rollout.temperature:
        return ""
    return (
        f"{' and '.join(named)}: responses come from a truncated distribution, but the update scores the whole "
        "softmax: its gradient is biased, and algorithm.rollout_correction cannot see it (docs/train.md, Truncated "
        "sampling); leave the truncation out, or lower rollout.temperature instead"
    )


def check_ranks(config: Config, num_ranks: int) -> None:
    """Refuse a rank count that does not divide the step's samples, or that makes no whole replicas.

    Raises:
        ConfigError: with the key and the remedy.
    """
    unit, what = config.rollout.prompts_per_step, "rollout.prompts_per_step"
    if config.rollout.shard == "sample":
        unit, what = config.samples_per_step, "rollout.prompts_per_step x rollout.group_size"
    if unit % num_ranks:
        raise ConfigError(
            f"{what} = {unit} is not divisible by {num_ranks} ranks; "
            f"set it to {max(num_ranks, unit // num_ranks * num_ranks)}, or use another number of ranks"
        )
    check_replicas(config.rollout, num_ranks)


def check_replicas(rollout: RolloutSection, num_ranks: int) -> None:
    """Refuse a rank count that makes no whole replicas.

    Raises:
        ConfigError: with the key and the remedy.
    """
    if num_ranks % rollout.tensor_parallel:
        raise ConfigError(
            f"rollout.tensor_parallel = {rollout.tensor_parallel} does not divide {num_ranks} ranks; set it "
            f"to {math.gcd(num_ranks, rollout.tensor_parallel)}, or use another number of ranks"
        )


def check_sequence_parallel(optimizer: OptimizerSection, num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """Refuse a number of ranks that cannot share a sequence.

    Raises:
        ConfigError: with the key and the remedy.
    """
    size = optimizer.sequence_parallel
    good = [n for n in range(1, num_heads + 1) if not num_heads % n and (not num_kv_heads % n or not n % num_kv_heads)]
    good = [n for n in good if not num_ranks % n]
    if size not in good:
        raise ConfigError(
            f"optimizer.sequence_parallel = {size} does not divide the model's {num_heads} heads and {num_kv_heads} "
            f"key-value heads and the {num_ranks} ranks evenly; use one of {', '.join(map(str, good))}"
        )


def check_model_limits(config: Config, max_positions: int) -> None:
    """Refuse prompts and responses that together exceed the model's positions.

    Raises:
        ConfigError: with the key and the remedy.
    """
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    if prompt + response > max_positions:
        remedy = f"lower rollout.max_new_tokens to {max_positions - prompt} or less"
        if prompt >= max_positions:
            remedy = f"lower data.max_prompt_tokens to {max_positions - response} or less"
            remedy = "lower both" if response >= max_positions else remedy
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {prompt + response} exceeds the model's "
            f"{max_positions} positions; {remedy}"
        )


def check_run_can_learn(config: Config) -> None:
    """Refuse to train if no response can teach anything; comparisons of such runs are useful.

    Raises:
        ConfigError: with the remedy.
    """
    if config.rollout.temperature == 0 and config.algorithm.recipe.advantage in GROUP_ADVANTAGES:
        raise ConfigError(
            f"rollout.temperature = 0.0 makes all responses of a group alike, and algorithm.name = "
            f"{config.algorithm.name!r} learns from their differences; use a temperature above 0"
        )


def config_for_comparison(config: Config) -> Config:
    """The job without evaluations, trackers and rollout correction, for runs that are compared with each other.

    A correction reads the rollout's own probabilities, whose last bits depend on how the text was decoded. The learning
    rate is constant after its warm-up, because such runs have other numbers of steps than the job.
    """
    algorithm = config.algorithm.model_copy(update={"rollout_correction": "none"})
    optimizer = config.optimizer.model_copy(update={"schedule": "constant"})
    evaluation = config.evaluation.model_copy(update={"every_steps": 0})
    run = config.run.model_copy(update={"trackers": ()})
    changes = {"algorithm": algorithm, "optimizer": optimizer, "evaluation": evaluation, "run": run}
    return config.model_copy(update=changes)
