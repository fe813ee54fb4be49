"""What a power failure leaves of a run: the model of a disk, a recorded run, and each fsync, without which it fails."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_world import OneRank
from launch_ranks import ROOT
from small_run import line_of, small_record

sys.path.insert(0, str(ROOT / "tools"))
import faults
from fault_kinds.disk import Disk, content, everything, keeping, nothing
from fault_kinds.interception import Change, read_changes, split, unavailable
from fault_kinds.power_loss import Trial, not_recorded, record, trial_of
from fault_kinds.runs import forking
from fault_kinds.system_calls import SETTINGS

from tlt_hpc import train
from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.storage.feature_cache import FeatureCache
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.records import write_json
from tlt_hpc.storage.rollout_log import write_kept_responses, write_step
from tlt_hpc.storage.step_lines import add_line, read_lines

WHY_NOT = unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def recorded(place: Path, act: Callable[[RunFolder], None]) -> list[Change]:
    """The changes that a program makes to a run's folder in ``place``."""
    place.mkdir()
    if not (child := os.fork()):
        try:
            split(None, [str(place)], place.with_suffix(".json"))
            act(RunFolder(place / "run"))
            os._exit(0)
        except BaseException:  # noqa: BLE001 (the test's process asks for the status alone)
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    return read_changes(place.with_suffix(".json"))


def without(changes: list[Change], lost: str) -> list[Change]:
    """The same without the fsync of what has such a path."""
    left = [change for change in changes if change.kind != "fsync" or not re.search(lost, change.path)]
    assert len(left) < len(changes), "there is such a call"
    return left


# -- the model ------------------------------------------------------------------------------------------------------


def test_a_disk_keeps_what_was_synced_and_anything_of_the_rest(tmp_path: Path) -> None:
    def act(run: RunFolder) -> None:
        run.path.mkdir()
        file = os.open(run.path / "a", os.O_CREAT | os.O_RDWR)
        os.write(file, b"one")
        os.fsync(file)
        os.pwrite(file, b"n", 0)
        os.writev(file, [b"t", b"wo"])
        (run.path / "a").rename(run.path / "b")
        with pytest.raises(OSError, match="not empty"):
            run.path.rmdir()

    disk = Disk(tmp_path / "recorded")
    changes = recorded(tmp_path / "recorded", act)
    assert [change.kind for change in changes] == [
        "mkdir", "openat", "write", "fsync", "write", "write", "rename", "unlink",
    ]  # fmt: skip

    def left(choice: Any) -> dict[str, bytes | None]:
        state = disk.state(choice)
        return {name: part and content(part) for name, part in state.items() if name}

    for change in changes:
        disk.apply(change)
    assert not_recorded(disk, tmp_path / "recorded") == []
    assert left(everything) == {"/run": None, "/run/b": b"nnetwo"}
    assert left(nothing) == left(keeping(data=True)) == {}
    assert left(keeping(names=True)) == {"/run": None, "/run/b": b"one"}
    assert left(keeping(names=True, zeros=True)) == {"/run": None, "/run/b": b"one\0\0\0"}
    disk.apply(Change(0.0, 0, "fsync", disk.root))
    disk.apply(Change(0.0, 0, "fsync", f"{disk.root}/run"))
    disk.apply(Change(0.0, 0, "unlink", f"{disk.root}/run/b"))
    assert left(nothing) == {"/run": None, "/run/b": b"one"} and left(everything) == {"/run": None}


# -- a run ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Change]]:
    return record(tmp_path_factory.mktemp("power"), forking(1, SETTINGS))


def tried(run: tuple[Path, list[Change]], folder: Path, lost: str = "", first: int = 0) -> Trial:
    """A trial of a part of the recorded run; without the fsyncs of the path ``lost``, from one of them on."""
    place, changes = run
    if lost:
        numbers = [n for n, each in enumerate(changes) if each.kind == "fsync" and re.search(lost, each.path)]
        trial = trial_of(folder, place, without(changes, lost), ranks=1)
        trial.run(every=10**6, num_random=0, numbers=range(numbers[first] - first, len(changes)))
        return trial
    lines = [n for n, each in enumerate(changes) if each.kind == "rename" and each.target.endswith("/metrics.jsonl")]
    trial = trial_of(folder, place, changes, ranks=1)
    trial.run(every=100, num_random=1, numbers=range(lines[1] - 5, lines[2] + 20))
    return trial


@pytest.mark.mpi
def test_all_that_a_power_failure_can_leave_of_a_run_is_good(run: tuple[Path, list[Change]], tmp_path: Path) -> None:
    trial = tried(run, tmp_path / "trial")
    assert trial.wrong == [] and len(trial.results) > 50
    assert not_recorded(trial.disk, run[0]) == []
    assert "names alone" in {result.row for result in trial.results}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("lost", "first", "told"),
    [
        ("/recorded$", 0, "run/config.toml is lost"),
        ("/rank-0000.h5.part$", 0, "damaged rollout log"),
        ("/rollouts/step-000001$", 0, "step 1 has a line, and not its responses"),
        ("/rollouts$", 0, "step 1 has a line, and not its responses"),
        ("/metrics.jsonl.part$", 0, "metrics.jsonl:1 is cut off"),
        ("/run$", 0, "run/config.toml is lost"),
        ("/checkpoints/.*safetensors$", 0, "skipping checkpoint"),
        ("/checkpoints/.*state.json$", 0, "skipping checkpoint"),
        ("/checkpoints/step-000002.part$", 0, "skipping checkpoint"),
        ("/checkpoints$", 1, "checkpoints/step-000004 is lost"),
    ],
)
def test_without_an_fsync_a_run_loses_what_it_has_committed(
    run: tuple[Path, list[Change]], tmp_path: Path, lost: str, first: int, told: str
) -> None:
    wrong = tried(run, tmp_path / "trial", lost, first).wrong
    assert any(told in line for line in wrong), wrong


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_runs_resume_from_what_is_left(ranks: int) -> None:
    assert faults.main(["power-loss", f"--ranks={ranks}", "--every=20", "--random=1", "--resumes=5"]) == 0


