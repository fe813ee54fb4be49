"""Splits a row into prompt, answer and the rest: verl's schema, prompt and answer, or columns by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tlt_hpc.common.answers import answer_text
from tlt_hpc.config import DataSection
from tlt_hpc.data.rows import Row, RowError

_PROMPT_COLUMNS = ("prompt", "problem", "question", "messages")
_ANSWER_COLUMNS = ("reward_model.ground_truth", "answer", "ground_truth")
_KEPT = ("extra_info", "reward_model", "ability", "entry_point")
"""Columns that rewards may use: verl's, and HumanEval's name of the function."""
_KEYS_OF_A_CHAT = re.compile(r"""["'](role|content)["']\s*:""")
_ROLES = ("system", "user", "assistant", "tool", "developer")
_TOOLS = "tools"
_MISSING = object()

Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class RowText:
    """The parts of a row: a prompt that is a text or messages, and what judges the answers to it."""

    prompt: str | Messages
    answer: str
    source: str
    extra: str
    """JSON of verl's other columns; empty: none."""


def wanted_columns(data: DataSection) -> frozenset[str]:
    """The top-level columns that may be needed of a file."""
    paths = (*_paths(data.prompt_key, _PROMPT_COLUMNS), *_paths(data.answer_key, _ANSWER_COLUMNS))
    return frozenset(path.partition(".")[0] for path in paths) | {*_KEPT, "data_source", _TOOLS}


def split_row(row: Row, data: DataSection, kind: str, where: str) -> RowText:
    """The parts of a row; its source is ``kind`` if it names none.

    Raises:
        RowError: a prompt or answer is missing, null or of another type, or some of it cannot be written as UTF-8.
    """
    if row.get(_TOOLS) not in (None, "", "[]", "null", [], {}):
        raise RowError(where, f"has {_TOOLS!r}, and a run calls no tools; leave the column out or take other data")
    prompt = _as_prompt(_value(row, "prompt", _paths(data.prompt_key, _PROMPT_COLUMNS), where), where)
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant" and not data.continues_chats:
        raise RowError(  # as in data for supervised training, where it is the answer
            where,
            "the prompt ends with a message of the assistant, so with an answer; cut it off, or set "
            "data.template_args = {continue_final_message = true} if the response is to continue it",
        )
    answer = answer_in(row, data, where)
    source, kept = row.get("data_source"), {name: row[name] for name in _KEPT if row.get(name) is not None}
    try:
        found = RowText(
            prompt=prompt,
            answer=answer_text(answer),
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


def answer_in(row: Row, data: DataSection, where: str) -> Any:
    """A row's answer.

    Raises:
        RowError: there is none.
    """
    return _value(row, "answer", _paths(data.answer_key, _ANSWER_COLUMNS), where)


def _paths(key: str, usual: tuple[str, ...]) -> tuple[str, ...]:
    return (key,) if key else usual


def _value(row: Row, what: str, paths: tuple[str, ...], where: str) -> Any:
    """The value of the first of these dotted paths that the row has.

    Raises:
        RowError: it has none of them, or the value is null, NaN or infinity.
    """
    for path in paths:
        found: Any = row
        for name in path.split("."):
            found = found.get(name, _MISSING) if isinstance(found, Mapping) else _MISSING
        if found is _MISSING:
            continue
        # pandas writes NaN for a missing value
        if found is None or (isinstance(found, float) and not math.isfinite(found)):
            raise RowError(where, f"{path!r} is {'null' if found is None else found}; fix or remove the row")
        return found
    raise RowError(
        where,
        f"has no {' or '.join(map(repr, paths))}, but {', '.join(sorted(row)) or 'nothing'}; fix or remove the row, or "
        f"name its column in data.{what}_key",
    )


def _as_prompt(value: Any, where: str) -> str | Messages:
    if isinstance(value, str):
        value = _chat_in(value, where)
    if value in ("", []):
        raise RowError(where, "the prompt is empty; fix or remove the row")
    if not isinstance(value, str | list):
        raise RowError(where, f"the prompt is no text and no list of messages but {str(value)[:40]!r}; fix the row")
    if isinstance(value, str):
        return value
    return tuple(_as_message(message, f"{where}: message {number}") for number, message in enumerate(value))


def _chat_in(text: str, where: str) -> str | list[Any]:
    """The messages of a text that is JSON of them, as some files store a chat; any other text as it is.

    Raises:
        RowError: it is a chat in another notation, such as Python's.
    """
    bare = text.strip()
    is_chat = bare[:1] in ("[", "{") and bare[-1:] in ("]", "}")
    if not is_chat or set(_KEYS_OF_A_CHAT.findall(bare)) != {"role", "content"}:
        return text
    try:
        tree = json.loads(bare)
    except (ValueError, RecursionError):
        raise RowError(where, f"the prompt {bare[:40]!r} is messages as text and no JSON; write a list") from None
    messages = tree if isinstance(tree, list) else [tree]
    return messages if all(isinstance(message, dict) and "role" in message for message in messages) else text


def _as_message(message: Any, where: str) -> Mapping[str, Any]:
    """A message without its nulls, as transformers drops them before it renders."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, str | list) or content == [] or not isinstance(message.get("role"), str):
        raise RowError(where, f"{str(message)[:80]!r} needs 'role' and 'content', both texts; fix the row")
    if message["role"] not in _ROLES:
        raise RowError(where, f"role {message['role']!r} is none of {', '.join(_ROLES)}; rename it")
    if isinstance(content, list):
        content = [_as_part(part, where) for part in content]
    return {**{key: value for key, value in message.items() if value is not None}, "content": content}


def _as_part(part: Any, where: str) -> Mapping[str, str]:
    """A part of a message's content."""
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
    if kind != "text" or not isinstance(text, str):
        what = f"a part of type {kind!r}" if isinstance(kind, str) and kind != "text" else repr(str(part)[:40])
        raise RowError(where, f"content has {what}, and only parts of type 'text' with a text are read; fix the row")
    return {"type": kind, "text": text}
