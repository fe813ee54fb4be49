"""What pytest and the package need inside a copy of the tree that `mutate.py` tests: a plugin, and the probes' `hit`.

`mutate.py` copies this file to the root of each copy. In a copy with probes (`mutate.py map`) the plugin records which
test executes which probe; otherwise (`mutate.py run`) it runs the chosen tests in the chosen order, each with a limit.
"""

from __future__ import annotations

import json
import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parent
HITS = ROOT / "mutation_hits"
"""The context that is current and the number of probes, then one byte for each context and probe. Shared memory: every
process that a test starts writes there, even one whose environment was cleared or that is killed."""
REPORT, CHOICE, CURRENT = ROOT / "mutation_report.json", ROOT / "mutation_choice.json", ROOT / "mutation_current"
HEADER = struct.Struct("II")
MAX_CONTEXTS = 8192

_contexts = [""]  # the import of the package and of the tests
_uses: dict[str, list[str]] = {}
_seconds: dict[str, float] = {}
_failed: set[str] = set()
_hits = mmap.mmap(-1, HEADER.size)  # without probes: no other process reads it
if HITS.exists():
    with HITS.open("r+b") as _file:
        _hits = mmap.mmap(_file.fileno(), 0)


def hit(*probes: int) -> None:
    """Record that the current context executes these probes."""
    context, num_probes = HEADER.unpack_from(_hits)
    for probe in probes:
        _hits[HEADER.size + context * num_probes + probe] = 1


def _enter(name: str) -> None:
    if name not in _contexts:
        assert len(_contexts) < MAX_CONTEXTS, f"more than {MAX_CONTEXTS} tests and shared fixtures"
        _contexts.append(name)
    struct.pack_into("I", _hits, 0, _contexts.index(name))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the chosen tests, in their order, and those that the mutation itself has added to their files."""
    import pytest

    for item in items:
        fixtures = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009  private to pytest
        _uses[item.nodeid] = [_fixture_context(found[-1]) for found in fixtures if found[-1].scope != "function"]
    if CHOICE.exists():
        choice = json.loads(CHOICE.read_text())
        place = {name: number for number, name in enumerate(choice["limits"])}
        others = set(choice["others"])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in others])
        items[:] = [item for item in items if item.nodeid not in others]
        items.sort(key=lambda item: place.get(item.nodeid, len(place)))
        for item in items:
            limit = choice["limits"].get(item.nodeid)
            if limit is not None:  # by a thread: a mutation may hang in a call of MPI, which no signal interrupts
                item.add_marker(pytest.mark.timeout(limit, method="thread"), append=False)


def _fixture_context(fixture: pytest.FixtureDef[object]) -> str:
    return f"fixture {fixture.baseid}::{fixture.argname}"


def pytest_runtest_logstart(nodeid: str) -> None:
    CURRENT.write_text(nodeid)
    _enter(nodeid)


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    """What a shared fixture executes counts for every test that uses it, not for the first one alone."""
    _enter(request.node.nodeid if fixturedef.scope == "function" else _fixture_context(fixturedef))


def pytest_runtest_call(item: pytest.Item) -> None:
    _enter(item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if report.failed:
        _failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    """Write what `mutate.py map` asks for: each test's seconds, whether it passed, and the probes that it executes."""
    num_probes = HEADER.unpack_from(_hits)[1]
    executed, tests = {}, {}
    for context, name in enumerate(_contexts):
        start = HEADER.size + context * num_probes
        executed[name] = {probe for probe, is_hit in enumerate(_hits[start : start + num_probes]) if is_hit}
    for name, seconds in _seconds.items():
        own = set().union(*(executed.get(context, ()) for context in (name, *_uses[name])))
        tests[name] = {"seconds": round(seconds, 3), "passed": name not in _failed, "executes": sorted(own)}
    REPORT.write_text(json.dumps({"at_import": sorted(executed[""]), "tests": tests}))
