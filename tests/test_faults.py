"""The short form of both campaigns of ``tools/faults.py``, and that they see what they look for."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module


def campaign(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "tools/faults.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)


def test_corrupted_inputs_end_in_one_clear_line_or_do_no_harm():
    done = campaign("inputs", "--count", 60, "--seed", 5)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 corrupted inputs in" in done.stdout and ": 0 faults" in done.stdout


@pytest.mark.mpi
def test_a_run_that_is_struck_ends_as_if_it_had_not_been(tmp_path):
    done = campaign("run", "--count", 2, "--seed", 3039, "--folder", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 lost committed data or hung; differs from a run that was left alone in: nothing" in done.stdout
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [result["number"] for result in results] == [0, 1] and all(result["struck"] for result in results), results


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


def test_faults_are_drawn_by_the_seed_and_of_all_kinds(tools):
    draw = tools("fault_campaign").draw
    drawn = [draw(random.Random(f"0 {number}")) for number in range(200)]
    assert drawn == [draw(random.Random(f"0 {number}")) for number in range(200)]
    assert {fault.kind for fault in drawn} == {"place", "kill", "limit", "cancel", "disk"}
    places = tools("fault_rank").PLACES
    assert {fault.detail.partition(":")[0] for fault in drawn if fault.kind == "place"} == set(places)
