"""Every section and key of a run's configuration, in the order of docs/configuration.md.

The text below a key is its meaning in ``tlt keys`` and in docs/configuration.md. Every number is bounded on both sides
and every text in length, with room beyond what is known to be useful.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

from tlt_hpc.common.errors import UserError as UserError
from tlt_hpc.config.recipes import (
    CORRECTION_BOUNDS,
    RECIPES,
    AggregationName,
    AlgorithmName,
    Correction,
    CorrectionName,
    KLName,
    Recipe,
)

MAX_COUNT = 2**31 - 1
"""Largest number of ranks, steps, prompts and tokens: MPI and the logs count them in 32 bits."""
MAX_ITEMS = 10_000
"""Longest list or table."""
MAX_SECONDS = 1e9
"""Thirty years: in effect no limit, and still within what the system's timers accept."""
MAX_WEIGHT = 1e6
"""Largest weight of a term of a loss or a reward: sums of a step's terms stay finite in float32."""
MIN_TEMPERATURE = 1e-3
"""Below it sampling takes the likeliest token, as 0 does, and logits divided by it leave the range of float32."""
MAX_PATH_BYTES = 4095
"""Linux's limit."""


@dataclass(frozen=True)
class Unit:
    """The unit of a key, as ``tlt keys`` and docs/configuration.md print it."""

    name: str


def check_path(path: str) -> str:
    """Return the path; refuse a NUL character, which no file name can have."""
    if "\0" in path:
        raise PydanticCustomError("path", "no file has a NUL character in its name; leave it out")
    return path


def _check_label(label: str) -> str:
    if not label.isprintable():
        raise PydanticCustomError("label", "control characters cannot be shown; leave them out")
    return label


def zero_or_from(least: float, most: float) -> AfterValidator:
    """Refuse a number between 0, which has a meaning of its own, and ``least``."""

    def check(value: float) -> float:
        if 0 < value < least:
            raise PydanticCustomError("small", f"use 0, or a number from {least:g} to {most:g}")
        return value

    return AfterValidator(check)


PositiveInt = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
NumTokens = Annotated[PositiveInt, Unit("tokens")]
TokenCount = Annotated[Count, Unit("tokens")]
NumSteps = Annotated[PositiveInt, Unit("steps")]
StepCount = Annotated[Count, Unit("steps")]
NumBytes = Annotated[int, Field(ge=0, le=2**50), Unit("bytes")]
"""At most a pebibyte, more than a node has of memory or disk."""
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
NumRanks = Annotated[int, Field(ge=1, le=2**20), Unit("ranks")]
"""At most more ranks than any machine has."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Weight = Annotated[float, Field(ge=0.0, le=MAX_WEIGHT)]
Temperature = Annotated[float, Field(ge=0.0, le=100.0), zero_or_from(MIN_TEMPERATURE, 100)]
LearningRate = Annotated[float, Field(ge=1e-15, le=1.0)]
"""A step of Adam changes a weight by about this much: below the range float32 keeps no change, above it no weight."""
Seconds = Annotated[float, Field(ge=0.0, le=MAX_SECONDS), Unit("s")]
PositiveSeconds = Annotated[float, Field(ge=1e-3, le=MAX_SECONDS), Unit("s")]

FilePath = Annotated[str, Field(max_length=MAX_PATH_BYTES), AfterValidator(check_path)]
SomePath = Annotated[str, Field(min_length=1, max_length=MAX_PATH_BYTES), AfterValidator(check_path)]
SomeLabel = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_check_label)]
"""A name that is shown."""
ColumnName = Annotated[str, Field(max_length=1024)]
Text = Annotated[str, Field(max_length=100_000)]
"""A fixed part of a prompt."""


class ConfigError(UserError):
    """A user's mistake in the configuration; its text is one line with the remedy."""


