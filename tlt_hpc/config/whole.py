"""The whole of a run's configuration, and what its sections must agree on."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tlt_hpc.config.algorithm import AlgorithmSection, OptimizerSection
from tlt_hpc.config.base import (
    MAX_ITEMS,
    ConfigError,
    FilePath,
    NumBytes,
    NumRanks,
    NumSteps,
    NumTokens,
    PositiveInt,
    Seconds,
    Section,
    Seed,
    Share,
    SomePath,
    Temperature,
    TokenCount,
    Unit,
    zero_or_from,
)
from tlt_hpc.config.data import DataSection, RewardSection, check_data, check_reward
from tlt_hpc.config.drafter import DrafterSection, SpeculationSection, WarmupSection, check_drafter
from tlt_hpc.config.evaluation import EvaluationSection, check_evaluation
from tlt_hpc.config.recipes import GROUP_ADVANTAGES
from tlt_hpc.config.tracking import TrackingSection

EMBEDDED_MODEL = "embedded:tiny"


class RunSection(Section):
    """Name, place and length of a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=128)]
    """Name of the run and of its folder."""
    folder: FilePath = "runs"
    """Parent folder; the run writes to ``folder/name``."""
    seed: Seed = 0
    """Seed of the order of the prompts, of sampling and of new weights."""
    num_steps: NumSteps
    """Length of the run: one step is a rollout and the update from it."""
    ranks: NumRanks = 1
    """MPI ranks that ``tlt`` starts if no launcher (srun, mpiexec) did; a launcher's number takes precedence."""
    stall_factor: Annotated[float, Field(ge=0.0, le=1e5), zero_or_from(0.01, 1e5)] = 1.0
    """Factor on the times after which a rank without progress ends the job (docs/cluster.md). 0: never."""


class ModelSection(Section):
    """The policy."""

    path: SomePath
    """A Hugging Face folder, or ``embedded:tiny``."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of decoding and of forward and backward passes. In ``float32`` near-ties are decided in float64, so
    that the text does not depend on speculation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs. ``auto``: on CUDA if there is a GPU."""


_StopString = Annotated[str, Field(min_length=1, max_length=1024)]


class RolloutSection(Section):
    """The responses of a step and how they are generated."""

    prompts_per_step: Annotated[int, Field(ge=1, le=2**20), Unit("prompts")]
    """Prompts of one step, over all ranks."""
    group_size: Annotated[int, Field(ge=1, le=2**10), Unit("responses")]
    """Responses to each prompt."""
    max_new_tokens: NumTokens
    """Longest response."""
    temperature: Temperature = 1.0
    """Sampling temperature. 0: greedy."""
    top_k: TokenCount = 0
    """Sample among this many most likely tokens. 0: all."""
    top_p: Share = 1.0
    """Sample among the most likely tokens that together have this probability."""
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Sample among tokens with at least this share of the most likely token's probability."""
    min_new_tokens: TokenCount = 0
    """Shortest response: no end token is sampled before."""
    stop_strings: Annotated[tuple[_StopString, ...], Field(strict=False, max_length=MAX_ITEMS)] = ()
    """A response ends with the token that completes one of these strings."""
    max_live: Annotated[int, Field(ge=1, le=2**20), Unit("sequences")] = 64
    """Sequences that one rank decodes at the same time."""
    kv_bytes: NumBytes = 0
    """Memory of one rank for keys, values and features. 0: enough for ``max_live`` responses of full length."""
    page_size: Annotated[int, Field(ge=1, le=2**20), Unit("tokens")] = 128
    """Page size of that memory; flash-attention needs a multiple of 256."""
    shard: Literal["group", "sample"] = "group"
    """How responses are divided among ranks: by whole groups, or by single samples of all groups."""
    tensor_parallel: NumRanks = 1
    """Consecutive ranks of a node that hold one copy of the model for the rollout, each a part of every layer."""

    prefill_tokens: ClassVar[int] = 4096
    """Prompt tokens of one pass, which is then bound by arithmetic; longer prompts are read in chunks between
    rounds."""


class CheckpointSection(Section):
    """What is saved, and how a resumed run uses it."""

    every_steps: NumSteps = 10
    """Interval of checkpoints of policy, optimizer and drafter. The drafter alone is saved after every step."""
    keep: PositiveInt = 2
    """Checkpoints that are kept."""
    replay: bool = True
    """On resume, repeat the updates of logged steps that are newer than the last checkpoint; otherwise these steps are
    generated again."""
    keep_responses_seconds: Seconds = 300.0
    """Interval at which finished responses of the current step are written, for a resume within the step. 0: only at
    the end of the rollout and on a stop signal."""


