"""The short form of both campaigns of ``tools/faults.py``, and that they see what they look for."""

from __future__ import annotations

import faulthandler
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
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module


def campaign(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "tools/faults.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False)


def test_corrupted_inputs_end_in_one_clear_line_or_do_no_harm():
    done = campaign("inputs", "--count", 60, "--seed", 5)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 corrupted inputs in" in done.stdout and ": 0 faults" in done.stdout


@pytest.mark.slow  # test_kills and test_slurm_stops strike runs, too
@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_a_run_that_is_struck_ends_as_if_it_had_not_been(tmp_path):
    done = campaign("run", "--count", 2, "--seed", SEED, "--folder", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 lost committed data, 0 hung, 0 otherwise wrong" in done.stdout
    assert "0 went wrong; differs from runs that were left alone in: nothing" in done.stdout
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [result["number"] for result in results if result["struck"]] == [0, 1], results


def careless(folder: Path) -> str:
    """A reader with every fault that the campaign looks for."""
    text = (folder / "file").read_bytes()
    if text == b"executes":
        (folder / "canary").mkdir()
    elif text == b"overwrites":
        (folder / "file").write_bytes(b"")
    elif text == b"crashes":
        faulthandler.disable()
        os.abort()
    elif text == b"hangs":
        while True:
            pass
    elif text == b"unnamed":
        raise ValueError("something is wrong")
    elif text == b"foreign":
        json.loads("{")
    elif text == b"unclear":
        raise ValueError(f"{folder / 'file'}:\nwrong")
    elif text == b"traceback":
        raise RuntimeError(f"{folder / 'file'}: wrong")
    elif text == b"refused":
        raise ValueError(f"{folder / 'file'}: wrong; mend it")
    return "read" if text != b"believed" else "something else"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("executes", "executed"), ("overwrites", "overwritten"), ("crashes", "crash"), ("hangs", "hang"),
        ("unnamed", "unnamed"), ("foreign", "foreign error"), ("unclear", "unclear"), ("traceback", "traceback"),
        ("believed", "believed"), ("refused", "refused"), ("harmless", "unharmed"),
    ],
)  # fmt: skip
def test_each_kind_of_harm_is_seen(tools, tmp_path, monkeypatch, text, verdict):
    faulty = tools("faulty_inputs")
    monkeypatch.setattr(faulty, "SECONDS", 1.0)
    monkeypatch.setattr(faulty, "corruptions_of", lambda file: (lambda path, source: path.write_bytes(text.encode()),))
    (tmp_path / "pristine").mkdir()
    (tmp_path / "pristine" / "file").write_bytes(b"good")
    subject = faulty.Subject("one", ("file",), careless, has_checksums=True)
    outcome = faulty.try_one(subject, tmp_path / "pristine", "read", tmp_path, 0)
    assert (outcome.verdict, outcome.is_fault) == (verdict, verdict not in ("refused", "unharmed"))


def test_a_lost_line_or_a_changed_log_is_seen(tools, tmp_path):
    campaign_of = tools("fault_campaign")
    run = campaign_of.RunFolder(tmp_path / "run")
    run.rollout_log(0, 0).parent.mkdir(parents=True)
    run.rollout_log(0, 0).write_bytes(b"a log")
    run.metrics.write_text('{"training/global_step": 0}\n')
    before = campaign_of.committed(tmp_path)
    assert list(before) == ["step-000000/rank-0000.h5", "line 0"]
    run.rollout_log(0, 0).write_bytes(b"another")
    assert [name for name, mark in campaign_of.committed(tmp_path).items() if before[name] != mark] == [
        "step-000000/rank-0000.h5"
    ]
    run.metrics.write_text("")
    assert campaign_of.committed(tmp_path) == {}


def test_every_cycle_has_every_kind_on_every_variant_by_the_seed(tools):
    plan, places = tools("fault_plan"), set(tools("fault_rank").PLACES)
    drawn = [plan.draw(0, number) for number in range(200)]
    assert drawn == [plan.draw(0, number) for number in range(200)] != [plan.draw(1, number) for number in range(200)]
    for first in range(0, 200, plan.CYCLE):
        names = [fault.name for fault in drawn[first : first + plan.CYCLE]]
        assert set(names) == places | {"kill", "limit", "cancel", "disk"}
        variants = [plan.variant_of(first + place) for place in range(plan.CYCLE)]
        assert [variants.count(name) for name in plan.VARIANTS] == [14, 4, 2]
    assert all(fault.rank == 0 for fault in drawn if fault.name.startswith("commit"))
    before = [int(fault.detail.split(":")[2]) % 2 for fault in drawn if fault.kind == "place"]
    assert sum(before) == len(before) / 2, "in the first cycle before the function, in the second after it"
    ranks = {plan.variant_of(n): plan.VARIANTS[plan.variant_of(n)].ranks for n in range(plan.CYCLE)}
    assert all(fault.rank is None or fault.rank < ranks[plan.variant_of(n)] for n, fault in enumerate(drawn))
    late = plan.draw(0, 5, attempt=2)
    assert late.name == drawn[5].name and late != drawn[5]


BEGUN = "runs/run (full): 9 steps, going on from step 3\n"
NAMED = "tlt: rank 1 on n was killed by signal 9 (SIGKILL), last seen in update of step 3; the same command goes on\n"
RAISED = 'Traceback (most recent call last):\n  File "x", line 1, in f\nRuntimeError: {}\n'
FULL = "tlt: cannot write x: No space left on device; make room there\n"


