"""Takes a row apart into prompt, answer and the rest: verl's schema, prompt and answer, or columns by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tlt_hpc.config import ConfigError, DataSection
from tlt_hpc.data.rows import Row, RowError

_PROMPT_COLUMNS = ("prompt", "problem", "question", "messages")
_ANSWER_COLUMNS = ("reward_model.ground_truth", "answer", "ground_truth")
_KEPT = ("extra_info", "reward_model", "ability")
"""Columns of verl's schema that rewards may use."""
_ROLES = ("system", "user", "assistant", "tool", "developer")

Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class RowText:
    """A row taken apart: a prompt that is a text or messages, and what judges the answers to it."""

    prompt: str | Messages
    answer: str
    source: str
    extra: str
    """JSON of verl's other columns; empty: none."""


def wanted_columns(data: DataSection) -> frozenset[str]:
    """The top-level columns that may be needed of a file."""
    prompts = (data.prompt_key,) if data.prompt_key else _PROMPT_COLUMNS
    answers = (data.answer_key,) if data.answer_key else _ANSWER_COLUMNS
    return frozenset(path.partition(".")[0] for path in (*prompts, *answers)) | {*_KEPT, "data_source"}


def choose_columns(data: DataSection, present: frozenset[str]) -> tuple[str, str]:
    """The columns of the prompt and of the answer: those configured, or the first usual ones that are present.

    Raises:
        ConfigError: there is no such column.
    """
    return (
        _choose(data, "prompt", data.prompt_key, _PROMPT_COLUMNS, present),
        _choose(data, "answer", data.answer_key, _ANSWER_COLUMNS, present),
    )


def _choose(data: DataSection, what: str, key: str, usual: tuple[str, ...], present: frozenset[str]) -> str:
    for name in (key,) if key else usual:
        # of a column whose rows differ in what they hold (JSON), only the head is known beforehand
        if name in present or (key and name.partition(".")[0] in present):
            return name
    named = f"no column {key!r}" if key else f"no {what} among {', '.join(map(repr, usual))}"
    raise ConfigError(
        f"data.source = {data.source_name!r} has {named}; it has {', '.join(sorted(present)) or 'none'}: "
        f"name the right one in data.{what}_key"
    )


def take_apart(row: Row, prompt_column: str, answer_column: str, kind: str, where: str) -> RowText:
    """A row's prompt, answer and the rest; its source is ``kind`` if it names none.

    Raises:
        RowError: a prompt or answer is missing, null or of another type, or some of it cannot be written as UTF-8.
    """
    answer, source = _value(row, answer_column, where), row.get("data_source")
    kept = {name: row[name] for name in _KEPT if row.get(name) is not None}
    prompt = _prompt(_value(row, prompt_column, where), prompt_column, where)
    try:
        found = RowText(
            prompt=prompt,
            answer=answer if isinstance(answer, str) else json.dumps(answer, default=str),
            source=kind if source is None else str(source),
            extra=json.dumps(kept, default=str, ensure_ascii=False) if kept else "",
        )
        shown = prompt if isinstance(prompt, str) else json.dumps(prompt, default=str, ensure_ascii=False)
        "".join((shown, found.answer, found.source, found.extra)).encode()
    except RecursionError:
        raise RowError(where, "nested too deep; flatten it or remove the row") from None
    except UnicodeEncodeError:
        raise RowError(where, "has half of a surrogate pair; fix the row") from None
    return found


def _value(row: Row, path: str, where: str) -> Any:
    """What a dotted path leads to.

    Raises:
        RowError: nothing, null, NaN or infinity.
    """
    found: Any = row
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            raise RowError(where, f"has no {path!r}; fix or remove the row")
        found = found[name]
    # pandas writes NaN where there is nothing
    if found is None or (isinstance(found, float) and not math.isfinite(found)):
        raise RowError(where, f"{path!r} is {'null' if found is None else found}; fix or remove the row")
    return found


def _prompt(value: Any, path: str, where: str) -> str | Messages:
    if not isinstance(value, str | list):
        raise RowError(where, f"{path!r} is neither a text nor a list of messages but {_kind(value)}; fix the row")
    if not value:
        raise RowError(where, f"{path!r} is empty; fix or remove the row")
    if isinstance(value, str):
        return value
    messages = tuple(_message(message, where, f"message {i} of {path!r}") for i, message in enumerate(value))
    if messages[-1]["role"] == "assistant":  # as in data for supervised training, where it is the answer
        raise RowError(where, f"{path!r} ends with a message of the assistant, so with an answer; cut it off")
    return messages


def _message(message: Any, where: str, which: str) -> Mapping[str, Any]:
    """A message without its nulls, as transformers drops them before it renders."""
    if not isinstance(message, Mapping):
        raise RowError(where, f"{which} is {_kind(message)}; it needs 'role' and 'content'")
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            raise RowError(where, f"{which}: {name!r} is {_kind(message.get(name))}; it needs to be a text")
    if message["role"] not in _ROLES:
        raise RowError(where, f"{which}: role {message['role']!r} is none of {', '.join(_ROLES)}; rename it")
    return {key: value for key, value in message.items() if value is not None}


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"
