"""Renders lists of messages with the model's chat template, as transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tlt_hpc.common.files import read_bytes
from tlt_hpc.common.records import ChatFormat
from tlt_hpc.config import ConfigError, DataSection
from tlt_hpc.data.rows import first_line

Message = Mapping[str, Any]
TEMPLATE_DATE = "2024-07-26"
"""The date that templates get as today's, Llama 3.1's default, so that no prompt depends on the day of the run."""
_MAX_BYTES = 2**20
"""Largest template; the longest of known models has 20 KB."""


class ChatError(ValueError):
    """A template refuses these messages; its text is the reason."""


class ChatTemplate:
    """A model's chat template, compiled by transformers in Jinja's sandbox, but with a fixed date."""

    def __init__(self, text: str, special_tokens: Mapping[str, str], origin: str) -> None:
        """Compile the template; ``origin`` names it in errors.

        Raises:
            ConfigError: it is no Jinja.
        """
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        self.text = text
        today = datetime.fromisoformat(TEMPLATE_DATE)
        self._values = {**special_tokens, "strftime_now": today.strftime, "tools": None, "documents": None}
        try:
            self._template = _compile_jinja_template(text)
        except (TemplateSyntaxError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise ConfigError(
                f"{origin}: the chat template is no Jinja ({first_line(error)}); fix it or give another in "
                "data.chat_template"
            ) from None

    def render(self, messages: Sequence[Message]) -> str:
        """The messages, and the beginning of the answer.

        Raises:
            ChatError: the template refuses them.
        """
        from jinja2 import TemplateError

        # JSON's types alone: methods of other types could be called from a template
        plain = json.loads(json.dumps(list(messages), default=lambda value: f"<{type(value).__name__}>"))
        chat = [_with_reasoning(message) for message in plain]
        try:
            return str(self._template.render(messages=chat, add_generation_prompt=True, **self._values))
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
        return ChatTemplate(chat.template, dict(chat.special_tokens), "the model folder") if chat.template else None
    origin, remedy = f"data.chat_template = {data.chat_template!r}", "give a file of Jinja or 'auto'"
    try:
        text = read_bytes(Path(data.chat_template), _MAX_BYTES).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{origin}: {error.strerror}; {remedy}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{origin} is not UTF-8; {remedy}") from None
    if not text.strip():
        raise ConfigError(f"{origin} is empty; {remedy}")
    return ChatTemplate(text, dict(chat.special_tokens), origin)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the names that templates read, as in transformers."""
    found = (message.get(name) for name in ("reasoning_content", "thinking", "reasoning"))
    reasoning = next((text for text in found if text is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
