"""Records how many of a fixed set of mutations of the package a test suite kills, so that two suites can be compared.

    python tools/mutate.py plan --seed 1 --count 200 --out plan.json        # choose the mutations
    python tools/mutate.py map --plan plan.json --out map.json --jobs 2     # which tests execute which of them
    python tools/mutate.py run --plan plan.json --map map.json --jobs 2 --out results.jsonl
    python tools/mutate.py show results.jsonl [other.jsonl]

A mutation is named by the function that holds its statement and by the statement's source: it is found again after
files were moved and code was reformatted. `map` and `run` test copies of the tree `--tree` (default: this clone), never
the tree itself. Both resume: `map` adds to a file that exists, so that `--marks` can measure one part of a suite after
another; `run` leaves out what the results file has already, except survivors that more tests execute by now.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mutation_plugin as plugin
import pytest

PACKAGE = "tlt_hpc"
MUTATED = ("rollout", "mpi", "rl", "drafting", "storage", "checkpoint", "config")
FAST = "not slow and not mpi and not slurm"
Entry = dict[str, Any]
Function = ast.FunctionDef | ast.AsyncFunctionDef

BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
SWAPPED = {
    ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
BOOLEAN = {ast.And: ast.Or, ast.Or: ast.And}
ONE_WAY = {
    "min": "max", "any": "all", "argmin": "argmax", "amin": "amax", "minimum": "maximum", "floor": "ceil",
    "zeros": "ones", "startswith": "endswith", "lstrip": "rstrip",
}  # fmt: skip
CALLS = ONE_WAY | {after: before for before, after in ONE_WAY.items()}
COARSE = {"return", "deletion"}
"""Operators that most suites notice: chosen a third as often as another one of the same statement."""
OUTPUT = {"print", "say", "log", "debug", "info", "warn", "warning", "error", "exception"}
SIMPLE = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return | ast.Raise | ast.Expr | ast.Delete | ast.Break
FILES_AT_ONCE = 8
SPARE_SECONDS = 60
"""What a test may take beyond ten times what it takes without a mutation, before it counts as one that hangs."""
NO_ANSWER = (pytest.ExitCode.NO_TESTS_COLLECTED, -signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGKILL)
"""Of a session that somebody else or a lack of memory has ended, which says nothing about a mutation."""
TIMED_OUT = "+ Timeout +"
"""In the output where pytest-timeout, too, has ended a test."""
NO_CODE = ("annotation", "ctx", "op", "ops")


@dataclass(frozen=True)
class Unit:
    """What one mutation replaces: a simple statement, the header of a compound one, or a parameter's default."""

    scope: str
    """The enclosing classes and functions; "" in a module's body."""
    node: ast.stmt | ast.expr
    prefix: str
    """What makes the source of a header or a default readable; "" for a statement."""
    owner: ast.stmt
    """The statement itself, or the one whose header has the node."""
    function: Function | None
    """The innermost function; none for what a module or a class executes when it is imported."""

    @property
    def source(self) -> str:
        return self.prefix + ast.unparse(self.node)


# -- where a mutation can be -----------------------------------------------------------------------------------------


def units(body: Iterable[ast.stmt], scope: str = "", function: Function | None = None) -> Iterator[Unit]:
    """Everything in a body that may be mutated, in a fixed order."""
    for node in body:
        inner = f"{scope}.{getattr(node, 'name', '')}".lstrip(".")
        if isinstance(node, Function):
            if node.name not in ("__repr__", "__str__"):
                yield from _defaults(node, inner)
                yield from units(node.body, inner, node)
        elif isinstance(node, ast.ClassDef):
            yield from units(node.body, inner)
        elif isinstance(node, SIMPLE | ast.Continue):
            if not _is_text(node):
                yield Unit(scope, node, "", node, function)
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from (Unit(scope, header, prefix, node, function) for header, prefix in _headers(node))
            for part in (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                for name in ("body", "orelse", "finalbody"):
                    yield from units(getattr(part, name, ()), scope, function)


def _headers(node: ast.stmt) -> Iterator[tuple[ast.expr, str]]:
    if isinstance(node, ast.If | ast.While):
        yield node.test, f"{type(node).__name__.lower()} "
    elif isinstance(node, ast.For):
        yield node.iter, f"for {ast.unparse(node.target)} in "
    elif isinstance(node, ast.With):
        yield from ((item.context_expr, "with ") for item in node.items)


def _defaults(node: Function, scope: str) -> Iterator[Unit]:
    given = [*node.args.posonlyargs, *node.args.args]
    pairs = [*zip(given[len(given) - len(node.args.defaults) :], node.args.defaults, strict=True)]
    for argument, default in (*pairs, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)):
        if default is not None:
            yield Unit(scope, default, f"{argument.arg}=", node, node)


