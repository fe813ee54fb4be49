"""Reads the tests of a program from the data's answer, and finds rows whose tests test nothing.

The answer is verl's JSON with ``inputs`` and ``outputs``, and ``fn_name`` where they are a function's arguments and
results rather than standard input and output; or LiveCodeBench's list of tests; or Python tests: a text, or a JSON
list of such.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tlt_hpc.extras.code_rewards.sandbox.syntax_of_tests import (
    definitions,
    fixtures,
    has_program,
    imported_modules,
    is_check,
    is_program_module,
    parameters,
    parse_tests,
    programs_names,
    reachable_code,
    takes_program_function,
    tests_to_call,
)

_ENTRY = re.compile(r"(?:\w+(?:\(\))?\.)?([^\W\d]\w*)")
_OF_ONE_PROCESS = frozenset({"unittest.mock", "contextlib.redirect_stdout", "asyncio"})
_OFFERED = frozenset({"pytest", "numpy"})


@dataclass(frozen=True)
class Tests:
    """The tests of one prompt: pairs of what is given and wanted, or Python texts."""

    pairs: Sequence[tuple[Any, Any]] = ()
    """Standard input and output; for a function its arguments, and the values of which it must return one."""
    function: str = ""
    """The function that is called; empty: the program reads standard input."""
    texts: Sequence[str] = ()
    entry: str = ""
    """The function that the texts test; empty: to be found in the program."""


@contextlib.contextmanager
def unlimited_int_digits() -> Iterator[None]:
    """Integers are read and written at any length."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


@unlimited_int_digits()
def read_tests(truth: str, extra: str = "") -> Tests:
    """The tests of the data's answer, with the row's other columns as JSON.

    Raises:
        ValueError: the answer has another form, or its tests test nothing.
    """
    tree: Any = truth
    with contextlib.suppress(json.JSONDecodeError, RecursionError):  # Python tests may stand as they are
        tree = json.loads(tree)
        tree = json.loads(tree) if isinstance(tree, str) else tree
    if isinstance(tree, str) or (isinstance(tree, list) and tree and all(isinstance(each, str) for each in tree)):
        texts = [tree] if isinstance(tree, str) else tree
        _check_texts(texts)
        return Tests(texts=texts, entry=_entry_point_name(extra))
    if isinstance(tree, list) and tree and all(isinstance(each, dict) for each in tree):  # as LiveCodeBench has them
        tree = {
            "inputs": [each.get("input") for each in tree],
            "outputs": [each.get("output") for each in tree],
            "fn_name": _tested_function_name(tree),
        }
    if not isinstance(tree, dict):
        raise ValueError("neither a table with 'inputs' and 'outputs' nor a list of such nor assertions")
    inputs, outputs, name = (tree.get(key) for key in ("inputs", "outputs", "fn_name"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise ValueError("'inputs' and 'outputs' must be lists of one length, with one test or more")
    if not name:
        return Tests(list(zip(map(_stream_text, inputs), map(_stream_text, outputs), strict=True)))
    are_texts = all(isinstance(each, str) for each in inputs)
    wanted = [_accepted_values(each, are_texts) for each in outputs]
    return Tests(list(zip(map(_parse_arguments, inputs), wanted, strict=True)), str(name).rpartition(".")[2])


def _tested_function_name(tests: list[dict[str, Any]]) -> str | None:
    """The function that the tests of LiveCodeBench call; None if they are of standard input and output."""
    kinds = {test.get("testtype") == "functional" for test in tests}
    if len(kinds) > 1:
        raise ValueError("tests of a function and of standard input in one row")
    if kinds == {False}:
        return None
    metadata = tests[0].get("metadata")
    with contextlib.suppress(json.JSONDecodeError):
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    name = metadata.get("func_name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("a function's tests without metadata.func_name")
    return name


def _entry_point_name(extra: str) -> str:
    """The function that the row names: ``entry_point``, as in HumanEval, or ``Solution().name``."""
    columns = json.loads(extra) if extra else {}
    for table in (columns, columns.get("extra_info"), columns.get("reward_model")):
        named = table.get("entry_point") if isinstance(table, dict) else None
        if isinstance(named, str) and (found := _ENTRY.fullmatch(named.strip())):
            return found[1]
    return ""


def _check_texts(texts: list[str]) -> None:
    """Check that Python tests call the program and check what it answers."""
    trees = list(map(_parse_tests, texts))
    _check_imports(trees)
    units = tests_to_call(trees)
    live, names = reachable_code(trees, [unit.name for unit in units])
    own = definitions(trees)
    if not any(is_check(node, own) for node in live):
        left = [name for name, body in own.items() if any(is_check(node, own) for node in ast.walk(body))]
        trouble = f"never checks anything: nothing calls {', '.join(left)}" if left else "asserts nothing"
        raise ValueError(f"{texts[0][:40]!r} {trouble}")
    for unit in units:
        tests = [each for each in unit.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test")]
        for test in tests if isinstance(unit, ast.ClassDef) else [unit]:
            open_ones = set(parameters(test)) - fixtures(trees) - {"self"}
            if open_ones and not takes_program_function(test):
                raise ValueError(f"{test.name} takes {', '.join(sorted(open_ones))}, which nothing gives")
    if not programs_names(texts, trees, units, names) and not has_program(trees, units):
        raise ValueError(f"{texts[0][:40]!r} calls nothing of the program")


def _parse_tests(text: str) -> ast.Module:
    try:
        tree = parse_tests(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what the data's author wrote
            compile(text, "tests", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text[:40]!r} is neither JSON nor Python: {error}") from None
    return tree


def _check_imports(trees: list[ast.Module]) -> None:
    """Check that what tests import is there, and that they need not be in the program's process."""
    for node in (each for tree in trees for each in ast.walk(tree)):
        match node:
            case ast.Attribute(attr="stdout" | "stdin" | "input", ctx=ast.Store()):
                raise ValueError("replaces what a program reads or writes, which cannot reach it in another process")
    for module, names in imported_modules(trees):
        root = module.partition(".")[0]
        for each in (module, *(f"{module}.{name}" for name in names)):
            if each in _OF_ONE_PROCESS:
                raise ValueError(f"needs {each}, which cannot reach the program: it runs in another process")
        if root not in sys.stdlib_module_names | _OFFERED and root and not is_program_module(module, names):
            raise ValueError(f"needs {root}, which the sandbox does not have")


def _stream_text(given: Any) -> str:
    """Standard input or output: a text, a number, or a list of lines."""
    if isinstance(given, list):
        return "\n".join(map(str, given))
    if not isinstance(given, str | int | float) or isinstance(given, bool):
        raise ValueError(f"{str(given)[:40]!r} is no text of standard input or output")
    return str(given)


def _parse_arguments(given: Any) -> list[Any]:
    """A function's arguments: a list, or a text with one JSON value a line."""
    if isinstance(given, str):
        return [json.loads(line) for line in given.split("\n") if line.strip()]
    if not isinstance(given, list):
        raise ValueError(f"{str(given)[:40]!r} is no list of arguments")
    return given


def _accepted_values(output: Any, is_json: bool) -> list[Any]:
    """The values of which one is right.

    A text is the JSON of the value where the arguments are JSON too, as in LiveCodeBench, else it may be that or the
    value itself; the only element of a list may stand for it (APPS).
    """
    if not isinstance(output, str):
        return [output, output[0]] if isinstance(output, list) and len(output) == 1 else [output]
    try:
        value = json.loads(output)
    except json.JSONDecodeError:
        return [output]
    return [value] if is_json else [output, value]
