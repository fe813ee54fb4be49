"""Every system call of a run fails once: the interception, a slice of the campaign, and what the campaign has found."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_ranks import ROOT
from small_run import small_record

sys.path.insert(0, str(ROOT / "tools"))
import faults
from fault_kinds.interception import CallFault, unavailable
from fault_kinds.runs import forking
from fault_kinds.system_calls import SETTINGS, STARTS, Campaign, Case

from tlt_hpc.common import files
from tlt_hpc.config import ConfigError, UserError, load_config, reading
from tlt_hpc.models import drafter_file, folder, weight_files
from tlt_hpc.storage import folder as run_folder
from tlt_hpc.storage import hdf5
from tlt_hpc.storage.feature_cache import FeatureCache
from tlt_hpc.storage.folder import RunFolder, WriteError, writing_atomically
from tlt_hpc.storage.rollout_log import read_step, write_step

WHY_NOT = unavailable()
needs_interception = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

# -- interception ---------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from fault_kinds.interception import CallFault, split
place = Path(sys.argv[2])
split(CallFault(**json.loads(sys.argv[3])), [str(place / "run")], place / "report")
"""


def intercepted(place: Path, fault: CallFault, program: str) -> tuple[str, dict[str, Any]]:
    """What a program printed whose calls on the folder ``run`` are intercepted, and the report."""
    (place / "run").mkdir(exist_ok=True)
    command = [sys.executable, "-c", PROGRAM + program, str(ROOT / "tools"), str(place), json.dumps(vars(fault))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3, f"the status is not the program's\n{done.stderr}"
    return done.stdout, json.loads((place / "report").read_text())


@needs_interception
@pytest.mark.parametrize("call", ["os.write(file, data)", "os.pwrite(file, data, 0)", "os.writev(file, [data, b'x'])"])
def test_a_write_that_is_cut_short_has_written_what_it_says(tmp_path: Path, call: str) -> None:
    program = f"""
data, file = b"0123456789", os.open(place / "run" / "file", os.O_CREAT | os.O_RDWR)
for _ in range(3):
    print({call}, os.lseek(file, 0, os.SEEK_CUR), flush=True)
os._exit(3)
"""
    out, report = intercepted(tmp_path, CallFault("resume", "write", 2, "short"), program)
    whole = 11 if "writev" in call else 10
    moved = [0, 0, 0] if "pwrite" in call else [whole, whole + 5, 2 * whole + 5]
    assert out.split() == [str(n) for pair in zip([whole, 5, whole], moved, strict=True) for n in pair]
    assert (tmp_path / "run" / "file").stat().st_size == max(moved[-1], 10)
    assert report["struck"] == str(tmp_path / "run" / "file") and len(report["files"]["resume write"]) == 3


@needs_interception
def test_a_call_fails_once_or_from_then_on_in_any_thread_and_on_the_folder_alone(tmp_path: Path) -> None:
    program = """
import threading
def try_rename(name):
    (place / name).write_text("")
    try:
        os.rename(place / name, place / f"{name}2")
        print("done")
    except OSError as error:
        print(error.errno)
for name in ("run/a", "else", "run/b", "run/c"):
    thread = threading.Thread(target=try_rename, args=(name,))
    thread.start()
    thread.join()
sys.stdout.flush()
os._exit(3)
"""
    out, _ = intercepted(tmp_path, CallFault("resume", "rename", 2, "EDQUOT"), program)
    assert out.split() == ["done", "done", str(errno.EDQUOT), "done"]
    out, _ = intercepted(tmp_path, CallFault("resume", "rename", 2, "EIO", stays=True), program)
    assert out.split() == ["done", "done", "5", "5"]
    out, report = intercepted(tmp_path, CallFault("step", "rename", 1), program)
    assert out.split() == ["done"] * 4 and report["struck"] == "", "another part of the run"


@needs_interception
def test_a_close_that_fails_has_closed(tmp_path: Path) -> None:
    program = """
file = os.open(place / "run" / "file", os.O_CREAT | os.O_RDWR)
try:
    os.close(file)
except OSError as error:
    print(error.errno, os.readlink(f"/proc/self/fd/{file}"), flush=True)
os._exit(3)
"""
    out, _ = intercepted(tmp_path, CallFault("resume", "close", 1, "EIO"), program)
    assert out.split() == ["5", "/dev/null"]


# -- the campaign ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    campaign = Campaign(tmp_path_factory.mktemp("calls"), forking(1, SETTINGS))
    campaign.prepare(0, ["saved"])
    return campaign


@needs_interception
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("part", "call", "error", "stays", "file", "outcome"),
    [
        ("step", "write", "short", False, "rollouts/", "continued"),
        ("checkpoint", "write", "short", False, "checkpoints/step-000004.part/state.json", "continued"),
        ("checkpoint", "fsync", "EIO", False, "checkpoints/step-000004.part/policy", "ended"),
        ("checkpoint", "rename", "ENOSPC", True, "checkpoints/step-000004.part", "ended"),
    ],
)
def test_a_call_fails_and_the_run_ends_as_if_it_had_not(
    campaign: Campaign, part: str, call: str, error: str, stays: bool, file: str, outcome: str
) -> None:
    calls = campaign.count(part)[call]
    number = next(number for number, path in enumerate(calls, 1) if f"/run/{file}" in path)
    result = campaign.judge(Case(part, 1, CallFault(part, call, number, error, stays)))
    assert result.details["file"].startswith(file) and result.outcome == outcome and not result.wrong, result
    assert (result.details["status"] == 2) == result.details["said"].startswith("tlt: ") == (outcome == "ended")