class Section(BaseModel):
    """A section of the configuration: frozen, strict about unknown keys, without NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    def problems(self) -> Iterator[str]:
        """Values of the section that contradict each other, each as one line with the remedy."""
        return iter(())


EMBEDDED_MODEL = "embedded:tiny"
EMBEDDED_TASK = "embedded:gcd"
TASK_PREFIX = "reasoning-gym:"


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
    """Precision of weights and of forward and backward passes. On a CPU rollouts compute in float32 all the same."""
    batch_invariant: bool = True
    """In ``bfloat16`` on a GPU: rollouts compute each token by kernels whose result does not depend on the rest of the
    batch, so that the text does not depend on speculation. Off, libraries are used, which are faster; rounding then
    decides between nearly equal tokens."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs. ``auto``: on CUDA if there is a GPU."""


def _as_source(value: object) -> object:
    """A path, or a list of them as TOML has it."""
    paths = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not paths or not all(isinstance(path, str) and path for path in paths):
        raise PydanticCustomError("source", "give a file, a folder, a pattern or a task, or a list of files")
    for path in paths:  # here, because pydantic would report a mistake once for each member of the union
        check_path(path)
    return value if isinstance(value, str) else paths


class DataSection(Section):
    """The prompts that a run trains on."""

    source: Annotated[
        SomePath | Annotated[tuple[SomePath, ...], Field(max_length=MAX_ITEMS)], BeforeValidator(_as_source)
    ]
    """Where prompts come from: ``embedded:gcd``; a .jsonl, .parquet or .arrow file, a list of files, or a pattern such
    as ``data/*.parquet``; a folder as the Hugging Face hub or ``datasets`` stores it; or ``reasoning-gym:NAME``. ``~``
    and ``$NAME`` are expanded."""
    split: SomeLabel = "train"
    """Split to read from a folder that has several."""
    prompt_key: ColumnName = ""
    """Column of the prompt, a text or a list of messages; dots select a field within a column (``input.text``). Empty:
    the first that exists of ``prompt``, ``problem``, ``question``, ``messages``."""
    answer_key: ColumnName = ""
    """Column of the answer. Empty: the first that exists of ``reward_model.ground_truth``, ``answer``,
    ``ground_truth``."""
    max_prompt_tokens: NumTokens = 1024
    """Longest prompt."""
    overlong: Literal["error", "drop"] = "error"
    """What happens to prompts longer than ``max_prompt_tokens``."""
    chat_template: SomePath = "auto"
    """Jinja file that renders lists of messages. ``auto``: the template of the model folder."""
    system_prompt: Text = ""
    """System message for prompts that are lists of messages without one."""
    text_prompts: Literal["raw", "chat"] = "raw"
    """How a prompt that is a text is passed to the model: ``raw`` unchanged, ``chat`` rendered as a user's message."""
    task_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of a ``reasoning-gym`` task, such as ``{max_digits = 3}``; ``size``: number of problems (10,000)."""

    @property
    def source_name(self) -> str:
        """The source as messages show it."""
        return self.source if isinstance(self.source, str) else ", ".join(self.source)

    def problems(self) -> Iterator[str]:
        if self.task_args and not self.source_name.startswith(TASK_PREFIX):
            yield (
                f"data.task_args = {self.task_args!r} has no effect with data.source = {self.source_name!r}; "
                f"use data.source = '{TASK_PREFIX}NAME' or leave data.task_args out"
            )


TagName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=64)]
RewardKind = Literal["boxed", "math", "numeric", "choice", "format", "code", "function"]


class RewardSection(Section):
    """How responses are scored."""

    default: RewardKind = "boxed"
    """How responses are scored (docs/rewards.md) whose ``data_source`` is not in ``by_source``: ``boxed`` answers equal
    as text, ``math`` mathematically equal, ``numeric`` within ``tolerance``, ``choice`` the same letter, ``format`` as
    required, ``code`` by its unit tests, ``function`` by your own."""
    by_source: Annotated[dict[ColumnName, RewardKind], Field(max_length=MAX_ITEMS)] = Field(default_factory=dict)
    """Kind of reward by ``data_source``; names may contain ``*``, ``?`` and ``[]``. An exact name takes precedence,
    then the first pattern that matches."""
    function: FilePath = ""
    """``path.py:name`` of a function with verl's signature (data_source, solution_str, ground_truth, extra_info) that
    returns a number, or a dict with a number under ``score``."""
    tolerance: Annotated[float, Field(ge=0.0, le=1000.0)] = 1e-6
    """Tolerance of ``numeric``: relative to the answer, absolute for answers below 1."""
    format_tags: Annotated[tuple[TagName, ...], Field(strict=False, max_length=64)] = ()
    """Required format: the response consists of these tags, each once and in this order, as in
    ``<a>...</a><b>...</b>``."""
    format_weight: Fraction = 0.0
    """Share of the format in rewards of the other kinds: (1 - weight) x reward + weight x format."""
    workers: Annotated[int, Field(ge=1, le=1024), Unit("processes")] = 2
    """Responses that a rank scores at the same time, each in a process of its own. ``boxed``, ``numeric``, ``choice``
    and tags are scored in the rank itself."""
    cpu_seconds: PositiveSeconds = 5.0
    """CPU time for one response; beyond it the reward is 0. Wall-clock time is limited to 60 times this value."""
    memory_mb: Annotated[int, Field(ge=1, le=2**24), Unit("MiB")] = 1024
    """Memory for one response, in addition to that of an idle worker; beyond it the reward is 0."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """All kinds that responses may be scored by, sorted."""
        return tuple(sorted({self.default, *self.by_source.values()}))

    @property
    def wall_seconds(self) -> float:
        """Limit for what uses no CPU time, such as a function that waits; far out, so that load decides no verdict."""
        return min(60 * self.cpu_seconds, MAX_SECONDS)

    def problems(self) -> Iterator[str]:
        if self.function and "function" not in self.kinds:
            yield (
                f"reward.function = {self.function!r} judges nothing; set reward.default = 'function', or name "
                "sources in reward.by_source"
            )
        if "function" in self.kinds and not re.fullmatch(r".+\.py:[A-Za-z_]\w*", self.function):
            yield (
                f"reward.function = {self.function!r} names no function for the kind 'function'; "
                "give one as 'path.py:name'"
            )
        if len(set(self.format_tags)) < len(self.format_tags):
            yield f"reward.format_tags = {list(self.format_tags)} names a tag twice; name each tag once"
        if bool(self.format_tags) != ("format" in self.kinds or self.format_weight > 0):
            yield (
                f"reward.format_tags = {list(self.format_tags)} with reward.format_weight = {self.format_weight}: tags "
                "and their use need each other; set format_tags, and format_weight above 0 or the kind 'format'"
            )


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
    """Page size of that memory."""
    shard: Literal["group", "sample"] = "group"
    """How responses are divided among ranks: by whole groups, or by single samples of all groups."""
    tensor_parallel: NumRanks = 1
    """Consecutive ranks of a node that hold one copy of the model for the rollout, each a part of every layer."""

    prefill_tokens: ClassVar[int] = 4096
    """Prompt tokens of one pass, which is then bound by arithmetic; longer prompts are read in chunks between
    rounds."""


LossKind = Literal["feature", "cross-entropy", "total-variation"]
_StrategyName = Annotated[str, Field(min_length=1, max_length=64)]
_STRATEGIES = ("ngram-4", "drafter-2", "drafter-4", "drafter-8")


class SpeculationSection(Section):
    """Speculative decoding of rollouts; it changes their speed, not their text."""

    mode: Literal["plain", "ngram", "full"] = "full"
    """``plain``: no speculation; ``ngram``: n-gram drafts only; ``full``: n-grams and the learned drafter, which is
    trained in the tail."""
    strategies: Annotated[tuple[_StrategyName, ...], Field(strict=False, min_length=1, max_length=64)] = _STRATEGIES
    """Strategies to choose from each round, in addition to ``off``. A chain is source-depth (``drafter-6``); a tree
    adds ``x`` with the branching and ``v`` with the number of drafts to verify (``drafter-5x2v9``); ``a`` adds the
    drafter's sharpness (``drafter-4a1.5``). Sources: ``ngram``, ``drafter``."""
    ahead: Literal["auto", "on", "off"] = "auto"
    """Let idle ranks, once training the drafter pays no more, generate the next step's responses ahead; their texts are
    drafts then. ``auto``: as long as enough of these drafts are accepted, and not where ranks outnumber the cores of a
    node. A single replica never waits, so it generates nothing ahead."""


