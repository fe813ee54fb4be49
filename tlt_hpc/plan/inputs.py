"""What a run would do: the configuration checked against the files it names, before any rank starts or writes.

A start reads everything with ``read_assets``; preflight calls the same checks one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from tlt_hpc.common.formatting import format_count, format_spans
from tlt_hpc.common.records import ChatFormat, Prompt
from tlt_hpc.config import (
    Config,
    ConfigError,
    ModelSection,
    RewardSection,
    RolloutSection,
    SpeculationSection,
    check_model_limits,
    check_ranks,
    check_sequence_parallel,
    to_toml,
)
from tlt_hpc.data.evaluation_sets import EvaluationSet, longest_prompt_tokens, longest_response_tokens, open_sets
from tlt_hpc.data.prompts import PromptSource, SharedPrompts, open_prompts
from tlt_hpc.models.shape import DRAFTER_SHARDING, ModelShape, check_eagle3_layers, check_sharding, read_shape
from tlt_hpc.models.tokenizer import find_model, load_tokenizer, read_chat_format, tokens_without_text
from tlt_hpc.models.weight_check import check_weights
from tlt_hpc.models.weight_files import end_token_ids, weight_files
from tlt_hpc.rewards.functions import check_functions
from tlt_hpc.rewards.judge import find_prompt_problem
from tlt_hpc.rollout.strategy import parse_strategies

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import NodeGroup


_SHOWN_SPANS = 4


@dataclass(frozen=True)
class ModelAssets:
    """Files of a model that the configuration names, as far as they can be read without loading weights."""

    folder: Path
    shape: ModelShape
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    excluded_token_ids: tuple[int, ...]
    """Those that are never sampled."""

    @property
    def excluded_tokens_text(self) -> str:
        """How many ids are never sampled, and which, the first of them if there are many; empty: all can be."""
        if not self.excluded_token_ids:
            return ""
        spans, number = format_spans(self.excluded_token_ids), len(self.excluded_token_ids)
        shown = ", ".join([*spans[:_SHOWN_SPANS], *(["..."] if len(spans) > _SHOWN_SPANS else [])])
        return f"{number:,} of {format_count(self.shape.vocab_size, 'id')} never sampled: {shown}"


@dataclass(frozen=True)
class Assets(ModelAssets):
    """A model's files, and the prompts that a run draws."""

    prompts: PromptSource


def read_assets(config: Config, num_ranks: int) -> Assets:
    """Read the light files, and check the configuration against them and the rank count.

    Raises:
        ValueError: a file is missing or broken, or a limit is exceeded; nothing has been written.
    """
    check_ranks(config, num_ranks)
    folder = find_model(config.model.path)
    shape = read_shape(folder)
    check_shape(config, shape, num_ranks)
    check_strategies(config.speculation)
    check_reward_functions(config.reward)
    if config.lora.rank:
        weight_files(folder)  # adapters are merged into files of this kind
    tokenizer = load_tokenizer(folder)
    chat = read_chat_format_with_stops(config.rollout, folder, shape, tokenizer)
    prompts = open_prompts(config, tokenizer, chat, partial(find_unanswerable_reason, config.reward, shape))
    ends = check_weights_read_end_tokens(folder, shape)
    excluded = tokens_without_text(folder, tokenizer, shape.vocab_size, ends)
    return Assets(folder, shape, tokenizer, ends, excluded, prompts)


def read_chat_format_with_stops(
    rollout: RolloutSection, folder: Path, shape: ModelShape, tokenizer: Tokenizer
) -> ChatFormat:
    """How the model's folder has a chat written, with the tokens that end a response, stop strings included.

    Raises:
        ValueError: as ``read_chat_format`` and ``end_token_ids``.
    """
    found = map(tokenizer.token_to_id, rollout.stop_strings)
    ends = (*end_token_ids(folder, shape), *(token for token in found if token is not None))
    return replace(read_chat_format(folder), end_token_ids=ends)


def find_unanswerable_reason(reward: RewardSection, shape: ModelShape, prompt: Prompt) -> str:
    """Why no response to the prompt can be right; empty: one can.

    Raises:
        ValueError: as ``check_tokens``, or the prompt's tests cannot be read.
    """
    check_tokens(shape, prompt)
    return find_prompt_problem(reward, prompt)


def check_tokens(shape: ModelShape, prompt: Prompt) -> None:
    """Check that the model has the prompt's tokens.

    Raises:
        ValueError: it has not.
    """
    if (token := int(prompt.tokens.max())) >= shape.vocab_size:
        raise ValueError(
            f"the tokenizer makes a token {token} of it, and the model has 0 to "
            f"{shape.vocab_size - 1} (is tokenizer.json the model's own?)"
        )


def check_weights_read_end_tokens(folder: Path, shape: ModelShape) -> tuple[int, ...]:
    """Hold the heads of the files of weights against config.json; returns the ids of the tokens that end a response.

    Raises:
        ValueError: as ``check_weights`` and ``end_token_ids``.
    """
    check_weights(folder, shape)
    return end_token_ids(folder, shape)