@needs_interception
@pytest.mark.mpi
@pytest.mark.ci
def test_what_rank_0_alone_writes_at_the_end_ends_all_ranks_with_one_line(tmp_path: Path) -> None:
    """The others had begun to sum the policy with torch, and ended with a traceback of a closed connection."""
    campaign = Campaign(tmp_path, forking(2, SETTINGS))
    campaign.prepare(0, ["saved"])
    calls = campaign.count("checkpoint")["rename"]
    number = next(number for number, path in enumerate(calls, 1) if "/run/drafter/" in path)
    result = campaign.judge(Case("checkpoint", 2, CallFault("checkpoint", "rename", number, "EIO")))
    assert result.details["file"].startswith("drafter/") and result.outcome == "ended" and not result.wrong, result


@pytest.mark.mpi
def test_what_a_run_has_lost_is_seen(campaign: Campaign) -> None:
    case, start = Case("step", 1, CallFault("step")), campaign.folder / "starts" / "1-whole"

    def wrong_after(change: Callable[[RunFolder], None], text: str = "", status: int = 0) -> list[str]:
        place = campaign.folder / "places" / "changed"
        shutil.copytree(start, place)
        change(RunFolder(place / "run"))
        wrong = campaign.wrong_end(case, place, status, text)
        shutil.rmtree(place)
        return wrong

    assert wrong_after(lambda run: None, status=2) == ["0 lines"]
    assert wrong_after(lambda run: None, "Traceback (most recent call last)\ntlt: no", 1) == ["traceback"]
    assert wrong_after(lambda run: None, status=71) == ["hung"]
    assert "differs in policy" in wrong_after(lambda run: run.finished.unlink())
    state = next((start / "run" / "checkpoints").iterdir()).name
    policy = "policy-00000-of-00001.safetensors"
    assert f"differs in {policy}" in wrong_after(lambda run: os.truncate(run.checkpoints / state / policy, 100))
    torn = wrong_after(lambda run: os.truncate(run.checkpoints / state / "state.json", 100))
    assert any(each.startswith(f"damaged under its final name: {state}: state.json") for each in torn)
    fewer = wrong_after(lambda run: run.metrics.write_text(run.metrics.read_text().splitlines(keepends=True)[-1]))
    assert {"differs in committed steps", "lost a committed step"} <= set(fewer)
    again = wrong_after(lambda run: run.metrics.with_name("metrics.dropped-000002.jsonl").touch())
    assert "generated a committed step again" in again
    lost = wrong_after(lambda run: run.rollout_log(1, 0).unlink())
    assert "differs in texts of step 2" in lost and any(each.startswith("not sound") for each in lost)
    assert "other files" in wrong_after(lambda run: (run.checkpoints / "x.part").write_text(""))[0]


@needs_interception
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_slice_of_all_calls(tmp_path: Path, ranks: int) -> None:
    options = ["--ranks", str(ranks), "--rank", str(ranks - 1), "--alike", "3", "--count", "60"]
    assert faults.main(["system-calls", *options, "--folder", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "cases.jsonl").read_text().splitlines()]
    assert {line["name"].split("-")[2] for line in lines} == set(STARTS)
    assert sum(line["outcome"] != "not reached" for line in lines) > 40


