"""`tools/mutate.py` on a package of one module, whose tests notice some mutations and not others."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

import mutate  # noqa: E402

MODULE = '''\
"""A module: 1 + 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 1

FACTOR = 2


class Account:
    """Holds 1 number."""

    size: int = 3

    def grow(self, by: int = 1, *, often: bool = True) -> int:
        """Return 1 more."""
        print("grows by", by + 1)
        if by > 0 and often:
            self.size += by
        elif by < 0:
            raise ValueError(f"negative: {by + 1}", 1)
        return self.size * FACTOR

    def __repr__(self) -> str:
        return str(self.size + 1)


def waits(number: int) -> int:
    while number > 0:
        number = number - 1
    return number


def is_unused(number: int) -> bool:
    return min(number, 5) == 4
'''
TESTS = """\
import subprocess
import sys

import pytest

from tlt_hpc.rl.account import Account, waits


@pytest.fixture(scope="module")
def ended():
    return waits(2)


def test_ended(ended):
    assert ended == 0


def test_ended_too(ended):
    assert isinstance(ended, int)


def test_grows():
    assert Account().grow(2) == 10


def test_grows_in_a_process_with_an_environment_of_its_own():
    code = "from tlt_hpc.rl.account import Account; Account().grow(-1)"
    assert subprocess.run([sys.executable, "-c", code], env={}, stderr=subprocess.DEVNULL).returncode == 1


def test_fails_always():
    Account().grow()
    assert False
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "tree", "rl/account.py", MODULE)


def make_tree(tree: Path, file: str, module: str) -> Path:
    module_path = tree / "tlt_hpc" / file
    for path, text in (
        (module_path, module),
        (tree / "tests" / "test_account.py", TESTS.replace("rl.account", mutate.module_of(file).replace("/", "."))),
        (tree / "pyproject.toml", "[tool.pytest.ini_options]\nmarkers = ['slow', 'mpi', 'slurm']\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for package in (*module_path.relative_to(tree).parents, Path("tlt_hpc/mpi")):
        if package.parts:
            (tree / package).mkdir(exist_ok=True)
            (tree / package / "__init__.py").touch()
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    subprocess.run(["git", "add", "."], cwd=tree, check=True)
    return tree


def all_units(text: str = MODULE) -> dict[tuple[str, str], dict[str, list[str]]]:
    return {(unit.scope, unit.source): mutate.mutations(unit) for unit in mutate.units(ast.parse(text).body)}


def entry(scope: str, statement: str, mutated: str, number: int = 0, occurrence: int = 0) -> mutate.Entry:
    place = {"file": "tlt_hpc/rl/account.py", "scope": scope, "occurrence": occurrence}
    return {"number": number, **place, "statement": statement, "mutated": mutated, "operator": "any"}


def test_every_kind_of_mutation_is_made() -> None:
    found = all_units()
    assert found["Account.grow", "if by > 0 and often"] == {
        "boolean": ["if by > 0 or often"],
        "boundary": ["if by >= 0 and often"],
        "swapped comparison": ["if by < 0 and often"],
        "constant": ["if by > 1 and often"],
        "negation": ["if not (by > 0 and often)"],
    }
    assert found["Account.grow", "self.size += by"] == {"arithmetic": ["self.size -= by"], "deletion": ["pass"]}
    assert found["Account.grow", "return self.size * FACTOR"]["return"] == ["return None"]
    assert found["Account.grow", "by=1"] == {"default": ["by=2"]}
    assert found["Account.grow", "often=True"] == {"default": ["often=False"]}
    assert found["", "FACTOR = 2"] == {"constant": ["FACTOR = 3"]}
    assert found["is_unused", "return min(number, 5) == 4"]["return"] == ["return not min(number, 5) == 4"]
    assert found["is_unused", "return min(number, 5) == 4"]["call"] == ["return max(number, 5) == 4"]


def test_no_mutation_of_what_is_no_code() -> None:
    """Docstrings, output, messages, type hints, what only type checkers read, and ``__repr__``."""
    found = all_units()
    assert found["Account", "size: int = 3"] == {"constant": ["size: int = 4"]}
    assert found["Account.grow", "raise ValueError(f'negative: {by + 1}', 1)"] == {"deletion": ["pass"]}
    sources = " ".join(source for _, source in found)
    assert "print" not in sources and "LIMIT" not in sources and "str(" not in sources and "Holds" not in sources


def test_a_plan_is_the_seed_s_own() -> None:
    modules = {"tlt_hpc/rl/account.py": ast.parse(MODULE)}
    first, same, other = (mutate.make_plan(modules, seed, 12) for seed in (1, 1, 2))
    assert first == same != other
    assert len({json.dumps(each["mutated"]) + each["statement"] for each in first}) == 12


def test_a_statement_is_found_where_it_was_moved_to() -> None:
    """To another file, in another layout, into a class; of several equal ones the n-th; and not where there is none."""
    plan = [
        entry("waits", "number = number - 1", "number = number + 1"),
        entry("waits", "return number", "return None", 1),
        entry("Account.grow", "self.size += by", "pass", 2),
        entry("gone", "pay(1)", "pay(2)", 3),
        entry("twice", "step(1)", "step(2)", 4, occurrence=1),
        entry("twice", "step(1)", "step(2)", 5, occurrence=2),
    ]
    moved = """
    class Loop:
        def waits(self, number):
            while number > 0: number = (number
                - 1)
            return number
    def other(number):
        return number
    def twice():
        step(1)
        step(1)
    """
    modules = {"tlt_hpc/mpi/new.py": ast.parse(dedent(moved)), "tlt_hpc/rl/account.py": ast.parse("def f(): pass")}
    found = mutate.find(plan, modules)
    assert {number: (file, unit.scope, unit.node.lineno) for number, (file, unit) in found.items()} == {
        0: ("tlt_hpc/mpi/new.py", "Loop.waits", 4),
        1: ("tlt_hpc/mpi/new.py", "Loop.waits", 6),
        4: ("tlt_hpc/mpi/new.py", "twice", 11),
    }


@pytest.mark.parametrize("text", ["if (é := a) < b:  # why\n    pass\n", "if (\n    é\n    < b\n):\n    pass\n"])
def test_nothing_but_the_statement_is_changed(text: str) -> None:
    (unit,) = (unit for unit in mutate.units(ast.parse(text).body) if unit.prefix)
    mutated = mutate.mutated_source(text, unit, {"mutated": "if changed"})
    assert mutated in ("if changed:  # why\n    pass\n", "if (\n    changed\n):\n    pass\n")


def test_probes_stand_where_a_mutation_takes_effect() -> None:
    """Before the statement; in the function of a default; for a constant or a class's default, where it is named."""
    other = """
    def pays():
        return account.FACTOR
    def opens():
        return Account()
    def rests():
        return 0
    """
    modules = {"tlt_hpc/rl/account.py": ast.parse(MODULE), "tlt_hpc/mpi/other.py": ast.parse(dedent(other))}
    plan = [
        entry("Account.grow", "if by < 0", "if by <= 0", 0),
        entry("Account.grow", "by=1", "by=2", 1),
        entry("", "FACTOR = 2", "FACTOR = 3", 2),
        entry("Account", "size: int = 3", "size: int = 4", 3),
    ]
    assert mutate.insert_probes(modules, mutate.find(plan, modules)) == set(modules)
    hits = {}
    for module in modules.values():
        lines = ast.unparse(module).splitlines()
        for line, following in pairwise(lines):
            if "mutation_plugin" in line:
                hits[following.strip()] = line.partition(".hit")[2]
    assert hits == {
        "print('grows by', by + 1)": "(1, 2, 3)",
        "if by < 0:": "(0)",
        "return str(self.size + 1)": "(3)",
        "return account.FACTOR": "(2)",
        "return Account()": "(3)",
    }


def tried(tree: Path, tmp_path: Path, plan: list[mutate.Entry]) -> dict[int, Any]:
    """Map and run a plan by the command line; the results by number."""
    places = {name: str(tmp_path / name) for name in ("plan.json", "map.json", "results.jsonl")}
    Path(places["plan.json"]).write_text(json.dumps(plan))
    shared = ["--tree", str(tree), "--plan", places["plan.json"]]
    mutate.main(["map", *shared, "--out", places["map.json"]])
    for _ in range(2):  # the second finds everything done
        mutate.main(["run", *shared, "--map", places["map.json"], "--out", places["results.jsonl"], "--jobs", "2"])
    assert len(Path(places["results.jsonl"]).read_text().splitlines()) == len(plan)
    return mutate.read_results(Path(places["results.jsonl"]))


def test_kills_by_tests_that_execute_a_mutation(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutate, "SPARE_SECONDS", 5)
    plan = [
        entry("Account.grow", "if by > 0 and often", "if by < 0 and often", 0),
        entry("Account.grow", "if by < 0", "if by > 0", 1),
        entry("Account.grow", "by=1", "by=2", 2),
        entry("", "FACTOR = 2", "FACTOR = 3", 3),
        entry("is_unused", "return min(number, 5) == 4", "return None", 4),
        entry("waits", "return number", "return None", 5),
        entry("paid", "pay()", "pass", 6),
        entry("waits", "number = number - 1", "number = number + 1", 7),
    ]
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    found = tried(tree, tmp_path, plan)
    assert {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()} == before
    statuses = ["killed", "killed", "survived", "killed", "survived", "killed", "gone", "killed"]
    assert [found[number]["status"] for number in range(8)] == statuses
    assert found[1]["by"].endswith("test_grows_in_a_process_with_an_environment_of_its_own")
    assert [found[number]["timed_out"] for number in (0, 7)] == [False, True]  # the last one never ends
    assert found[4]["tests"] == 0  # nothing executes it
    assert found[5]["tests"] == 2  # both tests use the fixture that executes it
    assert found[2]["tests"] == 2  # the one that fails without a mutation is left out


@pytest.mark.parametrize("status", [5, -15, -9])
def test_a_session_that_was_ended_from_outside_is_no_kill(
    tree: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = entry("waits", "return number", "return None")
    found = mutate.find([killed], mutate.read_tree(tree))[0]
    place = object.__new__(mutate.Copy)
    place.root = tree
    monkeypatch.setattr(place, "pytest", lambda *_: (status, ""))
    tests = {"tests/test_account.py::test_ended": {"seconds": 1.0, "passed": True, "executes": [0]}}
    with pytest.raises(RuntimeError, match=rf"mutation 0: pytest ended with status {status}"):
        mutate.try_mutation(place, killed, found, tests, "not slow")
    assert (tree / "tlt_hpc/rl/account.py").read_text() == MODULE


def test_show_compares_two_suites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = {"file": "tlt_hpc/rl/account.py", "scope": "waits", "by": "tests/test_a.py::test_a"}
    for name, statuses in (("old", ("killed", "killed", "survived")), ("new", ("killed", "gone", "killed"))):
        lines = [json.dumps({"number": n, "status": status, **place}) for n, status in enumerate(statuses)]
        (tmp_path / name).write_text("\n".join(lines))
    mutate.main(["show", str(tmp_path / "old"), str(tmp_path / "new")])
    said = capsys.readouterr().out
    assert said.count("  all             2 killed    1 survived    0 gone") == 1
    assert said.count("  all             2 killed    0 survived    1 gone") == 1
    lost, won = said.split("killed in ")[1:]
    assert "old only: 1\n    1 gone" in lost and "new only: 1\n    2 survived" in won
