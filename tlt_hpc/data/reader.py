"""Turns rows into prompts, rendered and tokenized when they are asked for."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel, WordPiece

from tlt_hpc.common.records import ChatFormat, Prompt, answer_text
from tlt_hpc.config import ConfigError, DataSection
from tlt_hpc.data.chat import ChatError, ChatTemplate, read_template
from tlt_hpc.data.files import TRAINED, open_rows
from tlt_hpc.data.rows import Row, RowError
from tlt_hpc.models.tokenizer import control_token_ids

PromptCheck = Callable[[Prompt], str]
"""Gives the reason, in words, why no response to a prompt can be right; raises ValueError if it cannot be used."""


class OverlongError(RowError):
    """A prompt of more tokens than the limit."""

    def __init__(self, where: str, num_tokens: int, limit: int) -> None:
        super().__init__(
            where,
            f"prompt of {num_tokens} tokens, data.max_prompt_tokens = {limit}",
            "raise the limit, remove the row or set data.overlong = 'drop'",
        )


class PromptReader:
    """A data set's prompts by row. Without a tokenizer prompts have no tokens, and messages are not rendered.

    ``key`` names the data set in messages.

    Raises:
        ConfigError: no such file, or no such template.
    """

    def __init__(
        self,
        data: DataSection,
        tokenizer: Tokenizer | None,
        chat: ChatFormat | None = None,
        check: PromptCheck = lambda _: "",
        key: str = TRAINED,
    ) -> None:
        self.rows = open_rows(data, wanted_columns(data), key)
        self.source = f"{key} = {data.source_name!r}"
        """The data set in messages."""
        self.data, self._tokenizer, self._check = data, tokenizer, check
        self._unknown = unknown_id(tokenizer) if tokenizer else None
        self._chat = chat or ChatFormat()
        self._template = read_template(data, self._chat)
        self._has_rendered = False

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def template_digest(self) -> str:
        """SHA-256 of the chat template and its arguments, empty if there is none."""
        if self._template is None:
            return ""
        given = json.dumps(self._template.args, sort_keys=True) if self._template.args else ""
        return hashlib.sha256((self._template.text + given).encode()).hexdigest()

    @property
    def warning(self) -> str:
        """A line about the chat template, as far as the prompts that were read use it; empty: nothing is wrong."""
        used = self._template if self._has_rendered else None
        return "; ".join(filter(None, (self._args_warning(used), self._end_warning(used) if used else "")))

    def read(self, index: int) -> Prompt:
        """A row's prompt.

        Raises:
            RowError: the row is broken; ``OverlongError``: it is too long.
            ConfigError: the row is of a kind that the configuration does not provide for.
        """
        prompt = self.read_unlimited(index)
        if len(prompt.tokens) > self.data.max_prompt_tokens:
            raise OverlongError(self.rows.row_location(index), len(prompt.tokens), self.data.max_prompt_tokens)
        return prompt

    def read_unlimited(self, index: int) -> Prompt:
        """A row's prompt, whatever its length.

        Raises:
            RowError: the row is broken.
            ConfigError: as ``read``.
        """
        where = self.rows.row_location(index)
        row = split_row(self.rows[index], self.data, self.rows.kind, where)
        text = self._prompt_text(row.prompt, where)
        tokens = encode(self._tokenizer, text) if self._tokenizer else np.empty(0, np.int32)
        if self._tokenizer and not len(tokens):
            raise RowError(where, "prompt of 0 tokens; fix or remove the row")
        return Prompt(tokens, text, row.answer, row.source, row.extra)

    def find_row_problem(self, index: int, prompt: Prompt) -> str:
        """The reason why no response to a row that was read can be right, with the row's place; empty: one can.

        Raises:
            RowError: the row cannot be used.
        """
        try:
            problem = self._check(prompt)
        except ValueError as error:
            raise RowError(self.rows.row_location(index), f"{error}; fix or remove the row") from None
        return f"{self.rows.row_location(index)}: {problem}" if problem else ""

    def has_unknown_characters(self, prompt: Prompt) -> bool:
        """True if the tokenizer reads some of the prompt's characters as its token for unknown text."""
        return self._unknown is not None and bool((prompt.tokens == self._unknown).any())

    def missing_start_token(self, index: int) -> str:
        """The token that the tokenizer puts before every text, if a row's prompt does not begin with it; else empty."""
        assert self._tokenizer is not None, "prompts have no tokens"
        prompt = self.read_unlimited(index)
        first = self._tokenizer.encode(prompt.text).ids[0]
        return "" if first == prompt.tokens[0] else str(self._tokenizer.id_to_token(first))

    def _prompt_text(self, prompt: str | Messages, where: str) -> str:
        """The text that the model is fed."""
        if self._tokenizer is None:
            return prompt if isinstance(prompt, str) else json.dumps(prompt, default=str)
        system = self.data.system_prompt
        if isinstance(prompt, str):
            if self.data.text_prompts == "raw":
                if system:
                    raise ConfigError(
                        f"data.system_prompt is set, but the prompt of {where} is a text that is fed as it is; "
                        "set data.text_prompts = 'chat' or omit data.system_prompt"
                    )
                return prompt
            prompt = ({"role": "user", "content": prompt},)
        if system and prompt[0]["role"] != "system":
            prompt = ({"role": "system", "content": system}, *prompt)
        return self._render(prompt, where)

    def _render(self, messages: Messages, where: str) -> str:
        if self._template is None:
            raise ConfigError(
                f"{where}: the prompt is a list of messages, and the model folder has no chat template; "
                "give a file of Jinja in data.chat_template, or use prompts that are texts"
            )
        self._has_rendered = True
        try:
            return self._template.render(messages)
        except ChatError as error:
            raise RowError(where, f"the chat template refuses the messages: {error}; fix the row") from None

    def _args_warning(self, used: ChatTemplate | None) -> str:
        args = self.data.template_args
        if not args or self._tokenizer is None:
            return ""
        if used is None:
            return f"data.template_args = {args!r} has no effect: no prompt is rendered by a chat template"
        unknown = ", ".join(map(repr, used.unknown_args))
        return f"data.template_args: the chat template does not read {unknown}, which has no effect" if unknown else ""

    def _end_warning(self, used: ChatTemplate) -> str:
        """A line about a turn's end that does not end a response of this model."""
        assert self._tokenizer is not None, "nothing is rendered"
        control, ends = control_token_ids(self._tokenizer), self._chat.end_token_ids
        after = self._tokenizer.encode(used.turn_end(), add_special_tokens=False).ids
        end = next((token for token in after if token in control), None)
        if end is None or not ends or not set(ends).isdisjoint(after):
            return ""
        return (
            f"the chat template ends a turn with {self._tokenizer.id_to_token(end)!r}, which is no end token of the "
            f"model, so that responses run on to their largest length: add {end} to eos_token_id in "
            "generation_config.json of the model folder"
        )


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """The token that stands for text that the tokenizer does not know; tokenizers of bytes know all text."""
    model = tokenizer.model
    token = model.unk_token if isinstance(model, (BPE, WordLevel, WordPiece)) else None
    return None if token is None else tokenizer.token_to_id(token)


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """A text's tokens [P] as it is: marks such as a chat template's are in the text or nowhere."""
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)


