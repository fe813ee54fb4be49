"""Where prompts come from and how responses are judged: [data] and [reward]."""

from __future__ import annotations

import json
import re
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from tlt_hpc.config.base import (
    MAX_ITEMS,
    ColumnName,
    ConfigError,
    FilePath,
    Fraction,
    PositiveInt,
    PositiveSeconds,
    Section,
    SomeLabel,
    SomePath,
    Text,
    check_path,
)

TagName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=64)]
RewardKind = Literal["boxed", "math", "numeric", "choice", "format", "code", "function"]

EMBEDDED_TASK = "embedded:gcd"
TASK_PREFIX = "reasoning-gym:"
_ARGUMENTS_CHARACTERS = 100_000


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


def _as_day(value: object) -> object:
    """A day that TOML has read as one, in words."""
    return value.isoformat() if isinstance(value, date) else value


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
    source: Annotated[
        SomePath | Annotated[tuple[SomePath, ...], Field(max_length=MAX_ITEMS)], BeforeValidator(_as_source)
    ]
    """``embedded:gcd``; a .jsonl, .parquet or .arrow file, a list of them, or a pattern (``data/*.parquet``); a folder
    of them, as the hub has it or as ``datasets`` saves it; ``reasoning-gym:NAME``. ``~``, ``$NAME`` are expanded."""
    split: SomeLabel = "train"
    """Which split of a folder that has several."""
    prompt_key: ColumnName = ""
    """Column of the prompt, a text or a list of messages; empty: the first there is of ``prompt``, ``problem``,
    ``question``, ``messages``. Dots lead into a column: ``input.text``."""
    answer_key: ColumnName = ""
    """Column of the answer; empty: the first of ``reward_model.ground_truth``, ``answer``, ``ground_truth``."""
    max_prompt_tokens: PositiveInt = 1024
    overlong: Literal["error", "drop"] = "error"
    """What becomes of prompts over ``max_prompt_tokens``."""
    broken_rows: Literal["error", "skip"] = "error"
    """What becomes of rows without a prompt or an answer, or of another form."""
    chat_template: SomePath = "auto"
    """Renders prompts that are lists of messages: the model folder's own (``auto``), or a file of Jinja."""
    template_date: Annotated[str, BeforeValidator(_as_day), Field(pattern=r"^\d{4}-\d{2}-\d{2}$", max_length=10)] = (
        "2024-07-26"
    )
    """What templates that write today's date take for today, so that no prompt depends on the day of the run."""
    system_prompt: Text = ""
    """Stands before every list of messages that has no system message of its own."""
    text_prompts: Literal["raw", "chat"] = "raw"
    """``raw``: a prompt that is a text is fed as it stands; ``chat``: as the message of a user, rendered."""
    curriculum: FilePath = ""
    """``path.py:name``: a function (epoch, rows) that gives the order of an epoch's rows. Empty: shuffled."""
    task_size: Annotated[int, Field(ge=1, le=10**8)] = 10_000
    """Problems of a ``reasoning-gym`` task, made from ``run.seed``."""
    task_args: Annotated[dict[str, Any], BeforeValidator(_as_arguments)] = Field(default_factory=dict)
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
    by_source: Annotated[dict[ColumnName, RewardKind], Field(max_length=MAX_ITEMS)] = Field(default_factory=dict)
    """``data_source`` -> kind; names may have ``*``, ``?``, ``[]``; a name as it stands goes first, then in order."""
    function: FilePath = ""
    """``path.py:name``, called as verl calls its: (data_source, solution_str, ground_truth, extra_info) -> a number, or
    a dict with one under ``score``."""
    tolerance: Annotated[float, Field(ge=0.0, le=1000.0)] = 1e-6
    """Of ``numeric``: times the answer, or as it stands where the answer is below 1."""
    format_pattern: Text = ""
    """A regular expression that the whole response must match, ``.`` also matching line ends."""
    format_tags: Annotated[tuple[TagName, ...], Field(strict=False, max_length=64)] = ()
    """Instead of a pattern: the response is <a>...</a><b>...</b> for these tags in this order, each once."""
    format_weight: Fraction = 0.0
    """Share of the form in every other kind's reward: (1 - weight) x reward + weight x form."""
    workers: Annotated[int, Field(ge=1, le=1024)] = 2
    """Answers that a rank has judged at a time, in processes of their own; ``boxed``, ``numeric``, ``choice`` and tags
    need none and are judged in the rank."""
    cpu_seconds: PositiveSeconds = 5.0
    """CPU time that an answer may take; one that takes more has reward 0."""
    memory_mb: Annotated[int, Field(ge=1, le=2**24)] = 1024
    """Memory that judging an answer may take, beside what a worker has when it starts."""
    wall_seconds: PositiveSeconds = 300.0
    """Far limit for what takes no CPU time, such as a function that waits for ever; nothing else should meet it."""


_ROW_KEYS = ("chat_template", "system_prompt", "text_prompts", "prompt_key", "answer_key")
"""Of [data]: how rows are read, of which the embedded task has none."""


def check_data(data: DataSection, is_for_others: bool) -> None:
    """Refuse what says nothing; ``is_for_others``: evaluations read other sources by the same keys."""
    keys = ("curriculum", *(() if is_for_others else _ROW_KEYS)) if data.source == EMBEDDED_TASK else ()
    for key in keys:
        if (value := vars(data)[key]) != DataSection.model_fields[key].default:
            raise ConfigError(
                f"data.{key} = {value!r} says nothing with data.source = {EMBEDDED_TASK!r}, which has no rows; name "
                f"files in data.source or leave data.{key} out"
            )
    try:
        date.fromisoformat(data.template_date)
    except ValueError as error:
        raise ConfigError(f"data.template_date = {data.template_date!r}: {error}; give a day as 2024-07-26") from None
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
    if doubles := [tag for tag in reward.format_tags if reward.format_tags.count(tag) > 1]:
        raise ConfigError(f"reward.format_tags names {doubles[0]!r} twice, and each stands once; name it once")
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
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"reward.format_pattern = {reward.format_pattern!r} is no regular expression: {error}; mend it"
        ) from None