class DrafterSection(Section):
    """The learned drafter and its training on idle ranks."""

    form: Literal["eagle", "eagle3"] = "eagle"
    """Architecture. ``eagle``: one layer on the last hidden state, with the policy's head, trained one step ahead;
    ``eagle3``: one layer on the features of three layers, with a head of its own over a smaller vocabulary, trained
    seven steps ahead."""
    init: SomePath = "random"
    """Initial weights: ``random``, ``embedded:tiny``, or the drafter folder of an earlier run."""
    vocabulary: NumTokens = 32768
    """Most tokens that drafts are chosen from: end tokens, added tokens, and those that are most frequent in prompts
    and answers of the first 64 steps. ``eagle3``: the size of a new drafter's own head (``tlt warmup`` counts
    responses); ``eagle``: a draft reads so many rows of the policy's head. The text stays the same, but fewer drafts
    may be accepted."""
    learning_rate: LearningRate = 1e-3
    """Learning rate of AdamW, constant."""
    loss: Literal["auto", "feature", "cross-entropy", "total-variation"] = "auto"
    """``feature``: smooth L1 on features plus 0.1 times the soft cross-entropy (``auto`` for ``eagle``);
    ``cross-entropy``: soft cross-entropy on the draft vocabulary (``auto`` for ``eagle3``); ``total-variation``: minus
    the acceptance probability, sum of min(p, q)."""
    micro_step_tokens: NumTokens = 2048
    """Most tokens of one micro-step; the time limit may make it smaller."""
    micro_step_seconds: PositiveSeconds = 0.2
    """Longest micro-step, and so the longest that training may delay the end of a rollout."""
    average_merges: PositiveInt = 5
    """The engine drafts with a running average of the drafter's weights over about this many merges, which tolerates a
    learning rate that is too high. 1: with the last weights."""
    min_idle: NumRanks = 1
    """Ranks that must be idle before any of them trains."""
    train: bool = True
    """Train the drafter; otherwise it keeps its initial weights."""
    cache_bytes: Annotated[NumBytes, Field(ge=1)] = 2_000_000_000
    """Disk space for one rank's training features: half for the current step, half for the one before."""
    cache_folder: FilePath = ""
    """Folder for these features on each node, such as ``$TMPDIR`` (expanded there). Ranks then train on the features of
    their own node only. Empty: in the run's folder, where all ranks read all features."""

    @property
    def loss_kind(self) -> LossKind:
        """The configured loss, or the one that ``auto`` stands for."""
        if self.loss != "auto":
            return self.loss
        return "feature" if self.form == "eagle" else "cross-entropy"

    @property
    def num_unrolled(self) -> int:
        """Steps ahead that the drafter is trained on its own predictions: EAGLE 1, EAGLE-3 7 (its training-time
        test)."""
        return 1 if self.form == "eagle" else 7

    def problems(self) -> Iterator[str]:
        if self.form == "eagle3" and self.loss == "feature":
            yield (
                "drafter.loss = 'feature' with drafter.form = 'eagle3', whose states are no features of the target; "
                "use drafter.loss = 'cross-entropy' or 'total-variation'"
            )


