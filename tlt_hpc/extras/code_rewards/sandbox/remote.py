"""Objects of a program as its tests have them, in another sandbox than the program.

What a test compares with must not reach the program. So operations with arguments are forwarded only where the test
expects an object: of a class that the test calls by a name with a capital, and of what that gives. What functions and
methods of ``Solution`` return is a plain value, or can only be called, iterated over, counted or printed.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from tlt_hpc.extras.code_rewards.sandbox.values import exception_class, from_literal, to_literal

ENTRY = ""
"""The function of a program that its tests do not name: no function has this name."""
_MAX_REPLY_CHARACTERS = 4 * 2**20
_OF_VALUES = frozenset(name for kind in (str, list, dict, set, int, float, bytes) for name in dir(kind))


class NotSentError(Exception):
    """A test hands the program what cannot be sent to it."""


class Link:
    """The connection to a program, which counts what it answered."""

    def __init__(self, replies: TextIO, calls: TextIO) -> None:
        self._replies, self._calls = replies, calls
        self.num_answers, self.is_silent = 0, False
        self._made: dict[int, Remote] = {}

    def request_object(self, name: str, spare: Mapping[str, Any]) -> Any:
        """The program's object of this name, or that of ``spare`` if the program has none.

        Raises:
            SystemExit: neither has it.
        """
        is_class = name[:1].isupper()
        level, below = 2 if is_class else 0, 1 if is_class and name != "Solution" else 0
        find = functools.partial(Remote, self, level=level, below=below, makes=is_class)
        kind, value, _ = self._send_and_receive("name", (name,), {}, find)
        if kind == "missing":
            if name not in spare:
                self._exit_silent(f"the program has no {name!r}" if name else "the program has no function")
            return spare[name]
        self.num_answers += not isinstance(value, Remote | type)
        return value

    def request_operation(self, operation: str, of: Remote, /, *given: Any, **named: Any) -> Any:
        """The result of an operation of the program's on an object of its.

        Raises:
            Exception: the program raised it.
            NotSentError: an argument cannot be sent.
            SystemExit: it did not answer.
        """
        find = functools.partial(self._remote_object, of, operation)
        kind, value, changed = self._send_and_receive(operation, (of, *given), named, find)
        self.num_answers += 1
        for place, content in changed.items():
            _replace_content(given[place - 1], content)
        if kind == "raised":
            classes, arguments = value
            kind = exception_class(*classes)
            if issubclass(kind, StopIteration) and operation != "next":
                kind = RuntimeError  # it would end an iteration of the test's own, such as that of map
            raise kind(*arguments)
        return value

    def _send_and_receive(self, operation: str, given: tuple[Any, ...], named: dict[str, Any], find: Any) -> Any:
        try:
            line = to_literal((operation, given, named), object_number)
        except ValueError as error:
            raise NotSentError(str(error)) from None
        self._calls.write(line + "\n")
        self._calls.flush()
        reply = self._replies.readline(_MAX_REPLY_CHARACTERS)
        if not reply.endswith("\n"):
            self._exit_silent("the program did not answer")
        return from_literal(reply, find)

    def _remote_object(self, of: Remote, operation: str, number: int) -> Remote:
        """An object in a result: what a test made itself keeps its rights."""
        if operation == "call" and of._makes:
            return self._made.setdefault(number, Remote(self, number, 2, of._below))
        known = self._made.get(number) if of._below else None
        return known or Remote(self, number, of._below, of._below)

    def _exit_silent(self, reason: str) -> None:
        self.is_silent = True  # whatever handles the exit
        sys.exit(reason)


class Remote:
    """An object of the program's.

    Args:
        level: 0: it can be called and looked at without arguments; 1: it has attributes, but those that values have
            too; 2: all of them, and operators.
        below: the level of what its calls and attributes give.
        makes: whether its calls give objects of level 2.
    """

    def __init__(self, link: Link, number: int, level: int, below: int, makes: bool = False) -> None:
        vars(self).update(_link=link, _number=number, _level=level, _below=below, _makes=makes)

    def __call__(self, /, *given: Any, **named: Any) -> Any:
        return self._link.request_operation("call", self, *given, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._level == 0 or (self._level == 1 and name in _OF_VALUES):
            raise AttributeError(f"{name!r} of an object of the program's")
        return self._link.request_operation("get", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._link.request_operation("set", self, name, value)

    def __hash__(self) -> int:
        return object_number(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Remote) or 0 in (self._level, other._level):
            return self is other
        return bool(self._link.request_operation("==", self, other))


def _replace_content(collection: Any, content: Any) -> None:
    """Change a collection as the program has changed its own."""
    assert type(collection) is type(content)
    collection.clear()
    (collection.extend if isinstance(collection, list | deque) else collection.update)(content)


def object_number(value: Any) -> int:
    """The number of an object of the program's.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, Remote):
        raise ValueError(f"a {type(value).__name__} cannot be handed to the program")
    number: int = vars(value)["_number"]
    return number


def _unary_operator(operation: str) -> Callable[[Remote], Any]:
    return lambda self: self._link.request_operation(operation, self)


def _guarded_operator(operation: str) -> Callable[..., Any]:
    def operate(self: Remote, *given: Any) -> Any:
        is_comparison = operation in ("<", "<=", ">", ">=")
        if self._level < 2 or (is_comparison and not isinstance(given[0], Remote)):
            raise TypeError(f"{operation} with an object of the program's")
        return self._link.request_operation(operation, self, *given)

    return operate


for _name in ("str", "repr", "len", "bool", "iter", "next"):
    setattr(Remote, f"__{_name}__", _unary_operator(_name))
for _name, _operation in {
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "add": "+", "sub": "-", "mul": "*", "truediv": "/", "neg": "neg",
    "contains": "in", "getitem": "item", "setitem": "set item", "instancecheck": "is instance",
    "subclasscheck": "is subclass", "enter": "enter", "exit": "exit",
}.items():  # fmt: skip
    setattr(Remote, f"__{_name}__", _guarded_operator(_operation))