def _is_text(node: ast.stmt) -> bool:
    """Whether it is a docstring or prints."""
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Constant) or (isinstance(call, ast.Call) and _name(call) in OUTPUT)


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


# -- what a mutation changes -----------------------------------------------------------------------------------------


def mutations(unit: Unit) -> dict[str, list[str]]:
    """The sources that may replace a unit's, by operator."""
    found: dict[str, list[str]] = defaultdict(list)
    root = [copy.deepcopy(unit.node)]
    for container, key, is_condition in list(_slots(root, 0, unit.prefix in ("if ", "while "))):
        node = container[key]
        for operator, replacement in _variants(node, is_condition, unit):
            container[key] = replacement
            source = unit.prefix + ast.unparse(root[0])
            if source != unit.source and source not in found[operator]:
                found[operator].append(source)
        container[key] = node
    return {operator: sources for operator, sources in found.items() if sources}


def _slots(container: Any, key: Any, is_condition: bool) -> Iterator[tuple[Any, Any, bool]]:
    """Every place that holds a node which may be mutated: in a list, or among the fields of a node."""
    node = container[key]
    yield container, key, is_condition
    is_text = isinstance(node, ast.JoinedStr | ast.Raise) or (
        isinstance(node, ast.Call) and _name(node).endswith(("Error", "Warning"))
    )
    if is_text or (isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal")):
        return
    for name, value in ast.iter_fields(node):
        if name not in NO_CODE and isinstance(value, ast.AST):
            yield from _slots(vars(node), name, name == "test")
        elif name not in NO_CODE and isinstance(value, list):
            places = [place for place, each in enumerate(value) if isinstance(each, ast.AST)]
            yield from (slot for place in places for slot in _slots(value, place, name == "ifs"))


def _variants(node: Any, is_condition: bool, unit: Unit) -> Iterator[tuple[str, ast.AST]]:
    """What may replace one node, with the operator's name."""
    match node:
        case ast.Compare():
            for name, table in (("boundary", BOUNDARY), ("swapped comparison", SWAPPED)):
                if type(node.ops[0]) in table:
                    yield name, ast.Compare(node.left, [table[type(node.ops[0])](), *node.ops[1:]], node.comparators)
        case ast.BinOp() | ast.AugAssign() if type(node.op) in ARITHMETIC:
            if not any(isinstance(side, ast.JoinedStr) or _is_string(side) for side in ast.iter_child_nodes(node)):
                yield "arithmetic", _with(node, op=ARITHMETIC[type(node.op)]())
        case ast.BoolOp():
            yield "boolean", _with(node, op=BOOLEAN[type(node.op)]())
        case ast.UnaryOp(op=ast.Not()):
            yield "negation", node.operand
        case ast.Constant(value=bool() | int() | float() as value):
            operator = "default" if unit.owner is unit.function else "constant"
            yield operator, ast.Constant(not value if isinstance(value, bool) else value + 1)
        case ast.Call() if _name(node) in CALLS:
            function, name = node.func, CALLS[_name(node)]
            swapped = ast.Name(name) if isinstance(function, ast.Name) else _with(function, attr=name)
            yield "call", _with(node, func=swapped)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.JoinedStr):
            is_bool = unit.function is not None and ast.unparse(unit.function.returns or ast.Constant(None)) == "bool"
            yield "return", ast.Return(ast.UnaryOp(ast.Not(), value) if is_bool else ast.Constant(None))
    if is_condition and not isinstance(node, ast.UnaryOp):
        yield "negation", ast.UnaryOp(ast.Not(), node)
    if unit.function is not None and _is_deletable(node, unit.function):
        yield "deletion", ast.Pass()


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _with(node: Any, **fields: Any) -> Any:
    return type(node)(**(dict(ast.iter_fields(node)) | fields))