class WarmupSection(Section):
    """``tlt warmup``, which trains the drafter before reinforcement learning; ``tlt train`` does not read it."""

    init: SomePath = "random"
    """Initial weights of the drafter, as in ``drafter.init``."""
    sources: Annotated[tuple[FilePath, ...], Field(strict=False, max_length=MAX_ITEMS)] = ()
    """Run folders whose logged responses are trained on, newest first (``--from``). Empty: responses are generated."""
    responses: PositiveInt = 4096
    """Most responses to generate, one per prompt, or to read from the logs; ``drafter.cache_bytes`` limits them too."""
    updates: PositiveInt = 2000
    """Most optimizer steps; the learning rate falls to 0 over them. The warm-up ends earlier after eight validations
    without a new best."""
    batch_tokens: NumTokens = 8192
    """Response tokens of one update over all ranks; a single longer response exceeds it."""
    learning_rate: LearningRate = 1e-3
    """Highest learning rate: reached after 50 updates, followed by a cosine."""
    validate_every: Annotated[PositiveInt, Unit("updates")] = 100
    """Interval at which the accept length is measured and the training saved."""
    validation_prompts: Annotated[PositiveInt, Unit("prompts")] = 64
    """Prompts held out from the training; at most a fifth of all."""

    validation_tokens: ClassVar[int] = 512
    """Longest validation response: the accept length changes little beyond."""
    patience: ClassVar[int] = 8
    """Validations without a new best that end the warm-up: it has converged, or diverged."""
    ramp_updates: ClassVar[int] = 50
    """Updates in which the learning rate rises, while Adam's moments are formed."""


