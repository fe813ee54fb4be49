"""Runs a data set's tests, with the program's functions and classes answering from another sandbox.

The program never sees a test nor what it compares with. The two processes exchange lines (``values.py``), so a test
compares values of builtin types, whatever a class of the program pretends. The tests have the same limits as the
program: others wrote them too.
"""

from __future__ import annotations

import ast
import builtins
import collections
import importlib
import sys
import traceback
import types
import typing
from collections.abc import Container, Sequence
from typing import Any, TextIO

from tlt_hpc.extras.code_rewards.sandbox import testing
from tlt_hpc.extras.code_rewards.sandbox.attempt import Attempt
from tlt_hpc.extras.code_rewards.sandbox.remote import Link, NotSentError
from tlt_hpc.extras.code_rewards.sandbox.syntax_of_tests import (
    FAILED,
    GIVEN,
    HELD,
    MODULES,
    Counting,
    definitions,
    imported_modules,
    is_program_module,
    parse_tests,
    programs_names,
    reachable_code,
    tests_to_call,
)  # fmt: skip

_FILE = "<tests {}>"
"""The name of a text of tests in the traces of errors."""
_MAX_DETAIL = 80
_SPARE = {**vars(typing), **vars(collections)}
"""What tests may use without an import where the program has nothing of that name."""


class _Names(dict[str, Any]):
    """The names of tests; one that they do not define is the program's, or a module."""

    def __init__(self, link: Link, programs: Container[str], entry: str) -> None:
        super().__init__({"__name__": "__main__", HELD: self._count_held_check, FAILED: _raise_again})
        self._link, self._programs, self._entry, self.num_held = link, programs, entry, 0

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or (hasattr(builtins, name) and name not in self._programs):
            raise KeyError(name)
        if name in MODULES:
            self[name] = importlib.import_module(name)
        else:
            self[name] = self._link.request_object(self._entry if name == GIVEN else name, _SPARE)
        return self[name]

    def _count_held_check(self) -> None:
        self.num_held += 1


class _ProgramModule(types.ModuleType):
    """What tests get that import the program."""

    link: Link
    __all__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.link.request_object(name, {})


def run_tests(texts: Sequence[str], entry: str, replies: TextIO, calls: TextIO) -> dict[str, Any]:
    """Run all of them in one namespace, then the tests that nothing calls.

    Args:
        entry: the program's function that a test is called with, or "" for the one that no other calls.

    Returns:
        ``held``: the number of checks that held; ``answers``: of answers of the program; ``is_silent``: whether it
        failed to answer; ``trouble``: why the tests ended, "" if they are passed; ``is_unreadable``: whether it is
        not the program's fault.
    """
    link, trees = Link(replies, calls), [parse_tests(text) for text in texts]
    units = tests_to_call(trees)
    if "numpy" in sys.modules:
        _SPARE["np"] = sys.modules["numpy"]
    _, live = reachable_code(trees, [unit.name for unit in units])
    names = _Names(link, programs_names(texts, trees, units, live), entry)
    with Attempt(Exception, SystemExit) as attempt:
        _offer_modules(trees, link)
        for number, tree in enumerate(trees):
            own = [unit.name for unit in units if unit.name in definitions([tree])]
            changed = ast.fix_missing_locations(Counting(definitions(trees)).visit(tree))
            _execute(changed, _FILE.format(number), names)
            for name in own:
                testing.call_test(names[name], names)
    error = attempt.error
    return {
        "held": names.num_held,
        "answers": link.num_answers,
        "is_silent": link.is_silent,
        "trouble": _describe_failure(error, texts) if error else "",
        "is_unreadable": isinstance(error, NotSentError),
    }


def _execute(tree: ast.Module, file: str, names: _Names) -> None:
    try:
        exec(compile(tree, file, "exec", dont_inherit=True), names)
    except SystemExit as leaving:  # as after unittest.main()
        if leaving.code:
            raise


def _describe_failure(error: BaseException, texts: Sequence[str]) -> str:
    """The line of the tests that failed, and how."""
    lines = {_FILE.format(number): text.split("\n") for number, text in enumerate(texts)}
    places = [each for each in traceback.extract_tb(error.__traceback__) if each.filename in lines]
    line = lines[places[-1].filename][(places[-1].lineno or 1) - 1].strip() if places else ""
    said = "" if type(error) is AssertionError and not error.args else f"{type(error).__name__}: {error}"
    return ": ".join(part[:_MAX_DETAIL] for part in (line, said) if part) or "an assertion"


def _offer_modules(trees: Sequence[ast.Module], link: Link) -> None:
    for module, names in imported_modules(trees):
        if module == "pytest":
            sys.modules["pytest"] = testing
        elif module == "unittest":
            testing.ignore_main()
        elif is_program_module(module, names):
            offered = sys.modules[module] = _ProgramModule(module)
            offered.link = link


def _raise_again() -> None:
    error = sys.exception()
    if isinstance(error, AssertionError):
        raise error
