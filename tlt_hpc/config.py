"""The configuration of a run: TOML in, frozen and validated sections out. Knows recipes alone.

Every mistake a user can make ends as one ``ConfigError`` line that names the key, the value and the remedy.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from tlt_hpc.recipes import (
    GROUP_ADVANTAGES,
    AdvantageName,
    AggregationName,
    AlgorithmName,
    KLName,
    LossName,
    Recipe,
    recipe_with,
)

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
StrategyName = Annotated[str, Field(min_length=1)]
TagName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]
Count = Annotated[int, Field(ge=0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]

RewardKind = Literal["boxed", "math", "numeric", "choice", "format", "code", "function"]
LossKind = Literal["feature", "cross-entropy", "total-variation"]

EMBEDDED_MODEL = "embedded:tiny"
EMBEDDED_TASK = "embedded:gcd"
TASK_PREFIX = "reasoning-gym:"


class UserError(ValueError):
    """A mistake that the user can mend; its text is one line with the remedy, and a command ends with it."""


class ConfigError(UserError):
    """A user's mistake in the configuration; its text is one line with the remedy."""


class Section(BaseModel):
    """Frozen, strict about unknown keys, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


def _as_source(value: object) -> object:
    """A path, or a list of them as TOML has it."""
    paths = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not paths or not all(isinstance(path, str) and path for path in paths):
        raise PydanticCustomError("source", "give a file, a folder, a pattern or a task, or a list of files")
    return value if isinstance(value, str) else paths


def _as_day(value: object) -> object:
    """A day that TOML has read as one, in words."""
    return value.isoformat() if isinstance(value, date) else value


def _as_arguments(value: object) -> object:
    """A table that TOML can hold again."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise PydanticCustomError("arguments", "give numbers, texts, booleans and lists alone") from error
    return value


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
    folder: str = "runs"
    """Parent folder; the run writes to ``folder/name``."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    num_steps: PositiveInt
    ranks: PositiveInt = 1
    """MPI ranks that ``tlt`` starts itself when no launcher (srun, mpiexec) did; a launcher's count goes first."""