def _is_deletable(node: ast.AST, function: Function) -> bool:
    """Whether a function can run without it: it returns no value and is not what first binds a name or an attribute."""
    match node:
        case ast.Assign():
            is_set_before = function.name != "__init__"
            return is_set_before and all(isinstance(each, ast.Attribute | ast.Subscript) for each in node.targets)
        case ast.Return() | ast.Expr():
            return node.value is None or (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Yield))
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Delete | ast.Break | ast.Continue)


# -- the plan --------------------------------------------------------------------------------------------------------


def read_tree(tree: Path, packages: Sequence[str] = ("",)) -> dict[str, ast.Module]:
    """The syntax of every file of the package, or of some of its packages, by its path in the tree."""
    files = [path for each in packages for path in sorted((tree / PACKAGE / each).rglob("*.py"))]
    return {str(path.relative_to(tree)): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def make_plan(modules: dict[str, ast.Module], seed: int, count: int) -> list[Entry]:
    """``count`` different mutations: a line of code, one of its operators, one of that operator's mutations."""
    chance, places, seen = random.Random(seed), [], Counter[tuple[str, str, str]]()
    for file, module in modules.items():
        for unit in units(module.body):
            key = (file, unit.scope, unit.source)
            places.append((key, seen[key], unit, mutations(unit)))
            seen[key] += 1
    places = [place for place in places if place[3]]
    lines = [(unit.node.end_lineno or 0) - unit.node.lineno + 1 for _, _, unit, _ in places]
    plan: dict[tuple[Any, ...], Entry] = {}
    while len(plan) < count:
        (file, scope, source), occurrence, _, found = chance.choices(places, lines)[0]
        operators = sorted(found)
        operator = chance.choices(operators, [1 if name in COARSE else 3 for name in operators])[0]
        entry = {"file": file, "scope": scope, "occurrence": occurrence, "operator": operator}
        entry |= {"statement": source, "mutated": chance.choice(found[operator])}
        plan.setdefault((file, scope, source, occurrence, entry["mutated"]), {"number": len(plan), **entry})
    return list(plan.values())


Place = tuple[str, Unit]


def find(plan: list[Entry], modules: dict[str, ast.Module]) -> dict[int, Place]:
    """Where each mutation's statement is now, by the mutation's number; without those whose statement is gone.

    The n-th in the function of the same qualified name (of the same file's if several have one), else in the only
    function of the same last name that has it, else anywhere if it is there only once.
    """
    by_source: dict[str, list[Place]] = defaultdict(list)
    for file, module in modules.items():
        for unit in units(module.body):
            by_source[unit.source].append((file, unit))
    found = {}
    for entry in plan:
        same = by_source[entry["statement"]]
        scoped = [place for place in same if place[1].scope == entry["scope"]]
        files = {file: (file != entry["file"], Path(file).name != Path(entry["file"]).name, file) for file, _ in scoped}
        nearest = min(files, key=files.__getitem__, default="")
        named = [place for place in same if place[1].scope.split(".")[-1] == entry["scope"].split(".")[-1]]
        is_one = len({(file, unit.scope) for file, unit in named}) == 1
        there = [place for place in scoped if place[0] == nearest] or (named if is_one else [])
        if entry["occurrence"] < len(there):
            found[entry["number"]] = there[entry["occurrence"]]
        elif len(same) == 1:
            found[entry["number"]] = same[0]
    return found


def mutated_source(text: str, unit: Unit, entry: Entry) -> str:
    """A file's text with the mutation in place of the unit, and nothing else changed."""
    lines, node = text.encode().splitlines(keepends=True), unit.node  # columns count bytes
    assert node.end_lineno is not None
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + (node.end_col_offset or 0)
    mutated = entry["mutated"].removeprefix(unit.prefix).encode()
    return b"".join([text.encode()[:start], mutated, text.encode()[end:]]).decode()


# -- probes ----------------------------------------------------------------------------------------------------------


def insert_probes(modules: dict[str, ast.Module], found: dict[int, Place]) -> set[str]:
    """Put a probe before each mutated statement; the files that now differ.

    What only an import executes has probes in the functions that name what it defines, or its class.
    """
    before: dict[int, set[int]] = defaultdict(set)
    names: dict[str, set[int]] = defaultdict(set)
    for number, (_, unit) in found.items():
        if unit.function is None:
            targets = [unit.node.target] if isinstance(unit.node, ast.AnnAssign) else getattr(unit.node, "targets", [])
            for name in (*(ast.unparse(target) for target in targets), *unit.scope.split(".")):
                names[name].add(number)
        else:
            before[id(unit.owner)].add(number)
    changed = set()
    for file, module in modules.items():
        for node in ast.walk(module):
            if isinstance(node, Function) and not any("jit" in ast.unparse(each) for each in node.decorator_list):
                numbers = before.pop(id(node), set()) | {
                    number for name in _named(node) for number in names.get(name, ())
                }
                start = 1 if ast.get_docstring(node, clean=False) is not None else 0
                node.body[start:start] = _probe(numbers)
                changed |= {file} if numbers else set()
            for body in (value for _, value in ast.iter_fields(node) if isinstance(value, list)):
                for statement in [each for each in body if id(each) in before and not isinstance(each, Function)]:
                    place = body.index(statement)
                    body[place:place] = _probe(before.pop(id(statement)))
                    changed.add(file)
    assert not before, "a statement is in no body"
    return changed


def _named(node: Function) -> set[str]:
    found = set()
    for each in ast.walk(node):
        found |= {str(getattr(each, field)) for field in ("id", "attr", "arg") if getattr(each, field, None)}
    return found


def _probe(numbers: set[int]) -> list[ast.stmt]:
    text = f"__import__('{plugin.__name__}').hit({', '.join(map(str, sorted(numbers)))})"
    return ast.parse(text).body if numbers else []


# -- copies of the tree ----------------------------------------------------------------------------------------------


class Copy:
    """The files of a tree that git tracks, some of them changed, and pytest among them."""

    def __init__(self, tree: Path, folder: Path, changed: dict[str, str] | None = None) -> None:
        self.root, self._temporary = folder / "tree", folder / "tmp"
        folder.parent.chmod(0o755)  # some tests start processes of another user
        names = subprocess.run(["git", "ls-files", "-z"], cwd=tree, capture_output=True, check=True).stdout.decode()
        for name in filter(None, names.split("\0")):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, self.root / name, follow_symlinks=False)
        if (tree / ".venv").exists():
            (self.root / ".venv").symlink_to((tree / ".venv").resolve())
        shutil.copy(plugin.__file__, self.root)
        for file, text in (changed or {}).items():
            (self.root / file).write_text(text, encoding="utf-8")
        # Bytecode that is valid by the source's hash: a mutated file is never taken for the file before it.
        mode = ("--invalidation-mode", "checked-hash")
        subprocess.run([sys.executable, "-m", "compileall", "-q", *mode, "."], cwd=self.root, check=True)

    def pytest(self, files: Iterable[str], arguments: Sequence[str], limit: float | None = None) -> tuple[int, str]:
        """Status and output of one session; the session fails after ``limit`` seconds."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        (self.root / plugin.CURRENT.name).unlink(missing_ok=True)
        own = {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        own |= {"TMPDIR": str(self._temporary), "CI": "true"}  # in CI Hypothesis takes the same examples every time
        command = [sys.executable, "-m", "pytest", "-p", plugin.__name__, "-p", "no:cacheprovider", "--reruns", "1"]
        with tempfile.TemporaryFile("w+") as output:
            session = subprocess.Popen(
                [*command, *arguments, *sorted(files)], cwd=self.root, env=os.environ | own, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                status = session.wait(limit)
            except subprocess.TimeoutExpired:
                status = pytest.ExitCode.TESTS_FAILED
                output.write(TIMED_OUT)
            finally:
                self._end_processes()
            session.wait()
            output.seek(0)
            return status, output.read()

    def _end_processes(self) -> None:
        """End what killed tests have left: every process that works in this copy or has it in its environment."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile, or is another user's
                traces = (process / "environ").read_bytes() + os.fsencode((process / "cwd").readlink())
                if os.fsencode(f"{self.root.parent}/") in traces:
                    os.kill(int(process.name), signal.SIGKILL)


