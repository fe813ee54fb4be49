"""What a run would do: the configuration held against the files it names, before any rank starts or writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from tlt_hpc.common.words import count
from tlt_hpc.config import (
    Config,
    ConfigError,
    check_model_limits,
    check_ranks,
    check_sequence_parallel,
    to_toml,
)
from tlt_hpc.data.evaluation_sets import EvaluationSets, longest_response, open_sets
from tlt_hpc.data.once import ReadOnce
from tlt_hpc.data.prompts import PromptSource, open_prompts
from tlt_hpc.models.folder import check_weights, end_token_ids, find_model, load_tokenizer
from tlt_hpc.models.shape import ModelShape, check_sharding, read_shape
from tlt_hpc.models.tokenizer import read_chat_format
from tlt_hpc.rewards.functions import check_function
from tlt_hpc.rollout.strategy import strategies_of

if TYPE_CHECKING:
    from tlt_hpc.mpi.node import NodeGroup


@dataclass(frozen=True)
class ModelAssets:
    """What the configuration names of a model, as far as it can be read without loading weights."""

    folder: Path
    shape: ModelShape
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Assets(ModelAssets):
    """And the prompts that a run draws."""

    prompts: PromptSource


def read_assets(config: Config, num_ranks: int) -> Assets:
    """Read the light files, and check the configuration against them and the rank count.

    Raises:
        ValueError: a file is missing or broken, or a limit is exceeded; nothing has been written.
    """
    check_ranks(config, num_ranks)
    folder = find_model(config.model.path)
    shape = read_shape(folder)
    check_model_limits(config, shape.max_positions)
    check_division(config, shape)
    check_sequence_parallel(config, shape.num_heads, shape.num_kv_heads, num_ranks)
    check_strategies(config)
    if config.reward.function:
        _check_reward_function(config)
    tokenizer = load_tokenizer(folder)
    prompts = open_prompts(config, tokenizer, read_chat_format(folder))
    check_weights(folder, shape)
    return Assets(folder, shape, tokenizer, end_token_ids(folder, shape), prompts)


def read_assets_once(config: Config, num_ranks: int, node: NodeGroup) -> Assets:
    """``read_assets`` on the node's first rank, for all its ranks; prompts are read there at every step, too.

    Collective over the node, as the prompts' ``batch`` and ``refill`` are.

    Raises:
        ValueError: as ``read_assets``, on all the node's ranks.
    """
    if node.size == 1:
        return read_assets(config, num_ranks)
    found: list[PromptSource] = []

    def read() -> tuple[ModelAssets, str]:
        assets = read_assets(config, num_ranks)
        found.append(assets.prompts)
        return ModelAssets(assets.folder, assets.shape, assets.tokenizer, assets.eos_token_ids), assets.prompts.warning

    given, warning = node.once(read)
    prompts = ReadOnce(found[0] if found else None, warning, node.once)
    return Assets(given.folder, given.shape, given.tokenizer, given.eos_token_ids, prompts)


def check_division(config: Config, shape: ModelShape) -> None:
    """Refuse a model that cannot be divided over a replica's ranks.

    Raises:
        ConfigError: with the key and the remedy.
    """
    try:
        check_sharding(shape, config.rollout.tensor_parallel, "rollout.tensor_parallel")
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_reward_function(config: Config) -> None:
    try:
        check_function(config.reward.function)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_strategies(config: Config) -> None:
    """Refuse strategies that cannot be, or leave nothing to choose from.

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
    if mode == "full" and config.drafter.schedule == "falling" and not any(arm.has_drafter for arm in arms):
        raise ConfigError(
            "drafter.schedule = 'falling' judges the learned drafter's rounds, and speculation.strategies = "
            f"{list(names)} has none of them; add e.g. 'drafter-4' or use drafter.schedule = 'always'"
        )


def describe(config: Config, shape: ModelShape, num_ranks: int) -> str:
    """The plan in words, then the resolved configuration as TOML."""
    rollout, algorithm, recipe = config.rollout, config.algorithm, config.algorithm.recipe
    lines = [
        f"run         {config.folder}: {count(config.run.num_steps, 'step')} on {count(num_ranks, 'rank')}, "
        f"seed {config.run.seed}",
        f"model       {config.model.path}: {shape.family}, {shape.num_layers} layers of width {shape.hidden_size}, "
        f"{shape.num_parameters / 1e6:.1f} M parameters, {config.model.dtype}",
        f"data        {config.data.source_name}, prompts of at most {count(config.data.max_prompt_tokens, 'token')}",
        f"rollout     {count(rollout.prompts_per_step, 'prompt')} x {rollout.group_size} samples a step, at most "
        f"{count(rollout.max_new_tokens, 'token')}, temperature {rollout.temperature}; "
        f"{config.samples_per_step // num_ranks} samples a rank, {rollout.max_live} at a time",
        f"replicas    {num_ranks // rollout.tensor_parallel} x {rollout.tensor_parallel}: "
        f"{_replica_in_words(config, shape)}",
        f"speculation {config.speculation.mode}, off, {', '.join(config.speculation.strategies)}; "
        f"drafter from {config.drafter.init}",
        f"update      {algorithm.name}: advantage {recipe.advantage}, {recipe.loss} {recipe.clip_low} and "
        f"{recipe.clip_high}, {recipe.aggregation}; {algorithm.updates_per_step} optimiser steps a step"
        f"{', where no ratio reaches a bound' if algorithm.updates_per_step == 1 else ''}, "
        f"learning rate {config.optimizer.learning_rate}, ZeRO {config.optimizer.zero_stage}",
        f"checkpoint  every {count(config.checkpoint.every_steps, 'step')}, the last {config.checkpoint.keep} kept",
    ]
    return "\n".join([*lines, "", to_toml(config)])


def _replica_in_words(config: Config, shape: ModelShape) -> str:
    size = config.rollout.tensor_parallel
    if size == 1:
        return "every rank decodes with a whole model"
    heads, kv_heads = shape.num_heads // size, max(1, shape.num_kv_heads // size)
    return (
        f"{count(size, 'rank')} decode together, each with {heads} of {shape.num_heads} heads, {kv_heads} of "
        f"{shape.num_kv_heads} key-value heads and 1/{size} of the MLP"
    )


def open_checked_sets(config: Config, folder: Path, shape: ModelShape, tokenizer: Tokenizer) -> EvaluationSets:
    """The data sets, held against the model and the reward.

    Raises:
        ValueError: as ``open_sets``, or a response of full length would not fit the model.
    """
    if config.reward.function:
        try:
            check_function(config.reward.function)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    sets = open_sets(config, tokenizer, read_chat_format(folder))
    total = sets.longest_prompt + longest_response(config)
    if total > shape.max_positions:
        raise ConfigError(
            f"the longest prompt's {sets.longest_prompt} tokens and a response of {longest_response(config)} exceed "
            f"the model's {shape.max_positions} positions; set evaluation.max_new_tokens = "
            f"{max(1, shape.max_positions - sets.longest_prompt)} or less"
        )
    return sets
