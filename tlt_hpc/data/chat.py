"""Writes messages as the model's chat template has it, to the letter as transformers does, without that package.

Held against it in tests. Templates are compiled and rendered in a process of their own with limits (``rendering``).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tlt_hpc.common.files import read_bytes
from tlt_hpc.common.records import ChatFormat
from tlt_hpc.config import ConfigError, DataSection
from tlt_hpc.data import rendering

Message = Mapping[str, Any]
TEMPLATE_DATE = "2024-07-26"
"""The date that templates write as today's, Llama 3.1's own, so that no prompt depends on the day of the run."""
_MOST_BYTES = 2**20
"""Of a template; the longest of known models has 20 KB."""


class ChatError(ValueError):
    """A template refuses these messages; its text is the reason."""


class ChatTemplate:
    """A model's chat template, with the date that it may write."""

    def __init__(self, text: str, special_tokens: Mapping[str, str], today: str, origin: str) -> None:
        """Compile.

        Raises:
            ConfigError: ``text``, which is ``origin``'s, is no Jinja, or takes too long.
        """
        self.text, self._origin = text, origin
        self._request = {"text": text, "tokens": dict(special_tokens), "today": today}
        if (reason := self._ask(None).get("syntax")) is not None:
            raise ConfigError(
                f"{origin}: the chat template is no Jinja ({reason}); mend it or give another in data.chat_template"
            )

    def render(self, messages: Sequence[Message]) -> str:
        """The messages, and the beginning of the answer.

        Raises:
            ChatError: the template refuses them.
            ConfigError: it takes too much time or memory.
        """
        answer = self._ask([*map(dict, messages)])
        if "rendered" not in answer:
            raise ChatError(answer["refused"])
        return answer["rendered"]

    def _ask(self, messages: list[dict[str, Any]] | None) -> dict[str, str]:
        """Send nothing but JSON's types: methods of others could be called from a template."""
        request = json.dumps({**self._request, "messages": messages}, default=lambda v: f"<{type(v).__name__}>")
        answer = _renderer(os.getpid()).ask(request.encode())
        if (reason := answer.get("exceeded")) is not None:
            raise ConfigError(f"{self._origin}: the chat template {reason}; give another in data.chat_template")
        return answer


class _Renderer:
    """The process that renders, started by exec, which copies nothing of this one; again after a template killed it."""

    def __init__(self) -> None:
        self._start()

    def ask(self, request: bytes) -> dict[str, str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(request + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if line:
            answer: dict[str, str] = json.loads(line)
            return answer
        status = self._process.wait()
        self._start()
        limit = f"takes over {rendering.CPU_SECONDS:g} s of CPU time"
        return {"exceeded": limit if status == -signal.SIGPROF else f"ends its process with status {status}"}

    def _start(self) -> None:
        self._process = subprocess.Popen(
            # by its file, wherever this process stands; -P: its neighbours have names of the standard library
            [sys.executable, "-P", rendering.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the job; this one ends with its stdin
        )


@lru_cache(maxsize=1)
def _renderer(pid: int) -> _Renderer:
    """This process's own: a fork must not talk to its parent's."""
    return _Renderer()


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
    return ChatTemplate(text, dict(chat.special_tokens), TEMPLATE_DATE, origin)


def _read(path: Path) -> str:
    try:
        return read_bytes(path, _MOST_BYTES).decode("utf-8")
    except OSError as error:
        raise ConfigError(
            f"data.chat_template = {str(path)!r}: {error.strerror}; give a file of Jinja or 'auto'"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"data.chat_template = {str(path)!r} is not UTF-8; give a file of Jinja or 'auto'") from None
