"""A program's side of its tests: finds what they name, and does what they ask for."""

from __future__ import annotations

import inspect
import operator
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from tlt_hpc.extras.code_rewards.sandbox.attempt import Attempt
from tlt_hpc.extras.code_rewards.sandbox.remote import ENTRY
from tlt_hpc.extras.code_rewards.sandbox.values import exception_class_names, from_literal, to_literal

_Reply = tuple[str, Any, dict[int, Any]]
"""What kind of answer it is, the answer, and arguments that have changed."""
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, /, *given, **named: function(*given, **named),
    "get": getattr, "set": setattr, "str": str, "repr": repr, "len": len, "bool": bool, "iter": iter, "next": next,
    "==": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "+": operator.add,
    "-": operator.sub, "*": operator.mul, "/": operator.truediv, "neg": operator.neg, "in": operator.contains,
    "item": operator.getitem, "set item": operator.setitem,
    "is instance": lambda kind, each: isinstance(each, kind), "is subclass": lambda kind, each: issubclass(each, kind),
    "enter": lambda each: each.__enter__(), "exit": lambda each, *_: each.__exit__(None, None, None),
}  # fmt: skip


class Objects:
    """The program's objects that tests have, by number."""

    def __init__(self) -> None:
        self._objects = list[Any]()
        self._numbers = dict[int, int]()

    def register(self, value: Any) -> int:
        """The object's number, from now on."""
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)  # kept, so that no other object gets its id
        return number

    def __getitem__(self, number: int) -> Any:
        return self._objects[number]


def serve(module: types.ModuleType, calls: TextIO, replies: TextIO) -> None:
    """Answer what tests ask, one line each, until they end."""
    objects = Objects()
    for line in calls:
        operation, given, named = from_literal(line, objects.__getitem__)
        if operation == "name":
            reply = _reply_of_name(module, given[0])
        else:
            value = None
            with Attempt(Exception) as attempt:
                value = _OPERATIONS[operation](*given, **named)
            changed = _changed_arguments(given, from_literal(line, objects.__getitem__)[1])
            reply = _exception_reply(attempt.error) if attempt.error else ("value", value, changed)
        replies.write(to_literal(reply, objects.register) + "\n")
        replies.flush()


def find_object(module: types.ModuleType, name: str) -> Any:
    """The program's object of this name: its own, or a method of its class ``Solution``, as in LeetCode's tests.

    Raises:
        KeyError: it has nothing of this name.
    """
    names = vars(module)
    if name == ENTRY:
        return _entry_function(module)
    if hasattr(names.get("Solution"), name) and not name.startswith("__"):
        # the program's own class: what it has is known only now
        return getattr(names["Solution"](), name)
    return names[name]


def _reply_of_name(module: types.ModuleType, name: str) -> _Reply:
    try:
        return "value", find_object(module, name), {}
    except KeyError:
        return "missing", None, {}


def _exception_reply(error: BaseException) -> _Reply:
    try:
        to_literal(error.args)
    except ValueError:
        return "raised", (exception_class_names(type(error)), (str(error),)), {}
    return "raised", (exception_class_names(type(error)), error.args), {}


def _changed_arguments(given: Sequence[Any], before: Sequence[Any]) -> dict[int, Any]:
    """Collections among the arguments that a call has changed, by place."""
    changed = {}
    for place, (now, then) in enumerate(zip(given, before, strict=True)):
        if type(now) in (list, dict, set, deque):
            is_same = False
            with Attempt(ValueError):  # arrays have no truth
                is_same = bool(now == then)
            if not is_same:
                changed[place] = now
    return changed


def _entry_function(module: types.ModuleType) -> Any:
    """The last function, or method of ``Solution``, that no other one calls.

    Raises:
        KeyError: there is no function.
    """
    solution = vars(module).get("Solution")
    names = vars(module) if solution is None else vars(solution)
    own = {name: each for name, each in names.items() if _is_own_function(each, module) and not name.startswith("_")}
    called = {used for name, each in own.items() for used in _used_names(each) if used != name}
    free = [name for name in own if name not in called] or list(own)
    if not free:
        raise KeyError(ENTRY)
    return find_object(module, free[-1]) if solution is None else getattr(solution(), free[-1])


def _is_own_function(each: Any, module: types.ModuleType) -> bool:
    each = getattr(each, "__func__", each)  # a static method
    return callable(each) and not isinstance(each, type) and getattr(each, "__module__", "") == module.__name__


def _used_names(function: Any) -> set[str]:
    codes, used = [getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)], set[str]()
    while codes:
        code = codes.pop()
        if isinstance(code, types.CodeType):
            used |= {*code.co_names}
            codes += code.co_consts
    return used
