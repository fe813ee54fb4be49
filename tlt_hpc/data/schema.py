"""What of a row is the prompt, the answer, and the rest: verl's schema, prompt and answer, or columns by name."""

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
"""Of verl's schema, for rewards."""
_USED = ("data_source", *_KEPT)
_MOST_DEPTH = 64
_NESTS = (Mapping, list, tuple)
_FACTS = ("data_source", "difficulty", "level")
_ROLES = ("system", "user", "assistant", "tool", "developer")

Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Columns:
    """Where a row's prompt and answer are; dots lead into a column."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class RowText:
    """A row taken apart: a prompt that is a text or messages, and what judges the answers to it."""

    prompt: str | Messages
    answer: str
    source: str
    extra: str
    """JSON of what verl's schema has beside; empty: nothing."""


def wanted_columns(data: DataSection) -> frozenset[str]:
    """The top-level columns that may be needed of a file."""
    named = (data.prompt_key or _PROMPT_COLUMNS, data.answer_key or _ANSWER_COLUMNS)
    paths = [path for names in named for path in ((names,) if isinstance(names, str) else names)]
    return frozenset(path.partition(".")[0] for path in paths) | frozenset((*_KEPT, *_FACTS))


def choose_columns(data: DataSection, present: frozenset[str]) -> Columns:
    """The prompt's and the answer's column: those that are configured, or the first usual ones there are.

    Raises:
        ConfigError: there is no such column.
    """
    return Columns(
        _choose(data, "prompt", data.prompt_key, _PROMPT_COLUMNS, present),
        _choose(data, "answer", data.answer_key, _ANSWER_COLUMNS, present),
    )


def _choose(data: DataSection, what: str, key: str, usual: tuple[str, ...], present: frozenset[str]) -> str:
    among = (key,) if key else usual
    for name in among:
        # of a column whose rows differ in what they hold (JSON), only the head is known beforehand
        if name in present or (key and name.partition(".")[0] in present):
            return name
    named = f"no column {key!r}" if key else f"no {what} among {', '.join(map(repr, usual))}"
    raise ConfigError(
        f"data.source = {data.source_name!r} has {named}; it has {', '.join(sorted(present)) or 'none'}: "
        f"name the right one in data.{what}_key"
    )


def take_apart(row: Row, columns: Columns, kind: str, where: str) -> RowText:
    """A row's prompt, answer and the rest; its source is ``kind`` where it names none.

    Raises:
        RowError: a prompt or answer is missing, null or of another type, or some of it cannot be written as UTF-8.
    """
    answer = _value(row, columns.answer, where)
    used = (*_USED, columns.prompt.partition(".")[0], columns.answer.partition(".")[0])
    _check_depth([row.get(name) for name in used], where)
    source = row.get("data_source")
    found = RowText(
        prompt=_prompt(_value(row, columns.prompt, where), columns.prompt, where),
        answer=answer if isinstance(answer, str) else json.dumps(answer, default=str),
        source=kind if source is None else str(source),
        extra=_extra(row),
    )
    _check_texts(found, where)
    return found


def difficulty_of(row: Row) -> Any:
    """What the row says of its difficulty: in extra_info, or in a column of its own; None where nothing does."""
    info = row.get("extra_info")
    places = (info if isinstance(info, Mapping) else {}, row)
    found = (place.get(name) for place in places for name in ("difficulty", "level"))
    return next((value for value in found if value is not None), None)


def _value(row: Row, path: str, where: str) -> Any:
    """What a dotted path leads to.

    Raises:
        RowError: nothing, or null.
    """
    found: Any = row
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            raise RowError(where, f"has no {path!r}; mend or remove the row")
        found = found[name]
    if found is None:
        raise RowError(where, f"{path!r} is null; mend or remove the row")
    if isinstance(found, float) and not math.isfinite(found):  # pandas has NaN where there is nothing
        raise RowError(where, f"{path!r} is {'NaN' if math.isnan(found) else 'infinite'}; mend or remove the row")
    return found


def _check_depth(values: list[Any], where: str) -> None:
    """Refuse what some JSON library on the way would call nested too deep, and another would not."""
    for _ in range(_MOST_DEPTH):
        nests = [value for value in values if isinstance(value, _NESTS)]
        values = [inner for nest in nests for inner in (nest.values() if isinstance(nest, Mapping) else nest)]
    if values:
        raise RowError(where, f"nested over {_MOST_DEPTH} deep; flatten it or remove the row")


def _check_texts(row: RowText, where: str) -> None:
    prompt = row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt, default=str, ensure_ascii=False)
    for what, text in (("prompt", prompt), ("answer", row.answer), ("data_source", row.source), ("rest", row.extra)):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RowError(where, f"the {what} has half of a surrogate pair; mend the row") from None


def _prompt(value: Any, path: str, where: str) -> str | Messages:
    if isinstance(value, str):
        if not value:
            raise RowError(where, f"{path!r} is an empty text; mend or remove the row")
        return value
    if not isinstance(value, list):
        raise RowError(where, f"{path!r} is neither a text nor a list of messages but {_kind(value)}; mend the row")
    if not value:
        raise RowError(where, f"{path!r} is an empty list of messages; mend or remove the row")
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


def _extra(row: Row) -> str:
    kept = {name: row[name] for name in _KEPT if row.get(name) is not None}
    return json.dumps(kept, default=str, ensure_ascii=False) if kept else ""


def _kind(value: Any) -> str:
    names = {"dict": "an object", "list": "a list", "bool": "a boolean", "NoneType": "null", "str": "a text"}
    return names.get(type(value).__name__, "a number" if isinstance(value, int | float) else type(value).__name__)