class ModelSection(Section):
    path: str
    """A Hugging Face folder, or ``embedded:tiny``."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"


class DataSection(Section):
    source: Annotated[str | tuple[str, ...], BeforeValidator(_as_source)]
    """``embedded:gcd``; a .jsonl, .parquet or .arrow file, a list of them, or a pattern (``data/*.parquet``); a folder
    of them, as the hub has it or as ``datasets`` saves it; ``reasoning-gym:NAME``. ``~``, ``$NAME`` are expanded."""
    split: Annotated[str, Field(min_length=1)] = "train"
    """Which split of a folder that has several."""
    prompt_key: str = ""
    """Column of the prompt, a text or a list of messages; empty: the first there is of ``prompt``, ``problem``,
    ``question``, ``messages``. Dots lead into a column: ``input.text``."""
    answer_key: str = ""
    """Column of the answer; empty: the first of ``reward_model.ground_truth``, ``answer``, ``ground_truth``."""
    max_prompt_tokens: PositiveInt = 1024
    overlong: Literal["error", "drop"] = "error"
    """What becomes of prompts over ``max_prompt_tokens``."""
    broken_rows: Literal["error", "skip"] = "error"
    """What becomes of rows without a prompt or an answer, or of another form."""
    chat_template: Annotated[str, Field(min_length=1)] = "auto"
    """Renders prompts that are lists of messages: the model folder's own (``auto``), or a file of Jinja."""
    template_date: Annotated[str, BeforeValidator(_as_day), Field(pattern=r"^\d{4}-\d{2}-\d{2}$")] = "2024-07-26"
    """What templates that write today's date take for today, so that no prompt depends on the day of the run."""
    system_prompt: str = ""
    """Stands before every list of messages that has no system message of its own."""
    text_prompts: Literal["raw", "chat"] = "raw"
    """``raw``: a prompt that is a text is fed as it stands; ``chat``: as the message of a user, rendered."""
    curriculum: str = ""
    """``path.py:name``: a function (epoch, rows) that gives the order of an epoch's rows. Empty: shuffled."""
    task_size: PositiveInt = 10_000
    """Problems of a ``reasoning-gym`` task, made from ``run.seed``."""
    task_args: Annotated[dict[str, Any], BeforeValidator(_as_arguments)] = {}
    """What that task's configuration takes beside, such as ``{max_digits = 3}``."""

    @property
    def source_name(self) -> str:
        """The source in words."""
        return self.source if isinstance(self.source, str) else ", ".join(self.source)


class RewardSection(Section):
    default: RewardKind = "boxed"
    """How responses are judged whose ``data_source`` is not in ``by_source``. ``boxed``: the text of the last \\boxed{}
    equals the answer; ``math``: equal as mathematics (math-verify); ``numeric``: equal as numbers, within
    ``tolerance``; ``choice``: the letter of a multiple choice; ``format``: the form alone, by the keys below; ``code``:
    the program passes its unit tests, in a sandbox; ``function``: what ``function`` says."""
    by_source: dict[str, RewardKind] = {}
    """``data_source`` -> kind; names may have ``*``, ``?``, ``[]``; a name as it stands goes first, then in order."""
    function: str = ""
    """``path.py:name``, called as verl calls its: (data_source, solution_str, ground_truth, extra_info) -> a number, or
    a dict with one under ``score``."""
    tolerance: NonNegative = 1e-6
    """Of ``numeric``: times the answer, or as it stands where the answer is below 1."""
    format_pattern: str = ""
    """A regular expression that the whole response must match, ``.`` also matching line ends."""
    format_tags: Annotated[tuple[TagName, ...], Field(strict=False)] = ()
    """Instead of a pattern: the response is <a>...</a><b>...</b> for these tags in this order, each once."""
    format_weight: Fraction = 0.0
    """Share of the form in every other kind's reward: (1 - weight) x reward + weight x form."""
    workers: PositiveInt = 2
    """Answers that a rank has judged at a time, in processes of their own; ``boxed``, ``numeric``, ``choice`` and tags
    need none and are judged in the rank."""
    cpu_seconds: Positive = 5.0
    """CPU time that an answer may take; one that takes more has reward 0."""
    memory_mb: PositiveInt = 1024
    """Memory that judging an answer may take, beside what a worker has when it starts."""
    wall_seconds: Positive = 300.0
    """Far limit for what takes no CPU time, such as a function that waits for ever; nothing else should meet it."""


class RolloutSection(Section):
    prompts_per_step: PositiveInt
    group_size: PositiveInt
    max_new_tokens: PositiveInt
    temperature: NonNegative = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    max_live: PositiveInt = 64
    """Sequences decoded together on one rank."""
    min_new_tokens: Count = 0
    """No end token is sampled before this many tokens."""
    stop_strings: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """A response ends with the token that completes one of these."""
    kv_bytes: Count = 0
    """Budget of one rank's keys, values and features; 0: room for ``max_live`` responses of full length."""
    page_size: PositiveInt = 128
    """Tokens of a page of that memory; flash-attention wants multiples of 256."""
    prefill_tokens: PositiveInt = 4096
    """Prompt tokens of one pass; longer prompts are read in chunks, between rounds."""
    shard: Literal["group", "sample"] = "group"
    """What a rank owns: whole GRPO groups, or single samples of all groups."""
    tie_guard: Literal["auto", "on", "off"] = "auto"
    """``auto``: on for float32, off otherwise."""


class SpeculationSection(Section):
    mode: Literal["plain", "ngram", "full"] = "full"
    """``plain``: none; ``ngram``: model-free drafter; ``full``: n-gram and learned drafter, trained in the tail."""
    strategies: Annotated[tuple[StrategyName, ...], Field(strict=False, min_length=1)] = (
        "ngram-4",
        "drafter-2",
        "drafter-4",
        "drafter-8",
    )
    """What to choose from, beside ``off``: source-depth for chains (``drafter-6``), with ``x`` branching and ``v``
    drafts to verify for trees (``drafter-5x2v9``), with ``a`` and the drafter's sharpness (``drafter-4a1.5``).
    Sources: ``ngram``, ``drafter``, ``hybrid`` (both in one tree)."""
    chooser: Literal["goodput", "bandit"] = "goodput"
    """``goodput``: expected tokens over measured cost; ``bandit``: the paper's bucketed epsilon-greedy (BEG-MAB)."""
    profile_seconds: NonNegative = 3.0
    """Most that measuring the cost of rounds may take at the first start on a machine; later starts read it; 0: off."""
    epsilon: Fraction = 0.05
    window: PositiveInt = 128
    """Rounds of a strategy that its expected accept length is taken over."""
    ngram_orders: Annotated[tuple[PositiveInt, ...], Field(strict=False, min_length=1)] = (12, 8, 6, 4, 2, 1)
    """Context lengths that the n-gram drafter tries, longest first."""
    ngram_history_tokens: PositiveInt = 200_000
    """Tokens of earlier responses that the n-gram drafter remembers on each rank."""


class DrafterSection(Section):
    form: Literal["eagle", "eagle3"] = "eagle"
    """``eagle``: one layer on the last hidden state, read by the policy's head; ``eagle3``: on three layers' features,
    with a head of its own over a smaller vocabulary."""
    init: str = "random"
    """``random``, ``embedded:tiny``, or the drafter folder of an earlier run: weights only."""
    vocabulary: PositiveInt = 32768
    """Tokens that an ``eagle3`` drafter made anew drafts among, at most."""
    learning_rate: Positive = 1e-3
    loss: Literal["auto", "feature", "cross-entropy", "total-variation"] = "auto"
    """``feature``: smooth-L1 on features plus soft cross-entropy, weighted by the two keys below (``auto`` for
    ``eagle``); ``cross-entropy``: that alone, on the draft vocabulary (``auto`` for ``eagle3``); ``total-variation``:
    minus the most that a draft can be accepted with, sum of min(p, q)."""
    feature_loss_weight: NonNegative = 1.0
    token_loss_weight: NonNegative = 0.1
    unroll_steps: Count = 0
    """Steps of its own that the drafter is trained along; 0: 1 for ``eagle``, 7 for ``eagle3``."""
    unroll_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Weight of each of them relative to the one before."""
    micro_step_tokens: PositiveInt = 2048
    """Most tokens of one micro-step; the time budget may make it smaller."""
    micro_step_seconds: Positive = 0.2
    average_merges: PositiveInt = 5
    """The engine drafts with the mean of the drafter's weights after about so many of the last merges, which forgives a
    learning rate that is too high; 1: with those of the last merge."""
    min_idle: PositiveInt = 1
    """Ranks that must be idle before any of them trains."""
    train: bool = True
    """False: the drafter stays as it starts."""
    schedule: Literal["always", "every", "falling"] = "always"
    """Which steps train it: all; every ``every_steps``-th, the first among them; those from which its own accept length
    has fallen by the share ``fall`` under its best until it is back at half the fall, or those after five in a row
    that could not judge it; one that begins at random trains until it has stopped growing."""
    every_steps: PositiveInt = 1
    fall: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    place: Literal["tail", "serial"] = "tail"
    """``tail``: idle ranks train while others generate; ``serial``: all ranks train together after every rollout, which
    makes the step longer. Serial is there to be compared with."""
    serial_micro_steps: PositiveInt = 20
    """Micro-steps of each rank and step where ``place`` is ``serial``."""
    serial_as: str = ""
    """Folder of a run on as many ranks: where ``place`` is ``serial``, each rank takes as many micro-steps in a step as
    it took there by that run's log, instead of ``serial_micro_steps``. Empty: none."""
    rollouts: Literal["fresh", "first"] = "fresh"
    """``fresh``: train on this step's responses and the last one's; ``first``: on those of the run's first step for
    ever, the control that shows what fresh ones are worth."""
    cache_bytes: PositiveInt = 2_000_000_000
    """Bytes of features on disk that one rank may keep: half for the step under way, half for the one before."""
    cache_folder: str = ""
    """A folder of each node's own for these features, such as ``$TMPDIR``: ``~`` and environment variables are expanded
    on each node, whose ranks then see each other's features alone. Empty: in the run's folder, where all see all."""
    cache_compression: Literal["none", "zstd"] = "none"
    """``zstd`` takes a third off what is written, for a share of a core: for file systems that many ranks share."""

    @property
    def loss_kind(self) -> LossKind:
        """The loss that ``auto`` stands for, or the one asked for."""
        if self.loss != "auto":
            return self.loss
        return "feature" if self.form == "eagle" else "cross-entropy"

    @property
    def num_unrolled(self) -> int:
        """Steps of its own that the drafter is trained along."""
        return self.unroll_steps or (1 if self.form == "eagle" else 7)


def _bound(value: object) -> object:
    if value == "auto" or (isinstance(value, int | float) and 0 <= value < math.inf and not isinstance(value, bool)):
        return value
    raise ValueError("use a number of 0 or more, or 'auto'")


Bound = Annotated[float | Literal["auto"], BeforeValidator(_bound)]


class AlgorithmSection(Section):
    """Parts that are ``auto`` take what the name stands for (``recipes.py``); what is saved with a run is resolved."""

    name: AlgorithmName = "grpo"
    advantage: Literal["auto", AdvantageName] = "auto"
    """``group``: reward less its group's mean, over its standard deviation; ``group-mean``: not divided;
    ``leave-one-out``: less the mean of the others in the group; ``batch``: normalised over all tokens of the step;
    ``group-mean-batch``: less the group's mean, then normalised so."""
    loss: Literal["auto", LossName] = "auto"
    """``clip``: PPO's, each token by its ratio; ``sequence-clip``: by its response's (GSPO); ``weight-clip``: the ratio
    is a bounded weight, and no token loses its gradient (CISPO)."""
    aggregation: Literal["auto", AggregationName] = "auto"
    """How the losses of a step's tokens are added up; ``-norm`` divides by ``rollout.max_new_tokens``."""
    clip_low: Bound = "auto"
    """The ratio is kept above 1 less this."""
    clip_high: Bound = "auto"
    """The ratio is kept below 1 plus this."""
    kl_coefficient: NonNegative = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    """``loss``: added to each token's; ``reward``: each response's sum over its tokens is taken from its reward."""
    kl_estimator: Literal["auto", KLName] = "auto"
    """``k1``, of which only the reward's gradient is the distance's; ``k2`` or ``k3`` in the loss. ``auto``: k3 in the
    loss, k1 in the reward."""
    entropy_coefficient: NonNegative = 0.0
    """Times the policy's entropy is taken from each token's loss."""
    overlong_buffer: Count = 0
    """The last so many of ``rollout.max_new_tokens`` cost reward, evenly up to ``overlong_penalty`` (DAPO); 0: none."""
    overlong_penalty: NonNegative = 1.0
    updates_per_step: PositiveInt = 1
    """Optimiser steps that one step's rollouts are cut into."""

    @property
    def recipe(self) -> Recipe:
        """All parts."""
        return recipe_with(self.name, self.advantage, self.loss, self.aggregation, self.clip_low, self.clip_high)

    @property
    def kl(self) -> KLName:
        """How the distance from the reference is estimated."""
        if self.kl_estimator != "auto":
            return self.kl_estimator
        return "k3" if self.kl_in == "loss" else "k1"

    def resolved(self) -> AlgorithmSection:
        """The same with every ``auto`` replaced, which a later version's recipes cannot change."""
        return self.model_copy(update={**vars(self.recipe), "kl_estimator": self.kl})


class OptimizerSection(Section):
    learning_rate: Positive = 1e-6
    weight_decay: NonNegative = 0.0
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.999)
    epsilon: Positive = 1e-8
    max_grad_norm: NonNegative = 1.0
    """0 switches clipping off."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    offload: bool = False
    """Keep optimiser state in host memory."""
    micro_batch_tokens: PositiveInt = 8192
    """Tokens of one forward and backward pass on one rank; one sequence may exceed it."""


class WarmupSection(Section):
    """``tlt warmup``: the drafter trained before any reinforcement learning; ``tlt train`` reads none of it."""

    init: str = "random"
    """What the warm-up begins from, as ``drafter.init`` names it."""
    sources: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Run folders whose logged responses are learned from, newest first (``--from``); none: it rolls out itself."""
    responses: PositiveInt = 4096
    """Responses to roll out, one a prompt, or most to take from the logs; ``drafter.cache_bytes`` bounds them too."""
    strategy: StrategyName = "off"
    """How the warm-up's own rollouts are decoded: ``off``, or n-grams such as ``ngram-4``."""
    updates: PositiveInt = 2000
    """Optimiser steps at most; the learning rate falls to zero over them."""
    tokens: Count = 0
    """Response tokens to train on at most, repeats counted; 0: as many as the updates take."""
    minutes: NonNegative = 0.0
    """Wall-clock minutes after which training ends with a last validation, whatever the learning rate has come to (it
    does not follow the clock), restarts counted together; 0: never."""
    batch_tokens: PositiveInt = 8192
    """Response tokens of one update, over all ranks; one response may exceed it."""
    learning_rate: Positive = 1e-3
    """The highest: reached after ``ramp_updates``, left along a cosine."""
    ramp_updates: Count = 50
    noise: NonNegative = 0.0
    """Width of the uniform noise added to the features that the drafter reads; EAGLE: 0.2."""
    validate_every: PositiveInt = 100
    """Updates from one measurement of the accept length to the next; each saves the training as well."""
    validation_prompts: PositiveInt = 64
    """Prompts held out from the training; at most a fifth of all."""
    validation_tokens: PositiveInt = 512
    """Most tokens of a validation response."""
    validation_strategy: StrategyName = "drafter-5"
    """How validation speculates; the temperature is the rollout's."""
    patience: Count = 8
    """Validations without a new best after which the warm-up ends; 0: never."""


class CheckpointSection(Section):
    every_steps: PositiveInt = 10
    keep: PositiveInt = 2
    replay: bool = True
    """Repeat the updates of logged steps that no checkpoint has; off: generate these steps again, and train the drafter
    in their tails again."""
    background: bool = True
    """Write while the next step goes on; off: the step waits for the disk, and what was done is never lost again."""


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

    @property
    def samples_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.group_size

    @property
    def tie_guard(self) -> bool:
        """Whether near-ties are decided canonically: ``auto`` is on where float32 keeps the zone of doubt narrow."""
        return self.rollout.tie_guard == "on" or (self.rollout.tie_guard == "auto" and self.model.dtype == "float32")

    @property
    def folder(self) -> Path:
        return Path(self.run.folder) / self.run.name


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply ``section.key=value`` overrides, and validate.

    Raises:
        ConfigError: unreadable file, TOML that does not parse, unknown key, wrong type or impossible combination.
    """
    path = Path(path)
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"config file {path}: {error.strerror}; give the path of a TOML file such as jobs/tiny.toml"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from None
    for override in overrides:
        apply_override(tree, override)
    return parse_config(tree)


def parse_config(tree: dict[str, Any]) -> Config:
    """Validate a nested dict into a ``Config``.

    Raises:
        ConfigError: as ``load_config``.
    """
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from None
    config = config.model_copy(update={"algorithm": config.algorithm.resolved()})
    _check_combinations(config)
    return config


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set ``section.key=value`` in a TOML tree; the value is TOML, or a bare string where it does not parse as such."""
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or len(parts) != 2 or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form section.key=value, e.g. rollout.temperature=0.9")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    section = tree.setdefault(parts[0], {})
    if not isinstance(section, dict):
        raise ConfigError(
            f"override {override!r}: {parts[0]!r} is not a section in the file; write it as a [{parts[0]}] table"
        )
    section[parts[1]] = value


def check_ranks(config: Config, num_ranks: int) -> None:
    """Refuse a rank count that the step's samples cannot be divided over.

    Raises:
        ConfigError: with the key and the remedy.
    """
    unit = config.rollout.prompts_per_step if config.rollout.shard == "group" else config.samples_per_step
    what = (
        "rollout.prompts_per_step"
        if config.rollout.shard == "group"
        else "rollout.prompts_per_step x rollout.group_size"
    )
    if unit % num_ranks:
        raise ConfigError(
            f"{what} = {unit} is not divisible by {num_ranks} ranks; "
            f"use {max(num_ranks, unit // num_ranks * num_ranks)} or another number of ranks"
        )


def check_model_limits(config: Config, max_positions: int) -> None:
    """Refuse caps that exceed the model's positions.

    Raises:
        ConfigError: with the key and the remedy.
    """
    total = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if total > max_positions:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {total} exceeds the model's {max_positions} positions; "
            f"lower rollout.max_new_tokens to {max(1, max_positions - config.data.max_prompt_tokens)} or less"
        )


def to_toml(config: Config) -> str:
    """The configuration as TOML that ``load_config`` reads back to an equal one."""
    lines: list[str] = []
    for section, values in config.model_dump().items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_value(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, str):
        # a JSON string is a TOML basic string but for DEL, which TOML wants escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _check_combinations(config: Config) -> None:
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
    if config.optimizer.zero_stage == 0 and config.model.dtype != "float32":
        raise ConfigError(
            f"optimizer.zero_stage = 0 with model.dtype = {config.model.dtype!r} has no fp32 master weights, so small "
            "updates are lost; use optimizer.zero_stage = 1"
        )
    if config.optimizer.zero_stage == 0 and config.optimizer.offload:
        raise ConfigError("optimizer.offload = true needs sharded state; use optimizer.zero_stage = 1, 2 or 3")
    if config.rollout.min_new_tokens > config.rollout.max_new_tokens:
        raise ConfigError(
            f"rollout.min_new_tokens = {config.rollout.min_new_tokens} exceeds rollout.max_new_tokens = "
            f"{config.rollout.max_new_tokens}; lower it"
        )
    _check_algorithm(config)
    _check_drafter(config.drafter)
    _check_data(config.data)
    _check_reward(config.reward)
    if "" in config.rollout.stop_strings:
        raise ConfigError("rollout.stop_strings has an empty string, which every response holds; remove it")
    if config.rollout.tie_guard == "on" and config.model.dtype != "float32":
        raise ConfigError(
            f"rollout.tie_guard = 'on' with model.dtype = {config.model.dtype!r}: the guard band would cover a large "
            "share of all tokens; use model.dtype = 'float32' or rollout.tie_guard = 'auto'"
        )


def _check_algorithm(config: Config) -> None:
    algorithm, recipe = config.algorithm, config.algorithm.recipe
    if recipe.clip_low > 1:
        raise ConfigError(
            f"algorithm.clip_low = {recipe.clip_low}: a ratio is never below 0, so a bound below it is none; use "
            "1.0 for none"
        )
    if algorithm.kl_in == "reward" and not algorithm.kl_coefficient:
        raise ConfigError(
            f"algorithm.kl_in = 'reward' says nothing with algorithm.kl_coefficient = {algorithm.kl_coefficient}; set "
            "a coefficient, or leave algorithm.kl_in out"
        )
    if algorithm.kl_in == "reward" and recipe.advantage == "group":
        raise ConfigError(
            "algorithm.kl_in = 'reward' with algorithm.advantage = 'group', which divides by the group's deviation: "
            "where the answers are all right or all wrong only the distance is left, however small its coefficient; "
            "use algorithm.kl_in = 'loss', or another advantage"
        )
    if algorithm.kl_coefficient and (algorithm.kl_in == "reward") != (algorithm.kl_estimator == "k1"):
        raise ConfigError(
            f"algorithm.kl_estimator = {algorithm.kl_estimator!r} with algorithm.kl_in = {algorithm.kl_in!r}: the mean "
            "of its gradient there is not the distance's; use 'k1' in the reward, 'k2' or 'k3' in the loss"
        )
    if algorithm.overlong_buffer > config.rollout.max_new_tokens:
        raise ConfigError(
            f"algorithm.overlong_buffer = {algorithm.overlong_buffer} is more than rollout.max_new_tokens = "
            f"{config.rollout.max_new_tokens}; lower it"
        )


def _check_drafter(drafter: DrafterSection) -> None:
    if drafter.form == "eagle3" and drafter.loss == "feature":
        raise ConfigError(
            "drafter.loss = 'feature' with drafter.form = 'eagle3', whose states are no features of the target; use "
            "drafter.loss = 'cross-entropy' or 'total-variation'"
        )
    if drafter.every_steps > 1 and drafter.schedule != "every":
        raise ConfigError(
            f"drafter.every_steps = {drafter.every_steps} says nothing with drafter.schedule = {drafter.schedule!r}; "
            "use drafter.schedule = 'every' or leave drafter.every_steps out"
        )
    if drafter.serial_as and drafter.place != "serial":
        raise ConfigError(
            f"drafter.serial_as = {drafter.serial_as!r} says nothing with drafter.place = {drafter.place!r}; "
            "use drafter.place = 'serial' or leave drafter.serial_as out"
        )
    if drafter.rollouts == "first" and drafter.cache_folder:
        raise ConfigError(
            f"drafter.rollouts = 'first' with drafter.cache_folder = {drafter.cache_folder!r}: the first step must "
            "stay as long as the run, which a node's disk does not; leave drafter.cache_folder out"
        )
    usual = {"schedule": "always", "place": "tail", "rollouts": "fresh"}
    for name, value in usual.items():
        if not drafter.train and (given := vars(drafter)[name]) != value:
            raise ConfigError(
                f"drafter.{name} = {given!r} with drafter.train = false, which trains nothing; "
                f"use drafter.train = true or leave drafter.{name} out"
            )


def _check_data(data: DataSection) -> None:
    try:
        date.fromisoformat(data.template_date)
    except ValueError as error:
        raise ConfigError(f"data.template_date = {data.template_date!r}: {error}; give a day as 2024-07-26") from None
    if data.task_args and not (isinstance(data.source, str) and data.source.startswith(TASK_PREFIX)):
        raise ConfigError(
            f"data.task_args = {data.task_args!r} says nothing with data.source = {data.source_name!r}; "
            f"use data.source = '{TASK_PREFIX}NAME' or leave data.task_args out"
        )


def _check_reward(reward: RewardSection) -> None:
    kinds = {reward.default, *reward.by_source.values()}
    if reward.function and "function" not in kinds:
        raise ConfigError(
            f"reward.function = {reward.function!r} judges nothing; set reward.default = 'function', or name "
            "sources in reward.by_source"
        )
    if "function" in kinds and not re.fullmatch(r".+\.py:[A-Za-z_]\w*", reward.function):
        raise ConfigError(
            f"reward.function = {reward.function!r} names no function for the kind 'function'; "
            "give one as 'path.py:name'"
        )
    if reward.wall_seconds < 2 * reward.cpu_seconds:
        raise ConfigError(
            f"reward.wall_seconds = {reward.wall_seconds} must be far beyond reward.cpu_seconds = {reward.cpu_seconds}"
            f", or verdicts depend on the machine's load; use {2 * reward.cpu_seconds} or more"
        )
    _check_format(reward, "format" in kinds)


def _check_format(reward: RewardSection, is_kind: bool) -> None:
    if reward.format_pattern and reward.format_tags:
        raise ConfigError(
            "reward.format_pattern and reward.format_tags both say what a response looks like; leave one of them out"
        )
    is_given, is_used = bool(reward.format_pattern or reward.format_tags), is_kind or reward.format_weight > 0
    if is_used and not is_given:
        what = "the kind 'format'" if is_kind else f"reward.format_weight = {reward.format_weight}"
        raise ConfigError(f"{what} needs a form; set reward.format_tags, e.g. ['think', 'answer'], or format_pattern")
    if is_given and not is_used:
        raise ConfigError(
            "reward.format_pattern and reward.format_tags judge nothing without a weight; set reward.format_weight, "
            "or use the kind 'format'"
        )
    try:
        re.compile(reward.format_pattern)
    except re.error as error:
        raise ConfigError(
            f"reward.format_pattern = {reward.format_pattern!r} is no regular expression: {error}; mend it"
        ) from None


_LISTS = {"tuple_type": 'give a list, such as ["a", "b"]', "too_short": "give a list of one or more"}
"""Remedies where pydantic speaks of Python's types."""
_REPLACED = {
    "speculation.depths": "speculation.strategies",
    "speculation.sharpness": "speculation.strategies",
    "data.reward": "reward.default",
}


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    key = ".".join(location)
    if first["type"] == "extra_forbidden":
        return f"unknown key {key!r}{_closest(location)}"
    if first["type"] == "missing":
        return f"missing key {key!r}; add it to the file or give {key}=VALUE"
    remedy = _LISTS.get(first["type"]) or _plain(first["msg"])
    return f"{key} = {first['input']!r}: {remedy}"


def _plain(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def _closest(location: list[str]) -> str:
    if (replacement := _REPLACED.get(".".join(location))) is not None:
        return f"; {replacement} has taken its place"
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    if len(location) == 1:
        valid, prefix = list(sections), ""
    else:
        section = sections[location[0]]
        assert section is not None
        valid, prefix = list(section.model_fields), location[0] + "."
    near = difflib.get_close_matches(location[-1], valid, n=1, cutoff=0.4)
    if near:
        return f"; did you mean {prefix + near[0]!r}?"
    return f"; valid keys: {', '.join(prefix + name for name in valid)}"