# -- a row's prompt, answer and the rest: verl's schema, prompt and answer, or columns by name -------------------------

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
    paths = (*_column_paths(data.prompt_key, _PROMPT_COLUMNS), *_column_paths(data.answer_key, _ANSWER_COLUMNS))
    return frozenset(path.partition(".")[0] for path in paths) | {*_KEPT, "data_source", _TOOLS}


def split_row(row: Row, data: DataSection, kind: str, where: str) -> RowText:
    """The parts of a row; its source is ``kind`` if it names none.

    Raises:
        RowError: a prompt or answer is missing, null or of another type, or some of it cannot be written as UTF-8.
    """
    if row.get(_TOOLS) not in (None, "", "[]", "null", [], {}):
        raise RowError(where, f"has {_TOOLS!r}, and a run calls no tools; leave the column out or take other data")
    prompt = _as_prompt(_find_row_value(row, "prompt", _column_paths(data.prompt_key, _PROMPT_COLUMNS), where), where)
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant" and not data.continues_chats:
        raise RowError(  # as in data for supervised training, where it is the answer
            where,
            "the prompt ends with a message of the assistant, so with an answer; cut it off, or set "
            "data.template_args = {continue_final_message = true} if the response is to continue it",
        )
    answer = answer_of_row(row, data, where)
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


def answer_of_row(row: Row, data: DataSection, where: str) -> Any:
    """A row's answer.

    Raises:
        RowError: there is none.
    """
    return _find_row_value(row, "answer", _column_paths(data.answer_key, _ANSWER_COLUMNS), where)


def _column_paths(key: str, usual: tuple[str, ...]) -> tuple[str, ...]:
    return (key,) if key else usual


def _find_row_value(row: Row, what: str, paths: tuple[str, ...], where: str) -> Any:
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
        value = _parse_chat_text(value, where)
    if value in ("", []):
        raise RowError(where, "the prompt is empty; fix or remove the row")
    if not isinstance(value, str | list):
        raise RowError(where, f"the prompt is no text and no list of messages but {str(value)[:40]!r}; fix the row")
    if isinstance(value, str):
        return value
    return tuple(_as_message(message, f"{where}: message {number}") for number, message in enumerate(value))


def _parse_chat_text(text: str, where: str) -> str | list[Any]:
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