class Config(Section):
    """The whole of a run's configuration."""

    run: RunSection
    model: ModelSection
    data: DataSection
    reward: RewardSection = RewardSection()
    rollout: RolloutSection
    speculation: SpeculationSection = SpeculationSection()
    drafter: DrafterSection = DrafterSection()
    warmup: WarmupSection = WarmupSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    optimizer: OptimizerSection = OptimizerSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    tracking: TrackingSection = TrackingSection()

    @property
    def samples_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.group_size

    @property
    def tie_guard(self) -> bool:
        """Whether near-ties are decided in float64: in bfloat16 a large share of all tokens would be near-ties."""
        return self.model.dtype == "float32"

    @property
    def folder(self) -> Path:
        return Path(self.run.folder) / self.run.name


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation for name, field in Config.model_fields.items() if isinstance(field.annotation, type)
}
"""The sections by their names."""


def check_ranks(config: Config, num_ranks: int) -> None:
    """Refuse a rank count that the step's samples cannot be divided over, or that makes no whole replicas.

    Raises:
        ConfigError: with the key and the remedy.
    """
    unit, what = config.rollout.prompts_per_step, "rollout.prompts_per_step"
    if config.rollout.shard == "sample":
        unit, what = config.samples_per_step, "rollout.prompts_per_step x rollout.group_size"
    if unit % num_ranks:
        raise ConfigError(
            f"{what} = {unit} is not divisible by {num_ranks} ranks; "
            f"use {max(num_ranks, unit // num_ranks * num_ranks)} or another number of ranks"
        )
    check_replicas(config, num_ranks)


def check_replicas(config: Config, num_ranks: int) -> None:
    """Refuse a rank count that makes no whole replicas.

    Raises:
        ConfigError: with the key and the remedy.
    """
    if num_ranks % config.rollout.tensor_parallel:
        raise ConfigError(
            f"rollout.tensor_parallel = {config.rollout.tensor_parallel} does not divide {num_ranks} ranks; use "
            f"{math.gcd(num_ranks, config.rollout.tensor_parallel)} or another number of ranks"
        )


def refuse_replicas(config: Config, command: str) -> None:
    """Refuse a job of replicas to a command that has no use for them.

    Raises:
        ConfigError: with the remedy.
    """
    if config.rollout.tensor_parallel > 1:
        raise ConfigError(
            f"rollout.tensor_parallel = {config.rollout.tensor_parallel}: {command} decodes with a whole model on "
            "every rank; where it fits, give rollout.tensor_parallel=1"
        )


def check_sequence_parallel(config: Config, num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """Refuse a number of ranks that cannot share a sequence.

    Raises:
        ConfigError: with the key and the remedy.
    """
    size = config.optimizer.sequence_parallel
    good = [n for n in range(1, num_heads + 1) if not num_heads % n and (not num_kv_heads % n or not n % num_kv_heads)]
    if size not in good:
        good = [n for n in good if not num_ranks % n]
        raise ConfigError(
            f"optimizer.sequence_parallel = {size} does not share out the model's {num_heads} heads and {num_kv_heads} "
            f"key-value heads evenly; use one of {', '.join(map(str, good))}"
        )
    if num_ranks % size:
        raise ConfigError(
            f"optimizer.sequence_parallel = {size} does not divide {num_ranks} ranks; use "
            f"{max(n for n in good if not num_ranks % n and n <= size)} or another number of ranks"
        )


def without_side_effects(config: Config) -> Config:
    """The job without evaluations, trackers and rollout correction, for runs that are compared with each other.

    A correction reads the rollout's own probabilities, whose last bits depend on how the text was decoded.
    """
    algorithm = config.algorithm.model_copy(update={"rollout_correction": "none"})
    evaluation = config.evaluation.model_copy(update={"every_steps": 0})
    tracking = config.tracking.model_copy(update={"tensorboard": False, "wandb": "off"})
    return config.model_copy(update={"algorithm": algorithm, "evaluation": evaluation, "tracking": tracking})


def check_model_limits(config: Config, max_positions: int) -> None:
    """Refuse caps that exceed the model's positions.

    Raises:
        ConfigError: with the key and the remedy.
    """
    if config.data.max_prompt_tokens >= max_positions:
        raise ConfigError(
            f"data.max_prompt_tokens = {config.data.max_prompt_tokens} leaves no room for a response in the model's "
            f"{max_positions} positions; lower it"
        )
    total = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if total > max_positions:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {total} exceeds the model's {max_positions} positions; "
            f"lower rollout.max_new_tokens to {max_positions - config.data.max_prompt_tokens} or less"
        )


def check_learns(config: Config) -> None:
    """Refuse to train where no response can teach anything; a comparison of such runs has its use.

    Raises:
        ConfigError: with the remedy.
    """
    if config.rollout.temperature == 0 and config.algorithm.recipe.advantage in GROUP_ADVANTAGES:
        raise ConfigError(
            f"rollout.temperature = 0.0 makes all responses of a group alike, and algorithm.name = "
            f"{config.algorithm.name!r} learns from their differences; use a temperature above 0"
        )


