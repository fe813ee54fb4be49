"""Runs a data set's assertions, with the program's functions answering from another sandbox.

The program never sees an assertion nor what it compares with. The two processes exchange lines of Python literals, so
an assertion compares values of builtin types, whatever a class of the program pretends. The assertions have the same
limits as the program: others wrote them too.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, TextIO

_MAX_REPLY_CHARACTERS = 4 * 2**20
_MODULES = ("math", "re", "collections", "itertools", "functools", "heapq", "string", "datetime", "cmath", "operator")
"""Known to assertions without an import, as data sets expect."""


class _Names(dict[str, Any]):
    """The names of assertions; one that they do not define is the program's function, or a module."""

    def __init__(self, replies: TextIO, calls: TextIO) -> None:
        self._replies, self._calls = replies, calls

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or hasattr(builtins, name):
            raise KeyError(name)
        self[name] = importlib.import_module(name) if name in _MODULES else partial(self._call, name)
        return self[name]

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        self._calls.write(literal((name, arguments, named)) + "\n")
        self._calls.flush()
        line = self._replies.readline(_MAX_REPLY_CHARACTERS)
        if not line.endswith("\n"):
            sys.exit(f"{name} did not answer")  # past any handler of the assertions
        return ast.literal_eval(line)


def run_assertions(assertions: Sequence[str], replies: TextIO, calls: TextIO) -> None:
    """Run all of them in one namespace.

    Raises:
        Exception: an assertion does not hold.
        SystemExit: the program did not answer a call.
    """
    names = _Names(replies, calls)
    for text in assertions:
        exec(compile(text, "assertions.py", "exec", dont_inherit=True), names)


def literal(value: Any) -> str:
    """A value as one line that ``ast.literal_eval`` reads; a subclass of a builtin type becomes that type.

    Raises:
        ValueError: it contains a value of another type.
    """
    if value is None or isinstance(value, bool):
        return repr(value)
    for number in (int, float, complex):
        if isinstance(value, number):
            return number.__repr__(value).replace("inf", "1e999")  # type: ignore[arg-type]
    for text in (str, bytes):
        if isinstance(value, text):
            return text.__repr__(value)  # type: ignore[arg-type]
    if isinstance(value, dict):
        return f"{{{''.join(f'{literal(key)}:{literal(item)},' for key, item in dict.items(value))}}}"
    for kind, (left, right) in ((list, "[]"), (tuple, "()"), (set, "{}"), (frozenset, "{}")):
        if isinstance(value, kind):
            items = "".join(f"{literal(item)}," for item in kind.__iter__(value))  # type: ignore[arg-type]
            return f"{left}{items}{right}" if items or left != "{" else "set()"
    raise ValueError(f"a {type(value).__name__} cannot leave the sandbox")
