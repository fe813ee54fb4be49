"""The forms of tests: what checks something, what nothing calls and is to be called, and what is the program's.

Used by the judge, to find rows whose tests test nothing, and where tests are run, to count what was checked.
"""

from __future__ import annotations

import ast
import builtins
import collections
import inspect
import re
import symtable
import typing
import warnings
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

HELD = "__held__"
"""Called after each check that held."""
FAILED = "__failed__"
"""Called in a handler that would let a failed assertion pass."""
GIVEN = "candidate"
"""The argument that stands for the program's function, as in HumanEval."""
MODULES = ("math", "re", "collections", "itertools", "functools", "heapq", "string", "datetime", "cmath", "operator",
           "random", "copy")  # fmt: skip
"""Known to tests without an import, as data sets expect."""
Definition = ast.FunctionDef | ast.ClassDef
_PROGRAM = re.compile(r"((my|your|the)_?)?(solutions?|module|program|answer|submission|implementation|main)")
_CHECK = re.compile(r"assert\w*|fail|raises")
_UNNAMED = ("lambda", "listcomp", "setcomp", "dictcomp", "genexpr")
_CATCH_ALL = ("AssertionError", "Exception", "BaseException")


def parse_tests(text: str) -> ast.Module:
    """The tree of a text of tests; a module beside it is the program.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it is no Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the data's author wrote
        tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            node.module, node.level = "solution", 0
    return tree


def is_program_module(module: str, names: Iterable[str] = ()) -> bool:
    """True if a module that tests import, or import these names from, is the program."""
    return module in names or _PROGRAM.fullmatch(module) is not None


def imported_modules(trees: Iterable[ast.AST]) -> Iterator[tuple[str, list[str]]]:
    """Modules that tests import, with the names that they import from them."""
    for node in _all_nodes(trees):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", [alias.name for alias in node.names]


def is_check(node: ast.AST, own: Container[str] = ()) -> bool:
    """True if a statement makes the tests fail where something is not as it should be.

    Args:
        own: names of what the tests define: whether these check anything is in their bodies.
    """
    match node:
        case ast.Assert(test=ast.Constant(value=value)):
            return not value
        case ast.Assert(test=ast.Tuple(elts=[_, *_])):  # with brackets around the message too it is always true
            return False
        case ast.Assert() | ast.Raise():
            return True
        case ast.Expr(value=ast.Call(func=function)) | ast.withitem(context_expr=ast.Call(func=function)):
            name = last_name(function)
            return _CHECK.fullmatch(name) is not None and not (isinstance(function, ast.Name) and name in own)
    return False


def reachable_code(trees: Sequence[ast.Module], entries: Iterable[str] = ()) -> tuple[list[ast.AST], set[str]]:
    """Find the code that is run: the top level, the definitions that it names, those that they name, and ``entries``.

    Returns:
        The nodes, and the names of the definitions.
    """
    unknown, live, names = definitions(trees), list(_nodes_outside_definitions(trees)), set[str]()
    new = {*entries, *used_names(live)}
    while found := [unknown.pop(name) for name in new if name in unknown]:
        inner = _all_nodes(found)
        live += inner
        names |= {each.name for each in found}
        new = used_names(inner)
    return live, names


def definitions(trees: Sequence[ast.Module]) -> dict[str, Definition]:
    """The definitions at the top level of tests, by name."""
    return {node.name: node for node in _nodes_outside_definitions(trees) if isinstance(node, Definition)}


def tests_to_call(trees: Sequence[ast.Module]) -> list[Definition]:
    """Classes of tests; and functions that are named as tests and that neither the top level nor another one calls."""
    _, called = reachable_code(trees)
    tests = filter(_is_test, definitions(trees).values())
    found = [node for node in tests if isinstance(node, ast.ClassDef) or node.name not in called]
    used = {node.name: used_names(_all_nodes(node.body)) for node in found}
    return [node for node in found if not any(node.name in used[name] for name in used if name != node.name)]


def parameters(node: ast.FunctionDef) -> list[str]:
    """The parameters of a test that something must give: without those of ``pytest.mark.parametrize``."""
    places = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    given = set[str]()
    for each in node.decorator_list:
        if isinstance(each, ast.Call) and last_name(each.func) == "parametrize" and each.args:
            texts = [word.value for word in ast.walk(each.args[0]) if isinstance(word, ast.Constant)]
            given |= {name.strip() for text in texts for name in str(text).split(",")}
    return [name for name in places[: len(places) - len(node.args.defaults)] if name not in given]


def takes_program_function(node: Definition) -> bool:
    """True if a test is called with the program's function."""
    if isinstance(node, ast.ClassDef):
        return False
    needed = parameters(node)
    return needed == [GIVEN] or (node.name == "check" and len(needed) == 1)


def fixtures(trees: Sequence[ast.Module]) -> set[str]:
    """Names of the functions that give arguments to tests of pytest."""
    return {name for name, node in definitions(trees).items() if _is_fixture(node)}


def has_program(trees: Sequence[ast.Module], units: Iterable[Definition]) -> bool:
    """True if tests are called with the program's function, or import the program or names of it."""
    named = (is_program_module(module, names) and "*" not in names for module, names in imported_modules(trees))
    return any(map(takes_program_function, units)) or any(named)


