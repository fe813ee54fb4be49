"""Damaged inputs and run folders: a short form of ``tools/faults.py``, and that it sees what it looks for."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from answers import TINY, python
from launch_ranks import ROOT
from small_run import small_run

from tlt_hpc.cluster.watch.record import Record, encode
from tlt_hpc.config import load_config, to_toml


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with everything that the tool damages, written by hand."""
    folder = small_run(tmp_path_factory.mktemp("base") / "tiny")
    folder.make_missing_folders()
    folder.config.write_text(to_toml(load_config(TINY, ["run.name=tiny"])))
    folder.finished.write_text(json.dumps({"num_steps": 3, "policy_sha256": "a" * 64}))
    (folder.path / "data.json").write_text(json.dumps({"data.source": "embedded:gcd"}))
    record = Record("s", 0, "node1", 1, 1, "update", 1, "", 0, "", 0, 1, 0, 10, 0.0, ending="finished")
    (folder.status / "rank-0000").write_bytes(encode(record))
    owner = {"start": "s", "host": "node1", "pid": 1, "job": "", "restarts": "", "ends_at": None}
    (folder.status / "owner").write_text(json.dumps(owner))
    return folder.path


@pytest.mark.ci
def test_damaged_run_folders_are_answered_in_a_line(base: Path) -> None:
    told = python("tools/faults.py", "folders", "--seed", 3, "--count", 3, "--run", base).stdout
    assert "18 cases in" in told and ": 0 wrong" in told


@pytest.mark.ci
def test_damaged_inputs_are_refused_or_read_as_written() -> None:
    assert ": 0 wrong" in python("tools/faults.py", "inputs", "--seed", 5, "--count", 20).stdout


def say(text: str) -> int:
    sys.stderr.write(text)
    return 2


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        (lambda out: 1 // 0, "traceback"),
        (lambda out: time.sleep(60), "hang"),
        (lambda out: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
        (lambda out: 0, "false success"),
        (lambda out: 2, "no message"),
        (lambda out: 7, "status 7"),
        (lambda out: say("a word\n" * 20), "long message"),
        (lambda out: say("something is wrong"), "error that names no file"),
        (lambda out: say("file.json is wrong"), ""),
        (lambda out: (out.parent / "in" / "file").write_text("x"), "changed files"),
    ],
)
def test_each_fault_is_seen(tmp_path: Path, monkeypatch, command, fault: str) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    commands = importlib.import_module("fault_kinds.commands")
    monkeypatch.setattr(commands, "SECONDS", 0.5 if fault == "hang" else 90.0)
    (tmp_path / "in").mkdir()
    case = commands.Case("none", {"careless": command}, frozenset({"careless"}), r"file\.json", tmp_path / "in")
    assert commands.run(case, "careless", tmp_path / "said")[0] == fault
