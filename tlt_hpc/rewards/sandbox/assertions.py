"""The run of a data set's assertions, with the program's functions answering from another process.

The program never sees an assertion, nor what it compares with; what comes from it is builtin values. Runs behind the
same limits as the program does: assertions were written by others, too.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from tlt_hpc.rewards.sandbox.values import decode, encode

_MAX_REPLY_BYTES = 4 * 2**20
_MODULES = ("math", "re", "collections", "itertools", "functools", "heapq", "string", "datetime", "cmath", "operator")
"""Known to assertions without an import, as data sets expect."""


def run_assertions(assertions: Sequence[str], replies: BinaryIO, calls: BinaryIO) -> None:
    """Run all of them in one namespace.

    Raises:
        Exception: an assertion does not hold, or the program has not answered as it needs.
    """
    namespace: dict[str, Any] = {"__name__": "assertions"}
    for text in assertions:
        tree = ast.parse(text)
        for name in _free_names(tree) - set(namespace):
            namespace[name] = importlib.import_module(name) if name in _MODULES else _remote(name, replies, calls)
        exec(compile(tree, "assertions.py", "exec"), namespace)


def _free_names(tree: ast.Module) -> set[str]:
    """Names that the text reads and does not make: the program's functions, and modules."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    made = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).split(".")[0])
    return {node.id for node in names} - made - set(dir(builtins))


def _remote(name: str, replies: BinaryIO, calls: BinaryIO) -> Callable[..., Any]:
    """A function of the program: arguments go over as values, and so does what it returns."""

    def function(*arguments: Any, **named: Any) -> Any:
        calls.write(encode((name, arguments, named)).encode() + b"\n")
        calls.flush()
        line = replies.readline(_MAX_REPLY_BYTES)
        if not line.endswith(b"\n"):
            raise ValueError(f"{name} has not answered")
        return decode(line.decode())

    return function
