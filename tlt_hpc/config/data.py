"""Where prompts come from and how responses are judged: [data] and [reward]."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from tlt_hpc.config.base import (
    MAX_ITEMS,
    MAX_SECONDS,
    ColumnName,
    ConfigError,
    FilePath,
    Fraction,
    NumTokens,
    PositiveSeconds,
    Section,
    SomeLabel,
    SomePath,
    Text,
    Unit,
    check_path,
)

TagName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=64)]
RewardKind = Literal["boxed", "math", "numeric", "choice", "format", "code", "function"]

EMBEDDED_TASK = "embedded:gcd"
TASK_PREFIX = "reasoning-gym:"
_ARGUMENTS_CHARACTERS = 100_000
_TASK_SIZE, _LARGEST_TASK = 10_000, 10**8


def _as_source(value: object) -> object:
    """A path, or a list of them as TOML has it."""
    paths = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not paths or not all(isinstance(path, str) and path for path in paths):
        raise PydanticCustomError("source", "give a file, a folder, a pattern or a task, or a list of files")
    if len(paths) > MAX_ITEMS:
        raise PydanticCustomError(
            "source", f"{len(paths)} files; list at most {MAX_ITEMS}, or give a folder or pattern"
        )
    for path in paths:  # here, since of a union pydantic would tell of each member
        check_path(path)
    return value if isinstance(value, str) else paths


def _as_arguments(value: object) -> object:
    """A table that TOML can hold again."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise PydanticCustomError("arguments", "give numbers, texts, booleans and lists alone") from error
    if len(text) > _ARGUMENTS_CHARACTERS:
        raise PydanticCustomError("arguments", f"{len(text)} characters; give at most {_ARGUMENTS_CHARACTERS}")
    return value


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
    broken_rows: Literal["error", "skip"] = "error"
    """What happens to rows that cannot be read, or have no prompt or no answer."""
    chat_template: SomePath = "auto"
    """Jinja file that renders lists of messages. ``auto``: the template of the model folder."""
    system_prompt: Text = ""
    """System message for prompts that are lists of messages without one."""
    text_prompts: Literal["raw", "chat"] = "raw"
    """How a prompt that is a text is passed to the model: ``raw`` unchanged, ``chat`` rendered as a user's message."""
    task_args: Annotated[dict[str, Any], BeforeValidator(_as_arguments)] = Field(default_factory=dict)
    """Settings of a ``reasoning-gym`` task, such as ``{max_digits = 3}``; ``size`` is its number of problems
    (10,000)."""

    @property
    def task_size(self) -> int:
        """Problems of a ``reasoning-gym`` task."""
        return int(self.task_args.get("size", _TASK_SIZE))

    @property
    def source_name(self) -> str:
        """The source in words."""
        return self.source if isinstance(self.source, str) else ", ".join(self.source)


class RewardSection(Section):
    """How responses are scored."""

    default: RewardKind = "boxed"
    """How responses are scored whose ``data_source`` is not in ``by_source``. ``boxed``: the text of the last
    ``\\boxed{}`` equals the answer; ``math``: it is mathematically equal (math-verify); ``numeric``: it is the same
    number within ``tolerance``; ``choice``: it is the same letter of a multiple choice; ``format``: the response has
    the required format; ``code``: the program passes its unit tests in a sandbox; ``function``: the value that
    ``function`` returns."""
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


def check_data(data: DataSection) -> None:
    """Refuse settings of a task that cannot be."""
    size = data.task_args.get("size", _TASK_SIZE)
    if not isinstance(size, int) or not 1 <= size <= _LARGEST_TASK:
        raise ConfigError(f"data.task_args.size = {size!r}: use a whole number from 1 to {_LARGEST_TASK}")
    if data.task_args and not (isinstance(data.source, str) and data.source.startswith(TASK_PREFIX)):
        raise ConfigError(
            f"data.task_args = {data.task_args!r} says nothing with data.source = {data.source_name!r}; "
            f"use data.source = '{TASK_PREFIX}NAME' or leave data.task_args out"
        )


def check_reward(reward: RewardSection) -> None:
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
    _check_format(reward, "format" in kinds)


def _check_format(reward: RewardSection, is_kind: bool) -> None:
    if doubles := [tag for tag in reward.format_tags if reward.format_tags.count(tag) > 1]:
        raise ConfigError(f"reward.format_tags names {doubles[0]!r} twice, and each stands once; name it once")
    is_used = is_kind or reward.format_weight > 0
    if is_used and not reward.format_tags:
        what = "the kind 'format'" if is_kind else f"reward.format_weight = {reward.format_weight}"
        raise ConfigError(f"{what} needs a form; set reward.format_tags, e.g. ['think', 'answer']")
    if reward.format_tags and not is_used:
        raise ConfigError(
            "reward.format_tags judges nothing without a weight; set reward.format_weight, or use the kind 'format'"
        )