@pytest.mark.parametrize(
    ("kind", "status", "log", "wrong"),
    [
        ("place merge:1:0", 9, BEGUN + NAMED, []),
        ("place merge:1:0", 9, BEGUN + NAMED + RAISED.format("Connection closed by peer [1]"), []),
        (
            "place merge:1:0",
            9,
            BEGUN + NAMED + RAISED.format("no such step"),
            ["traceback: RuntimeError: no such step"],
        ),
        ("place merge:1:0", 9, BEGUN, []),
        ("place merge:0:0", 9, BEGUN + NAMED, ["rank 1 was killed by signal 9 (SIGKILL), where rank 0 was killed"]),
        ("place merge:1:0", 1, BEGUN + NAMED, ["status 1, not 9"]),
        ("place merge:1:0", 71, BEGUN + NAMED, ["hung", "status 71, not 9"]),
        ("kill 1", 9, "", []),  # before there was a watch
        ("limit 0", 75, BEGUN, []),
        ("limit 0", 12, "", []),
        ("limit 0", 12, BEGUN, ["status 12, not 75"]),
        ("limit 0", 75, BEGUN + RAISED.format("Connection closed by peer"), ["traceback: RuntimeError: Connection"]),
        ("cancel 0", 143, "", []),
        ("cancel 0", 9, BEGUN, ["status 9, not 75"]),
        ("disk 9", 2, BEGUN + FULL, []),
        ("disk 9", 2, BEGUN, ["the full disk is not named"]),
        ("disk 9", 1, BEGUN + FULL, ["status 1, not 2"]),
        ("disk 9", 2, BEGUN.replace("3", "2") + FULL, ["went on from step 2, not 3"]),
    ],
)
def test_what_a_fault_does_not_explain_is_wrong(tools, kind, status, log, wrong):
    fault = tools("fault_plan").Fault(*kind.split(" ", 1), 0, 0.0)
    found = tools("fault_verdict").find_wrong(fault, True, status, 1.0, log, (3, 3), False)
    assert len(found) == len(wrong) and all(a.startswith(b) for a, b in zip(found, wrong, strict=True)), found


def test_a_hang_a_slow_end_and_a_silent_beginning_are_wrong(tools):
    fault, find = tools("fault_plan").Fault("place", "merge:1:0", 0, 0.0), tools("fault_verdict").find_wrong
    assert find(fault, True, -9, 300.0, BEGUN + NAMED, (3, 3), True) == ["hung"]
    assert find(fault, True, 9, 31.0, BEGUN + NAMED, (3, 3), False) == ["ended 31 s after the fault"]
    assert find(fault, True, 9, 1.0, NAMED, (3, 4), False) == ["did not say that it goes on from step 3"]
    assert find(fault, False, 0, 0.0, BEGUN, (3, 7), False) == []
    cancel = tools("fault_plan").Fault("cancel", "0", 1, 0.0)
    assert find(cancel, True, 9, 10.1, BEGUN + "stopped early (SIGTERM) after 3 of 9 steps\n", (3, 3), False) == []
    assert find(cancel, True, 9, 10.1, BEGUN, (3, 3), False) == ["status 9, not 75"]
    assert find(fault, False, 2, 0.0, BEGUN, (3, 7), False) == ["status 2, not 0"]


def test_a_run_that_stands_still_is_hung_and_one_that_works_is_not(tools, tmp_path, monkeypatch):
    module = tools("fault_campaign")
    monkeypatch.setattr(module, "STANDSTILL_SECONDS", 0.5)
    (tmp_path / "run").mkdir()
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not module.stands_or_ends(process, tmp_path, lambda: False)
        assert module.stands_or_ends(process, tmp_path, lambda: True)
        process.kill()
    working = f"for i in 1 2 3 4 5; do sleep 0.2; echo >> {tmp_path}/run/metrics.jsonl; done"
    with subprocess.Popen(["sh", "-c", working]) as process:
        assert module.stands_or_ends(process, tmp_path, lambda: False) and process.poll() == 0


def test_faults_that_came_too_late_do_not_count(tools, tmp_path, monkeypatch):
    module = tools("fault_campaign")
    asked = []

    def strike_once(place, number, attempt, fault):
        asked.append((number, attempt))
        wrong = ["lost line 0", "status 1, not 9"] if number == 1 else []
        return module.Result(number, attempt, place.name, fault, number != 1 or attempt == 2, 9, 0, 1, 0.1, wrong)

    monkeypatch.setattr(module, "strike_once", strike_once)
    module.strike_again(tmp_path, 0, 2)
    module.strike_again(tmp_path, 0, 1)
    assert asked == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert module.standing(tmp_path).startswith("3 faults stand (")
    assert module.standing(tmp_path).endswith(": 3 lost committed data, 0 hung, 3 otherwise wrong")


def test_a_replay_is_struck_where_there_is_one(tools, tmp_path, monkeypatch):
    module, plan = tools("fault_campaign"), tools("fault_plan")
    number = next(n for n in range(plan.CYCLE) if plan.draw(0, n).name == "replay")
    run = module.RunFolder(tmp_path / plan.variant_of(number) / "run")
    struck = []

    def strike_once(place, number, attempt, fault):
        struck.append(fault.name)
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        (run.checkpoints / "step-000002").mkdir(exist_ok=True)
        run.metrics.write_text("{}\n" * (3 if fault.name == "committed" else 2))
        return module.Result(number, attempt, place.name, fault, True, 9, 0, 1, 0.1, [])

    monkeypatch.setattr(module, "strike_once", strike_once)
    monkeypatch.setattr(module, "draw", lambda seed, n, attempt: plan.draw(0, number, attempt))
    monkeypatch.setattr(module, "variant_of", lambda n: plan.variant_of(number))
    module.strike_again(tmp_path, 0, 2)
    assert struck == ["committed", "replay"] * 2
    assert [result["number"] for result in module.results_in(tmp_path)] == [0, 0, 1, 1]
