"""The campaign of ``tools/faults.py``: a short form of it, and that it sees what it looks for."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SEED = 583


@pytest.fixture
def moments(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("fault_kinds.moments")


@pytest.mark.slow  # test_slurm_stops interrupts runs, too
@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_a_run_that_is_interrupted_ends_as_if_it_had_not_been(tmp_path):
    command = [sys.executable, "tools/faults.py", "moments", "--count", "2", "--seed", str(SEED), "--folder", tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": 0 wrong" in done.stdout
    results = [json.loads(line) for line in (tmp_path / "cases.jsonl").read_text().splitlines()]
    assert sum(result["outcome"] == "struck" for result in results) == 2, results
    assert sum(result["outcome"] == "equal" for result in results) > 0, results


def test_every_place_is_a_function_that_there_is(moments):
    """A rank that does not find its place would end before the run begins."""
    owner_of = importlib.import_module("fault_rank").owner_of
    assert all(callable(getattr(*owner_of(place))) for place in moments.PLACES)


def test_every_cycle_has_every_kind_by_the_seed(moments):
    drawn = [moments.draw(0, number) for number in range(200)]
    assert drawn == [moments.draw(0, number) for number in range(200)] != [moments.draw(1, n) for n in range(200)]
    for first in range(0, 200 - moments.CYCLE, moments.CYCLE):
        names = {fault.place.partition(":")[0] or fault.kind for _, fault in drawn[first : first + moments.CYCLE]}
        assert names == {*moments.PLACES, "kill", "limit", "cancel"}
    assert {int(fault.place.split(":")[2]) % 2 for _, fault in drawn if fault.place} == {0, 1}, "before and after"
    assert all(fault.rank < moments.JOBS[variant].ranks for variant, fault in drawn)
    assert {variant for variant, fault in drawn if fault.place.startswith("ahead:")} == {"ahead"}
    assert {variant for variant, _ in drawn} == {*moments.JOBS}


BEGUN = "  loading libraries\nruns/run (full): 9 steps, resuming from step 3\n"
NAMED = "tlt: rank 1 on n was killed or crashed, last seen in update of step 3; the same command resumes\n"
RAISED = 'Traceback (most recent call last):\n  File "x", line 1, in f\nRuntimeError: {}\n'


@pytest.mark.parametrize(
    ("kind", "rank", "status", "seconds", "log", "wrong"),
    [
        ("place", 1, 9, 1, BEGUN + NAMED, []),
        ("place", 1, 9, 1, BEGUN + NAMED + RAISED.format("no step"), ["traceback: RuntimeError: no step"]),
        ("place", 0, 9, 1, BEGUN + NAMED, ["names rank 1 on n, not rank 0"]),
        ("place", 1, 9, 1, BEGUN, ["names nobody, not rank 1"]),
        ("kill", 1, 9, 1, "starting 2 ranks\n", []),  # who has met nobody cannot be named
        ("kill", 1, 9, 1, "starting 2 ranks\n  loading libraries\n", ["names nobody, not rank 1"]),
        ("place", 1, 9, 1, BEGUN + "finished: 9 steps\n", []),
        ("place", 1, 71, 1, BEGUN + NAMED, ["hung"]),
        ("place", 1, 9, 31, BEGUN + NAMED, ["ended 31 s after the fault"]),
        ("limit", 0, 75, 1, BEGUN, []),
        ("limit", 0, 12, 1, "", []),  # before there was a handler
        ("limit", 0, 75, 1, BEGUN + RAISED.format("Connection closed"), ["traceback: RuntimeError: Connection"]),
        ("cancel", 0, 9, 1, BEGUN, ["status 9, not 75"]),
        ("cancel", 0, 9, 10.1, BEGUN, []),
    ],
)
def test_what_a_fault_does_not_explain_is_wrong(moments, kind, rank, status, seconds, log, wrong):
    found = moments.find_wrong(moments.Fault(kind, rank), True, status, seconds, log, False)
    assert len(found) == len(wrong) and all(a.startswith(b) for a, b in zip(found, wrong, strict=True)), found


def test_a_hang_and_a_run_that_ended_before_its_fault(moments):
    fault = moments.Fault("kill", 1)
    assert moments.find_wrong(fault, True, -9, 300.0, BEGUN, True) == ["hung"]
    assert moments.find_wrong(fault, False, 0, 0.0, BEGUN, False) == []
    assert moments.find_wrong(fault, False, 2, 0.0, BEGUN, False) == ["status 2, not 0"]


def test_a_run_without_a_step_for_too_long_hangs(moments, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.import_module("fault_kinds.runs"), "HANG_SECONDS", 0.2)
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not moments.advances_until(process, tmp_path, lambda: False)
        assert moments.advances_until(process, tmp_path, lambda: True)
        process.kill()
        process.wait()
        assert moments.advances_until(process, tmp_path, lambda: False), "it has ended"