def _number_or_auto(value: object) -> object:
    if value == "auto" or (isinstance(value, int | float) and 0 <= value <= MAX_WEIGHT and not isinstance(value, bool)):
        return value
    raise ValueError(f"use a number from 0 to {MAX_WEIGHT:g}, or 'auto'")


def _switch_or_auto(value: object) -> object:
    if isinstance(value, bool) or value == "auto":
        return value
    raise ValueError("use true, false or 'auto'")


Bound = Annotated[Weight | Literal["auto"], BeforeValidator(_number_or_auto)]


class AlgorithmSection(Section):
    """The objective of the policy. A part that is ``auto`` follows from the algorithm's name; the configuration saved
    with a run has every ``auto`` replaced."""

    name: AlgorithmName = "grpo"
    """The algorithm: how a response's advantage is computed and how the probability ratio of new to old policy is
    clipped (docs/train.md), with its ``aggregation``, ``clip_low`` and ``clip_high``."""
    aggregation: Literal["auto", AggregationName] = "auto"
    """How token losses are combined into the step's loss; ``-norm`` divides by ``rollout.max_new_tokens``."""
    clip_low: Bound = "auto"
    """The ratio is clipped below 1 minus this value."""
    clip_high: Bound = "auto"
    """The ratio is clipped above 1 plus this value."""
    kl_coefficient: Weight = 0.0
    """Weight of the KL divergence from the reference model. 0: no reference model is kept."""
    kl_estimator: KLName = "k3"
    """Estimator of the KL divergence, and where it is applied. ``k1`` is summed over a response and subtracted from its
    reward; ``k2`` and ``k3`` are added to each token's loss."""
    entropy_coefficient: Weight = 0.0
    """Weight of the entropy bonus, which is subtracted from each token's loss."""
    overlong_buffer: TokenCount = 0
    """Soft length penalty (DAPO): over the last this many of ``rollout.max_new_tokens`` the reward falls linearly by up
    to 1. 0: no penalty."""
    rollout_correction: CorrectionName = "none"
    """Correction for the ratio between the probabilities of rollout engine and trainer: ``tis`` multiplies a token's
    loss by it, truncated at 2; ``mis`` leaves out tokens above 2, ``icepop`` those below 0.5 or above 5. The policy
    then depends on the last bits of the rollout's probabilities."""
    max_refills: Count = 0
    """Dynamic sampling (DAPO): groups whose scores are all equal have no gradient, and are replaced by groups of
    further prompts in at most this many additional rollouts of a step. 0: off."""
    updates_per_step: PositiveInt = 1
    """Optimizer steps per step; each uses an equal part of the step's responses."""

    @property
    def recipe(self) -> Recipe:
        """The named algorithm's parts, with those that are set replaced."""
        return RECIPES[self.name].replaced(self.aggregation, self.clip_low, self.clip_high)

    @property
    def kl_in(self) -> Literal["loss", "reward"]:
        """Where the divergence is applied: k1 has the right gradient only in the reward, k2 and k3 only in the loss."""
        return "reward" if self.kl_estimator == "k1" else "loss"

    @property
    def correction(self) -> Correction:
        """The correction of the rollout's probabilities, with its bounds."""
        return Correction(self.rollout_correction, *CORRECTION_BOUNDS[self.rollout_correction])

    def resolved(self) -> AlgorithmSection:
        """The same with every ``auto`` replaced, so that a later version's recipes cannot change it."""
        recipe = self.recipe
        parts = {"aggregation": recipe.aggregation, "clip_low": recipe.clip_low, "clip_high": recipe.clip_high}
        return self.model_copy(update=parts)

    def problems(self) -> Iterator[str]:
        if self.recipe.clip_low > 1:
            yield f"algorithm.clip_low = {self.recipe.clip_low}: a ratio is never below 0; use at most 1.0"
        if self.kl_coefficient and self.kl_in == "reward" and self.recipe.advantage == "group":
            yield (
                f"algorithm.kl_estimator = 'k1', a part of the reward, with algorithm.name = {self.name!r}, which "
                "divides rewards by the group's deviation: in groups of equal scores only the divergence is left; use "
                "algorithm.kl_estimator = 'k3', or another algorithm"
            )
        if self.max_refills and self.recipe.advantage == "batch":
            yield (
                f"algorithm.max_refills = {self.max_refills} with algorithm.name = {self.name!r}, which learns from "
                "groups of equal scores too; use another algorithm, or leave algorithm.max_refills out"
            )


