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
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module


@pytest.mark.slow  # test_kills and test_slurm_stops interrupt runs, too
@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_a_run_that_is_interrupted_ends_as_if_it_had_not_been(tmp_path):
    command = [sys.executable, "tools/faults.py", "run", "--count", "2", "--seed", str(SEED), "--folder", tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 lost committed data, 0 hung, 0 otherwise wrong" in done.stdout
    assert "differs from runs without interruptions in: nothing" in done.stdout
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert sum(result["struck"] for result in results) == 2, results


def test_every_cycle_has_every_kind_on_every_variant_by_the_seed(tool):
    plan, places = tool("fault_plan"), set(tool("fault_rank").PLACES)
    drawn = [plan.draw(0, number) for number in range(200)]
    assert drawn == [plan.draw(0, number) for number in range(200)] != [plan.draw(1, number) for number in range(200)]
    for first in range(0, 200, plan.CYCLE):
        assert {fault.name for fault in drawn[first : first + plan.CYCLE]} == places | {
            "kill",
            "limit",
            "cancel",
            "disk",
        }
        variants = [plan.variant_of(first + place) for place in range(plan.CYCLE)]
        assert [variants.count(name) for name in plan.VARIANTS] == [14, 4, 2]
    after = [int(fault.detail.split(":")[2]) % 2 for fault in drawn if fault.kind == "place"]
    assert sum(after) == len(after) / 2, "in the first cycle before the function, in the second after it"
    assert all(fault.rank is None or fault.rank < plan.RANKS[plan.variant_of(n)] for n, fault in enumerate(drawn))


BEGUN = "runs/run (full): 9 steps, resuming from step 3\n"
NAMED = "tlt: rank 1 on n was killed by signal 9 (SIGKILL), last seen in update of step 3; the same command resumes\n"
RAISED = 'Traceback (most recent call last):\n  File "x", line 1, in f\nRuntimeError: {}\n'
FULL = "tlt: cannot write x: No space left on device; free space there\n"
STOPPED = "stopped early (SIGTERM) after 3 of 9 steps\n"


@pytest.mark.parametrize(
    ("kind", "status", "seconds", "log", "wrong"),
    [
        ("place merge:1:0", 9, 1, BEGUN + NAMED, []),
        ("place merge:1:0", 9, 1, BEGUN + NAMED + RAISED.format("no step"), ["traceback: RuntimeError: no step"]),
        ("place merge:0:0", 9, 1, BEGUN + NAMED, ["rank 1 was killed by signal 9 (SIGKILL), not rank 0"]),
        ("place merge:1:0", 71, 1, BEGUN + NAMED, ["hung", "status 71, not 9"]),
        ("place merge:1:0", 9, 31, BEGUN + NAMED, ["ended 31 s after the fault"]),
        ("kill 1", 9, 1, "", []),  # before there was a watch
        ("limit 0", 75, 1, BEGUN, []),
        ("cancel 0", 9, 1, BEGUN, ["status 9, not 75"]),
        ("cancel 0", 9, 10.1, BEGUN + STOPPED, []),
        ("disk 9", 2, 1, BEGUN + FULL, []),
        ("disk 9", 2, 1, BEGUN, ["the full disk is not named"]),
        ("disk 9", 2, 1, BEGUN.replace("step 3", "step 2") + FULL, ["resumed from step 2, not 3"]),
    ],
)
def test_what_a_fault_does_not_explain_is_wrong(tool, kind, status, seconds, log, wrong):
    fault = tool("fault_plan").Fault(*kind.split())
    found = tool("fault_verdict").find_wrong(fault, True, status, seconds, log, (3, 3), False)
    assert len(found) == len(wrong) and all(a.startswith(b) for a, b in zip(found, wrong, strict=True)), found


def test_a_hang_and_a_start_from_nowhere_are_wrong(tool):
    fault, find = tool("fault_plan").Fault("place", "merge:1:0"), tool("fault_verdict").find_wrong
    assert find(fault, True, -9, 300.0, BEGUN + NAMED, (3, 3), True) == ["hung"]
    assert find(fault, True, 9, 1.0, NAMED, (3, 4), False) == ["did not say that it resumes from step 3"]
    assert find(fault, False, 0, 0.0, BEGUN, (3, 7), False) == []
    assert find(fault, False, 2, 0.0, BEGUN, (3, 7), False) == ["status 2, not 0"]


def test_a_lost_line_or_a_changed_log_is_seen(tool, tmp_path):
    faults = tool("faults")
    run = faults.RunFolder(tmp_path / "run")
    run.rollout_log(0, 0).parent.mkdir(parents=True)
    run.rollout_log(0, 0).write_bytes(b"a log")
    run.metrics.write_text('{"training/global_step": 0}\n')
    before = faults.committed(tmp_path)
    assert list(before) == ["step-000000/rank-0000.h5", "line 0"]
    run.rollout_log(0, 0).write_bytes(b"another")
    assert [name for name, content in faults.committed(tmp_path).items() if before[name] != content] == [
        "step-000000/rank-0000.h5"
    ]
    run.metrics.write_text("")
    assert faults.committed(tmp_path) == {}


def test_faults_that_came_too_late_do_not_count(tool, tmp_path, monkeypatch):
    faults, tried = tool("faults"), []

    def interrupt_once(place, number, fault):
        tried.append((fault.name, number))
        wrong = ["lost line 0", "status 1, not 9"] if number == 1 else []
        return faults.Result(number, place.name, fault, number != 1, 9, 0, 1, 0.1, wrong)

    monkeypatch.setattr(faults, "interrupt_once", interrupt_once)
    monkeypatch.setattr(faults, "draw", lambda seed, number: tool("fault_plan").Fault("place", "merge:0:0"))
    faults.interrupt(tmp_path, 0, 2)
    faults.interrupt(tmp_path, 0, 1)
    assert tried == [("merge", number) for number in range(4)]
    assert faults.summary(tmp_path) == "3 faults (merge 3): 1 lost committed data, 0 hung, 1 otherwise wrong"