# -- what no short run does -----------------------------------------------------------------------------------------


def opened(
    place: Path, act: Callable[[RunFolder], None], look: Callable[[RunFolder], Iterable[str]], lost: str = ""
) -> list[str]:
    """What is wrong with states that a program leaves; ``lost``: one of its fsyncs is left out."""
    changes = recorded(place, act)
    changes = without(changes, lost) if lost else changes
    trial = Trial(place.with_suffix(".trial"), Disk(place), changes, lambda p: look(RunFolder(p / "run")), ("status",))
    trial.run()
    return trial.wrong


def test_logs_of_ranks_that_are_no_more_do_not_come_back(tmp_path: Path) -> None:
    def act(run: RunFolder) -> None:
        for rank in range(2):
            write_step(run.rollout_log(0, rank), small_record(0, rank))
        write_step(run.rollout_log(0, 0), small_record(0, 0, 1))
        train.remove_foreign_logs(run, 1, 0)
        add_line(run.metrics, line_of(0))

    def look(run: RunFolder) -> Iterable[str]:
        if read_lines(run.metrics) and len(run.rollout_logs(0)) != 1:
            yield "a step has responses twice"

    assert opened(tmp_path / "a", act, look) == []
    # the last fsync of the folder alone protects from this
    changes = recorded(tmp_path / "b", act)
    last = max(n for n, change in enumerate(changes) if change.kind == "fsync" and change.path.endswith("/step-000001"))
    del changes[last]
    trial = Trial(tmp_path / "c", Disk(tmp_path / "b"), changes, lambda place: look(RunFolder(place / "run")), ())
    trial.run(numbers=range(last, len(changes)))
    assert any("responses twice" in line for line in trial.wrong)


def test_responses_that_a_stop_has_kept_are_there(tmp_path: Path) -> None:
    def act(run: RunFolder) -> None:
        write_kept_responses(run.kept_responses_path(3, 0, 0), "origin", small_record(3, 0).rollouts, durable=True)
        write_json(run.finished, {})

    assert opened(tmp_path / "a", act, lambda run: ()) == []
    for number, lost in enumerate(("/run$", "/kept$", "/step-000004$", "h5.part$")):
        assert any("kept/step" in line for line in opened(tmp_path / str(number), act, lambda run: (), lost)), lost


def test_features_of_a_warm_up_are_there_and_those_of_a_step_may_be_lost(tmp_path: Path) -> None:
    def write(run: RunFolder, durable: bool) -> None:
        cache = FeatureCache(run, 0, 1, 8, 2**20, 1)
        cache.begin_step(0, 0)
        cache.append(np.arange(5, dtype=np.int32), 2, np.zeros((4, 1, 8), np.uint16))
        cache.end_step(durable)
        write_json(run.finished, {})

    assert opened(tmp_path / "a", lambda run: write(run, True), lambda run: ()) == []
    assert any("cache/" in line for line in opened(tmp_path / "b", lambda run: write(run, False), lambda run: ()))


def test_the_first_checkpoint_in_new_folders_is_there(tmp_path: Path) -> None:
    def act(run: RunFolder) -> None:
        CheckpointStore(run.training, keep=2).save(1, OneRank(), {"policy": {"weights": torch.zeros(9)}}, {})

    assert opened(tmp_path / "a", act, lambda run: ()) == []
    for number, lost in enumerate(("/recorded$", "/run$", "/training$", "part$", "state.json$", "safetensors$")):
        name = f"/{number}$" if lost == "/recorded$" else lost
        wrong = opened(tmp_path / str(number), act, lambda run: (), name)
        assert any("training/step-000001 is" in line for line in wrong), lost


def test_a_checkpoint_that_was_removed_does_not_come_back_damaged(tmp_path: Path) -> None:
    def act(run: RunFolder) -> None:
        store = CheckpointStore(run.checkpoints, keep=2)
        for step in (1, 2, 3):
            store.save(step, OneRank(), {"policy": {"weights": torch.full((9,), float(step))}}, {})
        store.drop_after(2)
        write_json(run.finished, {})

    def look(run: RunFolder) -> Iterable[str]:
        found = CheckpointStore(run.checkpoints, keep=2).open_checkpoints_within(0, 9)  # warns of damaged ones
        if run.finished.exists() and 3 in found:
            yield "it is back"

    assert opened(tmp_path / "a", act, look) == []
    lines = opened(tmp_path / "b", act, look, "/checkpoints$")
    assert any("it is back" in line for line in lines) and any("skipping checkpoint" in line for line in lines)