def in_copies(
    tree: Path, jobs: int, work: Callable[[Copy, Any], Any], items: list[Any], changed: dict[str, str] | None = None
) -> Iterator[Any]:
    """What ``work`` returns for each item, in order; each call has one of ``jobs`` copies for itself."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder, ThreadPoolExecutor(jobs) as pool:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(jobs):
            copies.put(Copy(tree, Path(folder) / str(number), changed))

        def in_one(item: Any) -> Any:
            place = copies.get()
            try:
                return work(place, item)
            finally:
                copies.put(place)

        yield from pool.map(in_one, items)


@functools.cache
def imported(path: Path) -> set[str]:
    """The modules that a test file names in its imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


# -- which tests execute which mutation ------------------------------------------------------------------------------


def measure(options: argparse.Namespace, plan: list[Entry]) -> None:
    """Run the tests with these marks once, with probes, and write each one's seconds and executed mutations.

    A few test files at a time: what an interrupted run has written is left out by the next.
    """
    known: Entry = json.loads(options.out.read_text()) if options.out.exists() else {"measured": {}, "tests": {}}
    done = known["measured"].setdefault(options.marks, [])
    tree, modules = options.tree, read_tree(options.tree)
    files = sorted({str(path.relative_to(tree)) for path in (tree / "tests").glob("test_*.py")} - set(done))
    found = find(plan, modules)
    probed = {file: ast.unparse(modules[file]) for file in insert_probes(modules, found)}

    def session(place: Copy, files: list[str]) -> tuple[list[str], Entry]:
        hits = place.root / plugin.HITS.name
        hits.write_bytes(plugin.HEADER.pack(0, len(plan)))
        hits.chmod(0o666)
        os.truncate(hits, plugin.HEADER.size + plugin.MAX_CONTEXTS * len(plan))
        status, output = place.pytest(files, ["-m", options.marks])
        if status not in (0, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise RuntimeError(f"pytest ended with status {status}:\n{output}")
        return files, json.loads((place.root / plugin.REPORT.name).read_text())

    parts = [files[start : start + FILES_AT_ONCE] for start in range(0, len(files), FILES_AT_ONCE)]
    for part, report in in_copies(tree, options.jobs, session, parts, probed):
        at_import = {*report["at_import"], *(n for n, (_, unit) in found.items() if unit.function is None)}
        for name, test in report["tests"].items():
            imports = imported(tree / name.partition("::")[0])
            test["executes"] += sorted(n for n in at_import if module_of(found[n][0]) in imports)
        known["tests"] |= report["tests"]
        done += part
        options.out.write_text(json.dumps(known))
        failed = sum(not test["passed"] for test in report["tests"].values())
        print(f"{len(report['tests'])} tests of {part[0]} to {part[-1]}, {failed} failed", flush=True)


# -- which mutations are killed --------------------------------------------------------------------------------------


def order(tests: dict[str, float], own_files: set[str]) -> list[str]:
    """Short tests first, of those the mutated module's own, file by file because of shared fixtures."""
    total: dict[str, float] = defaultdict(float)
    for name, seconds in tests.items():
        total[name.partition("::")[0]] += seconds

    def key(name: str) -> tuple[Any, ...]:
        file, seconds = name.partition("::")[0], tests[name]
        return (seconds > 1) + (seconds > 10), file not in own_files, total[file], file, seconds

    return sorted(tests, key=key)


def executing(tests: Entry, number: int) -> dict[str, float]:
    """The tests that execute a mutation and pass without it, with their seconds."""
    return {name: test["seconds"] for name, test in tests.items() if test["passed"] and number in test["executes"]}


def try_mutation(place: Copy, entry: Entry, found: Place | None, tests: Entry, marks: str) -> Entry:
    """Run the tests that execute a mutation, until one fails."""
    result = {"number": entry["number"], "file": entry["file"], "scope": entry["scope"]}
    if found is None:
        return result | {"status": "gone"}
    began, (file, unit) = time.monotonic(), found
    covering = executing(tests, entry["number"])
    result |= {"tests": len(covering), "unmutated_seconds": round(sum(covering.values()), 1)}
    if not covering:
        return result | {"status": "survived", "seconds": 0.0}
    files = {name.partition("::")[0] for name in covering}
    own = {name for name in files if module_of(file) in imported(place.root / name)}
    limits = {name: SPARE_SECONDS + 10 * covering[name] for name in order(covering, own)}
    choice = {"limits": limits, "others": sorted(tests.keys() - covering.keys())}
    (place.root / plugin.CHOICE.name).write_text(json.dumps(choice))
    path = place.root / file
    before = path.read_text(encoding="utf-8")
    path.write_text(mutated_source(before, unit, entry), encoding="utf-8")
    try:
        status, output = place.pytest(files, ["-x", "-m", marks], 300 + 5 * sum(covering.values()))
    finally:
        path.write_text(before, encoding="utf-8")
    if status in NO_ANSWER:
        raise RuntimeError(f"mutation {entry['number']}: pytest ended with status {status}\n{output}")
    current = place.root / plugin.CURRENT.name
    result |= {"status": "killed" if status else "survived", "seconds": round(time.monotonic() - began, 1)}
    if status:
        timed_out = TIMED_OUT in output
        result |= {"by": current.read_text() if current.exists() else "import", "timed_out": timed_out}
    return result


def run(options: argparse.Namespace, plan: list[Entry]) -> None:
    """Try every mutation that the results file does not have, each in one of ``--jobs`` copies of the tree.

    Once more, if it survived fewer tests than now are known to execute it.
    """
    known = json.loads(options.map.read_text())
    done = read_results(options.out) if options.out.exists() else {}
    for number, result in list(done.items()):
        if result["status"] == "survived" and result["tests"] < len(executing(known["tests"], number)):
            del done[number]
    found = find(plan, read_tree(options.tree))
    first, last = options.only
    todo = [entry for entry in plan if first <= entry["number"] <= last and entry["number"] not in done]
    marks = " or ".join(f"({marks})" for marks in known["measured"])

    def work(place: Copy, entry: Entry) -> None:
        result = try_mutation(place, entry, found.get(entry["number"]), known["tests"], marks)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        print(result["number"], result["status"], result.get("by", result["scope"]), flush=True)

    for _ in in_copies(options.tree, options.jobs, work, todo):
        pass


# -- command line ----------------------------------------------------------------------------------------------------


def read_results(path: Path) -> dict[int, Entry]:
    """The last result of each mutation, by its number."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {line["number"]: line for line in lines}


def show(paths: Sequence[Path]) -> None:
    """Print how many mutations were killed in each package, and which of them in one of two files only."""
    for path in paths:
        table: dict[str, Counter[str]] = defaultdict(Counter)
        for result in read_results(path).values():
            for row in (result["file"].split("/")[1], "all"):
                table[row][result["status"]] += 1
        print(path)
        for row in (*sorted(table.keys() - {"all"}), "all"):
            print(f"  {row:12}", *(f"{table[row][status]:4} {status}" for status in ("killed", "survived", "gone")))
    if len(paths) == 2:
        both = [read_results(path) for path in paths]
        for path, mine, other in zip(paths, both, both[::-1], strict=True):
            shared = sorted(mine.keys() & other.keys())
            only = [n for n in shared if mine[n]["status"] == "killed" != other[n]["status"]]
            print(f"killed in {path} only: {len(only)}")
            for n in only:
                print(f"  {n:3} {other[n]['status']:8} {mine[n]['file']} {mine[n]['scope']}, killed by {mine[n]['by']}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Records how many of a fixed set of mutations a test suite kills.")
    commands = parser.add_subparsers(dest="command", required=True)
    parsers = {name: commands.add_parser(name) for name in ("plan", "map", "run", "show")}
    for name in ("plan", "map", "run"):
        parsers[name].add_argument("--tree", type=Path, default=Path(__file__).resolve().parent.parent)
        parsers[name].add_argument("--out", type=Path, required=True)
    for name in ("map", "run"):
        parsers[name].add_argument("--plan", type=Path, required=True)
        parsers[name].add_argument("--jobs", type=int, default=1, help="copies of the tree that are tested at once")
    parsers["plan"].add_argument("--seed", type=int, default=1)
    parsers["plan"].add_argument("--count", type=int, default=200)
    parsers["map"].add_argument("--marks", default=FAST, help=f"which tests (default: {FAST})")
    parsers["run"].add_argument("--map", type=Path, required=True)
    parsers["run"].add_argument("--only", type=_range, default=(0, sys.maxsize), metavar="N..M", help="some mutations")
    parsers["show"].add_argument("results", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    if options.command == "show":
        return show(options.results)
    if options.command == "plan":
        made = make_plan(read_tree(options.tree, MUTATED), options.seed, options.count)
        text = "[\n" + ",\n".join(json.dumps(entry) for entry in made) + "\n]\n"
        options.out.write_text(text, encoding="utf-8")
        return None
    plan = json.loads(options.plan.read_text(encoding="utf-8"))
    return (measure if options.command == "map" else run)(options, plan)


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("..")
    return int(first), int(last)


if __name__ == "__main__":
    main()