# -- what it found --------------------------------------------------------------------------------------------------


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


class FailsAtItsClose(files.io.FileIO):
    def close(self) -> None:
        super().close()
        refuse()

    def detach(self) -> FailsAtItsClose:
        return self


def test_a_file_that_fails_at_its_close_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner").write_text("{}")

    monkeypatch.setattr(files, "open_regular", FailsAtItsClose)
    for read in (files.read_bytes, lambda path: files.read_last_lines(path, 10)):
        with pytest.raises(OSError, match="Input/output error") as caught:
            read(tmp_path / "owner")
        assert files.os_error_text(caught.value).startswith(
            f"{tmp_path}/owner: Input/output error; the disk or the file server"
        )
        assert files.has_remedy(caught.value), "one line, and no traceback"


def test_a_part_that_cannot_be_removed_does_not_hide_why_it_was_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(WriteError, match="No space left on device; nothing was changed"):  # noqa: SIM117
        with writing_atomically(tmp_path / "a") as part:
            part.write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with writing_atomically(tmp_path / "b") as part:
        part.write_text("whole")
    assert (tmp_path / "b").read_text() == "whole", "nothing is left to be removed"


def test_a_file_that_is_there_and_may_not_last_is_not_called_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = run_folder.sync
    monkeypatch.setattr(run_folder, "sync", lambda path: refuse() if path == tmp_path else sync(path))
    with pytest.raises(WriteError, match="Input/output error; it is there, but a power failure may undo that"):  # noqa: SIM117
        with writing_atomically(tmp_path / "a") as part:
            part.write_text("whole")
    assert (tmp_path / "a").read_text() == "whole"


def test_a_folder_that_does_not_reach_the_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=re.escape(f"'{tmp_path}'")):
        run_folder.sync(tmp_path)


def test_a_log_that_fails_at_its_close_has_been_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_step(tmp_path / "log.h5", small_record(0, 0))

    monkeypatch.setattr(hdf5, "open_regular", FailsAtItsClose)
    assert read_step(tmp_path / "log.h5").step == 0


def test_an_old_feature_file_that_cannot_be_removed_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = RunFolder(tmp_path).feature_cache(0, 0)
    old.parent.mkdir(parents=True)
    old.touch()
    cache = FeatureCache(RunFolder(tmp_path), 0, 1, 8, 2**20, 1)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(WriteError, match=r"cannot write .*cache: Input/output error"):
        cache.begin_step(2, 0)
    with cache.tolerating_write_errors():
        cache.begin_step(2, 0)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("unable to open file <a> in read-only mode: Input/output error (5)"), "unable to open file <a>"),
        (RuntimeError("Error closing file <a>: Disk quota exceeded (122)"), "Error closing file <a>"),
        (FileNotFoundError("No such file or directory: a"), "it cannot be opened"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    ],
)
def test_weights_that_the_disk_refuses_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(weight_files, "safe_open", fail)
    with (
        pytest.raises(UserError, match=re.escape(f"cannot read {tmp_path}/w: {told}") + ".*; do that"),
        weight_files.open_safetensors(tmp_path / "w", "do that"),
    ):
        pass
    with (
        pytest.raises(UserError, match=f"cannot read the model in {tmp_path}: "),
        folder.naming_folder_in_errors(tmp_path),
    ):
        raise error
    with pytest.raises(RuntimeError, match="out of memory"), folder.naming_folder_in_errors(tmp_path):
        raise RuntimeError("out of memory")


def test_a_drafter_that_the_disk_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise drafter_file.SafetensorError("Error while serializing: I/O error: No space left (os error 28)")

    monkeypatch.setattr(drafter_file, "save_file", fail)
    with pytest.raises(
        WriteError, match=r"drafter.safetensors: No space left on device; nothing was changed: make room"
    ):
        drafter_file.write_drafter(tmp_path / "drafter", {})


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT, errno.EACCES])
def test_a_job_file_that_cannot_be_read_is_not_taken_for_another(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "tiny.toml"
    job.write_text("")

    def fail(path: Path) -> Any:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(reading, "read_toml", fail)
    with pytest.raises(ConfigError, match=rf"config file {job}: {os.strerror(number)}; (?!did you mean)"):
        load_config(job)
