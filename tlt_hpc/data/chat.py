"""Renders lists of messages with the model's chat template, as transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from tlt_hpc.common.files import DamagedText, decode_utf8, read_bytes
from tlt_hpc.common.records import ChatFormat
from tlt_hpc.config import CONTINUES, ConfigError, DataSection
from tlt_hpc.data.rows import first_line

Message = Mapping[str, Any]
TEMPLATE_DATE = "2024-07-26"
"""The date that templates get as today's, Llama 3.1's default, so that no prompt depends on the day of the run."""
_MAX_BYTES = 2**20
"""Largest template; the longest of known models has 20 KB."""


_MARK = "MARK"
"""A message whose place in the rendered text tells what a template does with it."""
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the text that is continued; its space tells whether the template trims the message."""


class ChatError(ValueError):
    """A template refuses these messages; its text is the reason."""


class ChatTemplate:
    """A model's chat template, compiled by transformers in Jinja's sandbox, but with a fixed date."""

    def __init__(
        self, text: str, special_tokens: Mapping[str, str], origin: str, args: Mapping[str, Any] | None = None
    ) -> None:
        """Compile the template; ``origin`` names it in errors, ``args`` are the user's.

        Raises:
            ConfigError: it is no Jinja.
        """
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        self.text = text
        self.args = {name: value for name, value in (args or {}).items() if name != CONTINUES}
        today = datetime.fromisoformat(TEMPLATE_DATE)
        fixed = {"strftime_now": today.strftime, "tools": None, "documents": None}
        self._values = {**special_tokens, **fixed, **self.args}
        try:
            self._template = _compile_jinja_template(text)
        except (TemplateSyntaxError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise ConfigError(
                f"{origin}: the chat template is no Jinja ({first_line(error)})",
                "fix it or give another in data.chat_template",
            ) from None

    @property
    def unknown_args(self) -> list[str]:
        """The user's arguments that the template does not read; Jinja says nothing of them."""
        from jinja2 import meta

        return sorted(self.args.keys() - meta.find_undeclared_variables(self._template.environment.parse(self.text)))

    def render(self, messages: Sequence[Message]) -> str:
        """The messages and the beginning of the answer, or up to the end of the assistant's message that is last.

        Raises:
            ChatError: the template refuses them, or leaves out what is to be continued.
        """
        # JSON's types alone: methods of other types could be called from a template
        plain = json.loads(json.dumps(list(messages), default=lambda value: f"<{type(value).__name__}>"))
        chat = [_with_reasoning(message) for message in plain]
        if any(isinstance(message["content"], list) for message in chat) and not self._reads_parts:
            chat = [{**message, "content": _join_content_parts(message["content"])} for message in chat]
        return self._render_to_continue(chat) if chat[-1]["role"] == "assistant" else self._render_template(chat, True)

    def turn_end(self) -> str:
        """The text that the template writes after the assistant's last message; empty if it leaves the message out."""
        try:
            text = self._render_template([*_one_user_message("A"), {"role": "assistant", "content": _MARK}], False)
        except ChatError:
            return ""
        _, mark, end = text.rpartition(_MARK)
        return end if mark else ""

    @cached_property
    def _reads_parts(self) -> bool:
        """True if the template writes the texts of a list of parts; many write it as a list of Python."""
        try:
            text = self._render_template(_one_user_message([{"type": "text", "text": _MARK}]), True)
        except ChatError:
            return False
        return _MARK in text and not any(f"{quote}{_MARK}{quote}" in text for quote in "'\"")

    def _render_to_continue(self, chat: list[dict[str, Any]]) -> str:
        """The chat up to the end of its last message, as with transformers' ``continue_final_message``."""
        content = chat[-1]["content"]
        last = content[-1]["text"] if isinstance(content, list) else content
        marked = f"{last}{_CONTINUED}"
        content = [*content[:-1], {**content[-1], "text": marked}] if isinstance(content, list) else marked
        text = self._render_template([*chat[:-1], {**chat[-1], "content": content}], False)
        end = text.rfind(_CONTINUED.strip())
        if end < 0 or last.strip() not in text:
            raise ChatError("it leaves out some of the assistant's message that is to be continued")
        # without the mark's own space the template trims messages
        return text[:end] if text.startswith(_CONTINUED, end) else text[:end].rstrip()

    def _render_template(self, chat: list[dict[str, Any]], has_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            return str(self._template.render(messages=chat, add_generation_prompt=has_prompt, **self._values))
        except (TemplateError, TypeError, LookupError, AttributeError, ArithmeticError, ValueError) as error:
            raise ChatError(first_line(error)) from None
        except (RecursionError, MemoryError) as error:
            raise ChatError(f"{type(error).__name__} {first_line(error)}") from None


def read_template(data: DataSection, chat: ChatFormat) -> ChatTemplate | None:
    """The template that the configuration names, or the model's own; None if there is none.

    Raises:
        ConfigError: no such file, or no Jinja.
    """
    if data.chat_template == "auto":
        names = dict(chat.special_tokens)
        return ChatTemplate(chat.template, names, "the model folder", data.template_args) if chat.template else None
    origin, remedy = f"data.chat_template = {data.chat_template!r}", "give a file of Jinja or 'auto'"
    try:
        text = decode_utf8(read_bytes(Path(data.chat_template), _MAX_BYTES))
    except OSError as error:
        raise ConfigError(f"{origin}: {error.strerror}", remedy) from None
    except DamagedText as error:
        raise ConfigError(f"{origin} is not UTF-8 ({error})", remedy) from None
    if not text.strip():
        raise ConfigError(f"{origin} is empty", remedy)
    return ChatTemplate(text, dict(chat.special_tokens), origin, data.template_args)


def _one_user_message(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def _join_content_parts(content: str | list[dict[str, str]]) -> str:
    """The text of a message's parts, as templates that read parts write them."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the names that templates read, as in transformers."""
    found = (message.get(name) for name in ("reasoning_content", "thinking", "reasoning"))
    reasoning = next((text for text in found if text is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