class OptimizerSection(Section):
    """AdamW of the policy, with betas of 0.9 and 0.999, and how its work is spread over ranks and memory."""

    learning_rate: LearningRate = 1e-6
    """Learning rate, constant after the warm-up."""
    weight_decay: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(ge=0.0, le=1e9), zero_or_from(1e-6, 1e9)] = 1.0
    """Gradients are scaled down to this norm. 0: no clipping."""
    warmup_steps: Count = 0
    """Optimizer steps over which the learning rate rises linearly."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """What DeepSpeed ZeRO shards over the ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    offload: bool = False
    """Keep the optimizer state in host memory; needs ``zero_stage`` 1 or higher."""
    offload_parameters: bool = False
    """Also keep each rank's shard of the parameters in host memory; needs ``zero_stage = 3``, ``offload = true`` and
    CUDA."""
    micro_batch_tokens: NumTokens = 8192
    """Tokens of one forward and backward pass, on one rank or on the ranks that share a sequence. A single longer
    sequence exceeds it."""
    sequence_parallel: NumRanks = 1
    """Consecutive ranks that share a micro-batch (DeepSpeed-Ulysses), if a response's activations do not fit a GPU."""
    gradient_checkpointing: Annotated[bool | Literal["auto"], BeforeValidator(_switch_or_auto)] = "auto"
    """Keep one hidden state per layer and token, and recompute the rest in the backward pass: a third more time for a
    fraction of the memory. ``auto``: on for CUDA."""

    def repeats_layers(self, device: str) -> bool:
        """Whether the backward pass computes each layer again, on a device of type ``cpu`` or ``cuda``."""
        return device == "cuda" if self.gradient_checkpointing == "auto" else self.gradient_checkpointing

    def problems(self) -> Iterator[str]:
        if self.offload and self.zero_stage == 0:
            yield "optimizer.offload = true needs sharded state; use optimizer.zero_stage = 1, 2 or 3"
        if self.offload_parameters and (self.zero_stage < 3 or not self.offload):
            yield (
                f"optimizer.offload_parameters = true with optimizer.zero_stage = {self.zero_stage} and "
                f"optimizer.offload = {str(self.offload).lower()}: only stage 3 shards parameters, and they follow the "
                "optimizer's state; use optimizer.zero_stage = 3 and optimizer.offload = true"
            )


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


