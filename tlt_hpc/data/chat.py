"""Writes messages as the model's chat template has it, to the letter as transformers does, without that package.

Held against it in tests. Templates come with models from anywhere, so they run in jinja2's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tlt_hpc.config import ConfigError, DataSection
from tlt_hpc.data.rows import first_line
from tlt_hpc.records import ChatFormat

Message = Mapping[str, Any]


class ChatError(ValueError):
    """A template refuses these messages; its text is the reason."""


class ChatTemplate:
    """A model's chat template, with the date that it may write."""

    def __init__(self, text: str, special_tokens: Mapping[str, str], today: date, origin: str) -> None:
        """Compile.

        Raises:
            ConfigError: ``text``, which is ``origin``'s, is no Jinja.
        """
        self.text, self._special_tokens = text, dict(special_tokens)
        try:
            self._template = _environment(today).from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{origin}: the chat template is no Jinja (line {error.lineno}: {error.message}); mend it or give "
                "another in data.chat_template"
            ) from None

    def render(self, messages: Sequence[Message]) -> str:
        """The messages, and the beginning of the answer.

        Raises:
            ChatError: the template refuses them.
        """
        try:
            return self._template.render(
                messages=[_with_reasoning(message) for message in _plain(messages)],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, LookupError, AttributeError, ArithmeticError, ValueError) as error:
            raise ChatError(first_line(error)) from None


def read_template(data: DataSection, chat: ChatFormat) -> ChatTemplate | None:
    """The template that the configuration names, or the model's own; None where there is none.

    Raises:
        ConfigError: no such file, or no Jinja.
    """
    text, origin = chat.template, "the model folder"
    if data.chat_template != "auto":
        text, origin = _read(Path(data.chat_template)), f"data.chat_template = {data.chat_template!r}"
        if not text.strip():
            raise ConfigError(f"{origin} is empty; give a file of Jinja or 'auto'")
    if not text:
        return None
    return ChatTemplate(text, dict(chat.special_tokens), date.fromisoformat(data.template_date), origin)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"data.chat_template = {str(path)!r}: {error.strerror}; give a file of Jinja or 'auto'"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"data.chat_template = {str(path)!r} is not UTF-8; give a file of Jinja or 'auto'") from None


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies that hold nothing but JSON's types: methods of others could be called from a template."""
    text = json.dumps([*map(dict, messages)], default=lambda value: f"<{type(value).__name__}>")
    plain: list[dict[str, Any]] = json.loads(text)
    return plain


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning under the names that templates read, as transformers has it."""
    found = (message.get(name) for name in ("reasoning_content", "thinking", "reasoning"))
    reasoning = next((text for text in found if text is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _environment(today: date) -> ImmutableSandboxedEnvironment:
    """What transformers' ``_compile_jinja_template`` offers a template, but for the date, which is fixed."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    noon = datetime.combine(today, time(12))
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = noon.strftime
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without the escapes for HTML of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Dict:
    """What of the type ``dict`` a template may have: its attributes would lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's, but for names by which a template could leave the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `namespace(self=1)` is no error
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace takes no name with an underscore in front, but got {name!r}"
        )


class _Generation(Extension):
    """``{% generation %}``, with which templates mark what training learns from: here its body and no more."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