def programs_names(
    texts: Iterable[str], trees: Sequence[ast.Module], units: Sequence[Definition], live: Container[str]
) -> set[str]:
    """Names that tests have from nowhere but the program.

    Where they have nothing else of it, and call one of Python's own functions alone, that one: a program may define
    ``sum``.

    Args:
        live: names of the definitions that are run.
    """
    used, bound = _global_names(texts, live)
    bound |= {*MODULES, "np", *dir(typing), *dir(collections)}
    free = used - bound - {*dir(builtins), "__file__"}
    functions = {name for name in used - bound if inspect.isbuiltin(getattr(builtins, name, None))}
    return free or (functions if len(functions) == 1 and not has_program(trees, units) else set())


def _global_names(texts: Iterable[str], live: Container[str]) -> tuple[set[str], set[str]]:
    """Names of no function or class that are read in what is run; and those that tests bind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the data's author wrote
        tables = [symtable.symtable(text, "tests", "exec") for text in texts]
    used, bound = set[str](), set[str]()
    while tables:
        table = tables.pop()
        is_top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if is_top or symbol.is_global():
                used |= {symbol.get_name()} if symbol.is_referenced() else set()
                bound |= {symbol.get_name()} if symbol.is_assigned() or symbol.is_imported() else set()
        inner = table.get_children()
        tables += [each for each in inner if not is_top or each.get_name() in _UNNAMED or each.get_name() in live]
    return used, bound


def used_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that are read."""
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def last_name(node: ast.AST) -> str:
    """The last of names with dots between; of a call, that of what is called."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=function):
            return last_name(function)
    return ""


class Counting(ast.NodeTransformer):
    """Calls ``HELD`` after every check; lets no handler ignore that one does not hold, or cannot be made.

    An error in a block of checks is raised again; where the block expects an exception, a failed assertion alone.
    """

    def __init__(self, own: Mapping[str, Definition]) -> None:
        self._own = own
        self._checking = {name for name, body in own.items() if self._has_checks([body])}

    def visit(self, node: ast.AST) -> Any:
        """Leaves expressions as they are: long sums are deep."""
        return node if isinstance(node, ast.expr) else super().visit(node)

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        """The assertion and the call."""
        return _with_counter_call(node, is_check(node))

    def visit_Expr(self, node: ast.Expr) -> list[ast.stmt]:
        """The same for methods of unittest and functions of numpy.testing."""
        return _with_counter_call(node, is_check(node, self._own))

    def visit_With(self, node: ast.With) -> list[ast.stmt]:
        """The same for an exception that is expected."""
        self.generic_visit(node)
        return _with_counter_call(node, any(is_check(item, self._own) for item in node.items))

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        """The same where one branch fails."""
        fails = any(map(_fails, (*node.body, *node.orelse)))
        self.generic_visit(node)
        return _with_counter_call(node, fails)

    def visit_Try(self, node: ast.Try) -> list[ast.stmt]:
        """The same where it is a failure to continue without an exception."""
        fails = any(map(_fails, (*node.body, *node.orelse)))
        if self._has_checks(node.body) or self._checking & used_names(_all_nodes(node.body)):
            for handler in node.handlers:
                if _catches_all(handler) and not any(map(is_check, _all_nodes(handler.body))):
                    handler.body.insert(0, _call_statement(FAILED) if fails else ast.Raise())
        self.generic_visit(node)
        return _with_counter_call(node, fails)

    def _has_checks(self, nodes: Iterable[ast.AST]) -> bool:
        """Whether something in them must hold; not only that an exception is raised."""
        return any(is_check(each, self._own) and not _fails(each) for each in _all_nodes(nodes))


def _is_test(node: Definition) -> bool:
    if isinstance(node, ast.FunctionDef):
        return (node.name.startswith("test") or node.name == "check") and not _is_fixture(node)
    has_tests = any(isinstance(each, ast.FunctionDef) and each.name.startswith("test") for each in node.body)
    return has_tests and (node.name.startswith("Test") or any(last_name(base) == "TestCase" for base in node.bases))


def _is_fixture(node: Definition) -> bool:
    return any(last_name(each) == "fixture" for each in node.decorator_list)


def _fails(node: ast.AST) -> bool:
    match node:
        case ast.Raise() | ast.Assert(test=ast.Constant(value=False | 0 | None)):
            return True
        case ast.Expr(value=ast.Call(func=function)):
            return last_name(function) == "fail"
    return False


def _catches_all(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(last_name(kind) in _CATCH_ALL for kind in kinds)


def _with_counter_call(node: ast.stmt, is_counted: bool) -> list[ast.stmt]:
    return [node, _call_statement(HELD)] if is_counted else [node]


def _call_statement(name: str) -> ast.stmt:
    return ast.Expr(ast.Call(ast.Name(name, ast.Load()), [], []))


def _all_nodes(nodes: Iterable[ast.AST]) -> list[ast.AST]:
    return [inner for node in nodes for inner in ast.walk(node)]


def _nodes_outside_definitions(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """These and all below them but what is inside definitions."""
    left = deque(nodes)
    while left:
        node = left.popleft()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            left += node.decorator_list
        else:
            left += ast.iter_child_nodes(node)