class EvaluationSection(Section):
    """``tlt evaluate``, and evaluations between the steps of ``tlt train``."""

    sources: Annotated[tuple[SomePath, ...], Field(strict=False, max_length=MAX_ITEMS)] = ()
    """Data sets: files, patterns, folders or tasks as in ``data.source``, read with the other keys of ``data``. Each is
    called after its file. Empty: the held-out split of the embedded task, if the run trains on that."""
    split: SomeLabel = "test"
    """Split to read from folders that have several."""
    limit: Annotated[Count, Unit("prompts")] = 0
    """Prompts drawn from each data set. 0: all; 256 of the embedded task."""
    samples: Annotated[int, Field(ge=0, le=10**6)] = 8
    """Sampled answers to each prompt, beside a greedy one, for mean@N, maj@N and pass@k (k = 2, 4, 8, ... and N)."""
    temperature: Temperature = 0.6
    """Temperature of the sampled answers."""
    top_p: Share = 0.95
    """Nucleus of the sampled answers."""
    max_new_tokens: TokenCount = 0
    """Longest answer. 0: ``rollout.max_new_tokens``."""
    every_steps: StepCount = 0
    """Evaluate every this many training steps and at the end. 0: never."""

    seed: ClassVar[int] = 0
    """Seed of the sampled answers and of ``limit``: the same for all runs, so that their figures can be compared."""

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k, ascending."""
        powers = {2**i for i in range(1, self.samples.bit_length())}
        return tuple(sorted(powers | ({self.samples} if self.samples > 1 else set())))

    def set_sources(self, data: DataSection) -> tuple[str, ...]:
        """The data sets; by default the embedded task's, if the run trains on it."""
        return self.sources or ((EMBEDDED_TASK,) if data.source == EMBEDDED_TASK else ())

    def problems(self) -> Iterator[str]:
        if self.samples and self.temperature == 0:
            yield (
                f"evaluation.temperature = 0 repeats the greedy answer evaluation.samples = {self.samples} times; use "
                "evaluation.samples = 0"
            )


class TrackingSection(Section):
    """Trackers that receive what ``metrics.jsonl`` holds."""

    tensorboard: bool = False
    """Write event files to the run's ``tensorboard`` folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases. ``offline`` writes files to the run's ``wandb`` folder, for ``wandb sync``; ``online`` needs a
    network on the node of rank 0, and a login. Project, group and name are those of the environment variables
    ``WANDB_PROJECT`` (default ``tlt``), ``WANDB_RUN_GROUP`` and ``WANDB_NAME`` (default ``run.name``)."""

    mlflow: bool = False
    """Write an MLflow run to the run's ``mlruns`` folder, or to the server that the environment variable
    ``MLFLOW_TRACKING_URI`` names. The experiment is ``MLFLOW_EXPERIMENT_NAME`` (default ``tlt``)."""
    trackio: bool = False
    """Write a trackio database to the run's ``trackio`` folder, for ``trackio show``; nothing is sent anywhere."""

    @property
    def packages(self) -> dict[str, str]:
        """The packages of the configured trackers, each with the key that configures it."""
        on = {name: value for name, value in self if value not in (False, "off")}
        return {name: f"tracking.{name} = {'true' if value is True else repr(value)}" for name, value in on.items()}

    def check_installed(self) -> None:
        """Refuse to begin without a package that is configured; nothing is imported.

        Raises:
            UserError: with the command that installs it.
        """
        for package, key in self.packages.items():
            if importlib.util.find_spec(package) is None:
                name = {"mlflow": "mlflow-skinny"}.get(package, package)
                raise UserError(f"{key} needs the package {package!r}, which is not installed; pip install {name}")


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
    def is_exact(self) -> bool:
        """Whether the text is promised not to depend on speculation."""
        return self.model.dtype == "float32" or self.model.batch_invariant or self.model.device == "cpu"

    @property
    def folder(self) -> Path:
        return Path(self.run.folder) / self.run.name


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation for name, field in Config.model_fields.items() if isinstance(field.annotation, type)
}
"""The sections by their names."""
