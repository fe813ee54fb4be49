"""The process that renders chat templates: the home of jinja2 among data.

Templates come with models from anywhere. jinja2's sandbox keeps them from the system, this process's limits from all of
a node's time and memory. On stdin there is a line of JSON for each request, on stdout one for each answer:
``{"rendered"}``, ``{"refused"}`` by the template, ``{"exceeded"}`` a limit, or ``{"syntax"}``: it is no Jinja.
Imports nothing else of the package, so that it starts at once.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import date, datetime, time
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 2.0
"""For a request; a usual one takes a tenth of a millisecond. Of CPU time, so that no prompt depends on the load."""
MEMORY_BYTES = 2**30
MOST_CHARACTERS = 2**24
"""Of a prompt: more than any model reads."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What comes of a request: ``text`` compiled, and ``messages`` rendered by it unless they are null."""
    try:
        template = _compiled(request["text"], request["today"])
    except jinja2.TemplateSyntaxError as error:
        return {"syntax": f"line {error.lineno}: {error.message}"}
    except (MemoryError, RecursionError, SyntaxError, ValueError, OverflowError) as error:  # of what it compiles to
        return {"syntax": _said(error)}
    if request["messages"] is None:
        return {"rendered": ""}
    try:
        rendered = template.render(
            messages=[_with_reasoning(message) for message in request["messages"]],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **request["tokens"],
        )
    except (jinja2.TemplateError, TypeError, LookupError, AttributeError, ArithmeticError, ValueError) as error:
        return {"refused": _said(error)}
    except RecursionError:
        return {"exceeded": "calls itself without end"}
    except MemoryError:
        return {"exceeded": f"takes over {MEMORY_BYTES} bytes of memory"}
    if len(rendered) > MOST_CHARACTERS:
        return {"refused": f"it writes {len(rendered)} characters, and at most {MOST_CHARACTERS} are read"}
    return {"rendered": rendered}


def main() -> None:
    """Answer until stdin ends; a request that takes too long ends the process by SIGPROF."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        answered = json.dumps(answer(json.loads(line))).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answered + b"\n")
        sys.stdout.buffer.flush()


def _said(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")[:300] or type(error).__name__


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning under the names that templates read, as transformers has it."""
    found = (message.get(name) for name in ("reasoning_content", "thinking", "reasoning"))
    reasoning = next((text for text in found if text is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


@lru_cache(maxsize=4)
def _compiled(text: str, today: str) -> jinja2.Template:
    return _environment(date.fromisoformat(today)).from_string(text)


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


if __name__ == "__main__":
    main()
