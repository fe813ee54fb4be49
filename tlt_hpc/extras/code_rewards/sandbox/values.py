"""Values as lines of text between two sandboxes: Python literals, so whatever a class pretends, builtin types arrive.

What has no literal is a dict with one key, ``_MARK``: its kind and its content. A program that writes such a dict by
itself gets what it could have returned anyway.
"""

from __future__ import annotations

import ast
import builtins
import math
import sys
from collections import deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import cache
from itertools import takewhile
from typing import Any

_MARK = "\0"
_TEXTS: dict[str, Any] = {"Fraction": Fraction, "Decimal": Decimal, "datetime": datetime, "date": date, "time": time}
"""Classes whose values are read from their texts, before those that they are derived from."""
Refer = Callable[[Any], int]
Find = Callable[[int], Any]


def to_literal(value: Any, refer: Refer | None = None) -> str:
    """A value as one line for ``from_literal``; a subclass of a builtin type becomes that type.

    Args:
        refer: the number to give for an object of another type.

    Raises:
        ValueError: it contains an object of another type, and there is no ``refer``.
    """
    if value is None or isinstance(value, bool):
        return repr(value)
    for number in (int, float, complex):
        if isinstance(value, number):
            text: str = number.__repr__(value)  # type: ignore[arg-type]
            return text.replace("inf", "1e999") if "nan" not in text else _marked_literal("number", repr(text))
    for plain in (str, bytes):
        if isinstance(value, plain):
            return plain.__repr__(value)  # type: ignore[arg-type]
    if isinstance(value, dict):
        return (
            f"{{{''.join(f'{to_literal(key, refer)}:{to_literal(item, refer)},' for key, item in dict.items(value))}}}"
        )
    for kind, (left, right) in ((list, "[]"), (tuple, "()"), (set, "{}"), (frozenset, "{}")):
        if isinstance(value, kind):
            items = "".join(f"{to_literal(item, refer)}," for item in kind.__iter__(value))  # type: ignore[arg-type]
            return f"{left}{items}{right}" if items or left != "{" else "set()"
    return _other_to_literal(value, refer)


def numpy_to_python(value: Any) -> Any:
    """A number or an array of numpy's as Python has it.

    Raises:
        TypeError: it is neither.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic | numpy.ndarray):
        raise TypeError(f"a {type(value).__name__} is no JSON")
    return value.tolist()


def from_literal(line: str, find: Find | None = None) -> Any:
    """The value that ``to_literal`` wrote.

    Args:
        find: the object with a number.

    Raises:
        ValueError, SyntaxError, TypeError, KeyError: the line is none of its.
    """
    value = ast.literal_eval(line)
    return _restore_marked(value, find) if "\\x00" in line else value


def _other_to_literal(value: Any, refer: Refer | None) -> str:
    for name, kind in _TEXTS.items():
        if isinstance(value, kind):
            return _marked_literal(name, repr(kind.__str__(value)))
    if isinstance(value, timedelta):
        return _marked_literal("timedelta", repr((value.days, value.seconds, value.microseconds)))
    if isinstance(value, deque):
        return _marked_literal("deque", to_literal((list(value), value.maxlen), refer))
    if isinstance(value, range):
        return _marked_literal("range", repr((value.start, value.stop, value.step)))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return to_literal(value.item(), refer)
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufcU":
        return _marked_literal("array", f"({to_literal(value.tolist(), refer)},{value.dtype.str!r})")
    if isinstance(value, type) and issubclass(value, Exception):
        return _marked_literal("exception", repr(exception_class_names(value)))
    if refer is None:
        raise ValueError(f"a {type(value).__name__} cannot leave the sandbox")
    return _marked_literal("object", repr(refer(value)))


def exception_class_names(kind: type[BaseException]) -> list[str]:
    """Names of a class of exceptions and its bases, up to the first that is Python's own."""
    own = takewhile(lambda each: each.__module__ != "builtins", kind.__mro__)
    python = next(each for each in kind.__mro__ if each.__module__ == "builtins")
    return [*(each.__name__ for each in own), python.__name__]


@cache
def exception_class(*names: str) -> type[Exception]:
    """The class of these names: the first derived from the second, and so on to Python's own.

    Raises:
        ValueError: the last is no class of exceptions of Python's.
    """
    if len(names) > 1:
        return type(names[0], (exception_class(*names[1:]),), {})
    found = getattr(builtins, names[0], None)
    if not (isinstance(found, type) and issubclass(found, Exception)):
        raise ValueError(f"no class of exceptions {names[0]!r}")
    return found


def _marked_literal(kind: str, content: str) -> str:
    return f"{{{_MARK!r}:({kind!r},{content})}}"


def _restore_marked(value: Any, find: Find | None) -> Any:
    if isinstance(value, dict):
        if _MARK in value:
            kind, content = value[_MARK]
            return _restore_value(kind, _restore_marked(content, find), find)
        return {key: _restore_marked(item, find) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_restore_marked(item, find) for item in value)
    return value


def _restore_value(kind: str, content: Any, find: Find | None) -> Any:
    match kind:
        case "number":
            return complex(content) if content.endswith(("j", ")")) else math.nan
        case "Fraction" | "Decimal":
            return _TEXTS[kind](content)
        case "datetime" | "date" | "time":
            return _TEXTS[kind].fromisoformat(content)
        case "timedelta":
            return timedelta(*content)
        case "deque":
            return deque(*content)
        case "range":
            return range(*content)
        case "array":
            return sys.modules["numpy"].array(*content)
        case "exception":
            return exception_class(*content)
    if find is None:
        raise ValueError("an object of one of the program's classes")
    return find(content)
