"""The short form of ``tools/hostile.py``, and that it sees what it looks for."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from small_run import small_run

from tlt_hpc.cluster.watch.record import Record, encode
from tlt_hpc.config import load_config, to_toml
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.step_lines import STEP

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with all that the tool damages, without a run."""
    folder = small_run(tmp_path_factory.mktemp("base") / "tiny")
    folder.create()
    folder.config.write_text(to_toml(load_config(ROOT / "jobs" / "tiny.toml", ["run.name=tiny"])))
    folder.finished.write_text(json.dumps({"num_steps": 3, "policy_sha256": "a" * 64}))
    (folder.path / "data.json").write_text(json.dumps({"data.source": "embedded:gcd"}))
    record = Record("s", 0, "node1", 1, 1, "update", 1, "", 0, "", 0, 1, 0, 10, 0.0, ending="finished")
    (folder.status / "rank-0000").write_bytes(encode(record))
    owner = {"start": "s", "host": "node1", "pid": 1, "job": "", "restarts": "", "ends_at": None}
    (folder.status / "owner").write_text(json.dumps(owner))
    return folder.path


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("hostile")


@pytest.mark.parametrize("what", ["folders", "configurations"])
def test_hostile_input_is_answered_in_a_line(what: str, base: Path) -> None:
    command = [sys.executable, "tools/hostile.py", what, "--seed", "3", "--count", "6", "--run", base]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"6 hostile {what}, 36 commands in" in done.stdout and ": 0 faults" in done.stdout


def test_the_tool_sees_what_it_looks_for(base: Path, tools: ModuleType, tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    case = tools.Case("none", base / "config.toml", (), base, frozenset({"careless"}))
    monkeypatch.setattr(tools, "SECONDS", 0.5)

    def found(command: object) -> str:
        return str(tools.try_one(case, "careless", command, tmp_path / "said")[0])

    def wordy(case: object, out: Path) -> int:
        sys.stderr.write("a word\n" * 20)
        return 2

    assert found(lambda case, out: 1 // 0) == "traceback"
    assert found(lambda case, out: bytearray(2**40)) == "traceback"
    assert found(lambda case, out: time.sleep(60)) == "hang"
    assert found(lambda case, out: os.abort()) == "signal"
    assert found(lambda case, out: 0) == "false success"
    assert found(lambda case, out: 2) == "no word"
    assert found(lambda case, out: 7) == "status 7"
    assert found(wordy) == "many words"
    assert found(lambda case, out: 1) == ""


def test_permissions_bind_the_commands(base: Path, tools: ModuleType, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0)
    case = tools.Case("forbidden", base / "config.toml", (), base, frozenset())
    what, said = tools.try_one(case, "reader", lambda case, out: len(secret.read_text()), tmp_path / "said")
    assert what == "traceback" and "Permission denied" in said


def test_a_seed_gives_the_same_cases(base: Path, tools: ModuleType, tmp_path: Path) -> None:
    make = importlib.import_module("hostile_folders").make
    for again in ("a", "b"):
        kinds = []
        for number in range(12):
            place = tmp_path / again / str(number)
            place.mkdir(parents=True)
            kinds.append(make(number, place, base, random.Random(number)).kind)
        (tmp_path / f"{again}.json").write_text(json.dumps(kinds))
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    assert len(set(json.loads((tmp_path / "a.json").read_text()))) > 8
    assert STEP in (RunFolder(base).metrics).read_text(), "the run itself is left alone"