def read_and_broadcast_assets(config: Config, num_ranks: int, node: NodeGroup) -> Assets:
    """``read_assets`` on the node's first rank, for all its ranks; that rank also reads the prompts of every step.

    Collective over the node, as the prompts' ``draw_step_prompts`` and ``draw_refill_prompts`` are.

    Raises:
        ValueError: as ``read_assets``, on all the node's ranks.
    """
    if node.size == 1:
        return read_assets(config, num_ranks)
    found: list[PromptSource] = []

    def read() -> ModelAssets:
        assets = read_assets(config, num_ranks)
        found.append(assets.prompts)
        ids = assets.eos_token_ids, assets.excluded_token_ids
        return ModelAssets(assets.folder, assets.shape, assets.tokenizer, *ids)

    given = node.run_first_and_broadcast(read)
    prompts = SharedPrompts(found[0] if found else None, node.run_first_and_broadcast)
    return Assets(given.folder, given.shape, given.tokenizer, given.eos_token_ids, given.excluded_token_ids, prompts)


def check_reward_functions(reward: RewardSection) -> None:
    """Check the files of the user's reward functions, if there are any, without running them.

    Raises:
        ConfigError: with the key and the remedy.
    """
    try:
        check_functions(reward)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def open_checked_sets(
    config: Config, folder: Path, shape: ModelShape, tokenizer: Tokenizer
) -> tuple[EvaluationSet, ...]:
    """The evaluation's data sets, checked against the model and the reward.

    Raises:
        ValueError: as ``open_sets``, or a response of full length would not fit the model.
    """
    check_reward_functions(config.reward)
    chat = read_chat_format_with_stops(config.rollout, folder, shape, tokenizer)
    sets = open_sets(config, tokenizer, chat, partial(find_unanswerable_reason, config.reward, shape))
    total = longest_prompt_tokens(sets) + longest_response_tokens(config)
    if total > shape.max_positions:
        raise ConfigError(
            f"the longest prompt's {longest_prompt_tokens(sets)} tokens and a response of "
            f"{longest_response_tokens(config)} exceed the model's {shape.max_positions} positions; set "
            f"evaluation.max_new_tokens = {max(1, shape.max_positions - longest_prompt_tokens(sets))} or less"
        )
    return sets


def describe_model(model: ModelSection, assets: ModelAssets) -> list[str]:
    """The lines of a plan that tell of the model."""
    shape = assets.shape
    line = (
        f"model       {model.path}: {shape.family}, {shape.num_layers} layers of width {shape.hidden_size}, "
        f"{shape.num_parameters / 1e6:.1f} M parameters, {model.dtype}"
    )
    return [line, f"tokens      {assets.excluded_tokens_text}"] if assets.excluded_tokens_text else [line]


def describe(config: Config, assets: ModelAssets, num_ranks: int) -> str:
    """A run in words, as ranks and model determine it beside the configuration; then the configuration as TOML."""
    rollout, parallel = config.rollout, config.rollout.tensor_parallel
    lines = [
        f"run         {config.folder}: {format_count(config.run.num_steps, 'step')} on "
        f"{format_count(num_ranks, 'rank')}, seed {config.run.seed}",
        *describe_model(config.model, assets),
        f"rollout     {format_count(rollout.prompts_per_step, 'prompt')} x {rollout.group_size} samples a step; "
        f"{config.samples_per_step // num_ranks} samples a rank, {rollout.max_live} at a time",
        f"replicas    {num_ranks // parallel}, of {format_count(parallel, 'rank')} each",
    ]
    return "\n".join([*lines, "", to_toml(config)])


def check_shape(config: Config, shape: ModelShape, num_ranks: int) -> None:
    """Refuse a model whose positions, heads or layers do not suit the job.

    Raises:
        UserError: with the key and the remedy.
    """
    check_model_limits(config, shape.max_positions)
    check_sharding(shape, config.rollout.tensor_parallel, "rollout.tensor_parallel")
    if config.speculation.has_drafter and config.drafter.init == "random":  # a published one has its own width
        check_sharding(replace(shape, num_experts=0), config.rollout.tensor_parallel, DRAFTER_SHARDING)
        if config.drafter.form == "eagle3":
            check_eagle3_layers(shape, "drafter.form = 'eagle3'")
    check_experts(config, shape, config.model.device)
    check_sequence_parallel(config.optimizer, shape.num_heads, shape.num_kv_heads, num_ranks)


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
    if coefficient and not shape.num_experts:
        raise ConfigError(
            f"algorithm.router_aux_coefficient = {coefficient} with a model of family {shape.family!r}, which has no "
            "router; leave it out"
        )


def check_strategies(speculation: SpeculationSection) -> None:
    """Refuse strategies that do not exist, or that leave nothing to choose from.

    Raises:
        ConfigError: with the key and the remedy.
    """
    mode, names = speculation.mode, speculation.strategies
    try:
        arms = parse_strategies(mode, names)
    except ValueError as error:
        raise ConfigError(f"speculation.strategies: {error}") from None
    if mode != "plain" and len(arms) == 1:
        raise ConfigError(
            f"speculation.strategies = {list(names)} leaves nothing to try in speculation.mode = {mode!r}; "
            "add e.g. 'ngram-4' or use mode 'full'"
        )