def check_combinations(config: Config) -> None:
    """Refuse what cannot be together.

    Raises:
        ConfigError: of the first such combination, with the remedy.
    """
    for check in _COMBINATIONS:
        check(config)


def find_combinations(config: Config) -> list[ConfigError]:
    """What ``check_combinations`` would refuse: of each of its parts the first."""
    found = []
    for check in _COMBINATIONS:
        try:
            check(config)
        except ConfigError as error:
            found.append(error)
    return found


def _check_samples(config: Config) -> None:
    if config.rollout.group_size < 2 and config.algorithm.recipe.advantage in GROUP_ADVANTAGES:
        raise ConfigError(
            f"rollout.group_size = {config.rollout.group_size} with algorithm.name = {config.algorithm.name!r}, "
            "whose advantage needs a group; use rollout.group_size of 2 or more, or algorithm.name = 'reinforce++'"
        )
    if config.samples_per_step % config.algorithm.updates_per_step:
        raise ConfigError(
            f"algorithm.updates_per_step = {config.algorithm.updates_per_step} does not divide the step's "
            f"{config.samples_per_step} samples; "
            f"use {math.gcd(config.samples_per_step, config.algorithm.updates_per_step)}"
        )


def _check_zero(config: Config) -> None:
    if config.optimizer.zero_stage == 0 and config.model.dtype != "float32":
        raise ConfigError(
            f"optimizer.zero_stage = 0 with model.dtype = {config.model.dtype!r} has no fp32 master weights, so small "
            "updates are lost; use optimizer.zero_stage = 1"
        )
    if config.optimizer.zero_stage == 0 and config.optimizer.offload:
        raise ConfigError("optimizer.offload = true needs sharded state; use optimizer.zero_stage = 1, 2 or 3")
    if config.optimizer.offload_parameters and (config.optimizer.zero_stage < 3 or not config.optimizer.offload):
        raise ConfigError(
            f"optimizer.offload_parameters = true with optimizer.zero_stage = {config.optimizer.zero_stage} and "
            f"optimizer.offload = {str(config.optimizer.offload).lower()}: parameters are shared out at stage 3 alone, "
            "and follow the optimiser's state; use optimizer.zero_stage = 3 and optimizer.offload = true"
        )


def _check_rollout(config: Config) -> None:
    if config.rollout.min_new_tokens > config.rollout.max_new_tokens:
        raise ConfigError(
            f"rollout.min_new_tokens = {config.rollout.min_new_tokens} exceeds rollout.max_new_tokens = "
            f"{config.rollout.max_new_tokens}; lower it"
        )


def _check_distance(config: Config) -> None:
    """What the algorithm takes for the distance from the reference."""
    algorithm, recipe = config.algorithm, config.algorithm.recipe
    if algorithm.kl_coefficient and algorithm.kl_in == "reward" and recipe.advantage == "group":
        raise ConfigError(
            "algorithm.kl_estimator = 'k1', which is part of the reward, with algorithm.advantage = 'group', which "
            "divides by the group's deviation: where the answers are all right or all wrong only the divergence is "
            "left, however small its coefficient; use algorithm.kl_estimator = 'k3', or another advantage"
        )


def _check_algorithm(config: Config) -> None:
    algorithm, recipe = config.algorithm, config.algorithm.recipe
    if recipe.clip_low > 1:
        raise ConfigError(
            f"algorithm.clip_low = {recipe.clip_low}: a ratio is never below 0, so a bound below it is none; use "
            "1.0 for none"
        )
    _check_distance(config)
    if algorithm.max_refills and recipe.advantage == "batch":
        raise ConfigError(
            f"algorithm.max_refills = {algorithm.max_refills} with algorithm.advantage = 'batch', by which groups of "
            "equal scores teach too; use an advantage by group, or leave algorithm.max_refills out"
        )
    if algorithm.max_refills and (config.rollout.group_size < 2 or config.rollout.temperature == 0):
        raise ConfigError(
            f"algorithm.max_refills = {algorithm.max_refills} with rollout.group_size = {config.rollout.group_size} "
            f"and rollout.temperature = {config.rollout.temperature}: the scores of every group are equal; use groups "
            "of 2 or more and a temperature above 0, or leave algorithm.max_refills out"
        )
    if algorithm.overlong_buffer > config.rollout.max_new_tokens:
        raise ConfigError(
            f"algorithm.overlong_buffer = {algorithm.overlong_buffer} is more than rollout.max_new_tokens = "
            f"{config.rollout.max_new_tokens}; lower it"
        )


_COMBINATIONS: tuple[Callable[[Config], None], ...] = (
    _check_samples,
    _check_zero,
    _check_rollout,
    _check_algorithm,
    lambda config: check_drafter(config.drafter),
    lambda config: check_data(config.data),
    lambda config: check_reward(config.reward),
    lambda config: check_evaluation(config.evaluation, config.data, config.rollout.max_new_tokens),
)
