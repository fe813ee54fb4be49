"""Trackers: they get what metrics.jsonl has, once, and their failures end no run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from answers import TINY, mistake, python
from launch_ranks import ROOT

from tlt_hpc.cli import rank_commands
from tlt_hpc.cluster.stopping import Stop, StopFlag
from tlt_hpc.config import Config, RunSection, load_config
from tlt_hpc.look import trackers
from tlt_hpc.look import tracking as tracking_module
from tlt_hpc.look.tracking import Tracking
from tlt_hpc.mpi import ending
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.step_lines import add_line, drop_lines, read_lines

needs_wandb = pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="wandb not installed")


def config_for(folder: Path, tracker: str) -> Config:
    return load_config(TINY, [f"run.folder={folder}", f"run.trackers={tracker}"])


def commit(folder: RunFolder, *steps: int, factor: float = 1.0) -> None:
    for step in steps:
        figures = {"critic/score/mean": factor * step / 7, "drafter/why": "always"}
        add_line(folder.metrics, {"training/global_step": float(step + 1), **figures})


def go_back(folder: RunFolder, *steps: int) -> None:
    """Resume from the first of these steps: they are others now."""
    drop_lines(folder.metrics, steps[0])
    commit(folder, *steps, factor=2.0)


def follow(config: Config, folder: RunFolder, *num_steps: int) -> None:
    """One start of a run that follows after each of these numbers of steps, and is killed: nothing is closed."""
    tracking = Tracking(config, folder)
    for count in num_steps:
        tracking.send_new_steps(count)
        settle(tracking)


def settle(tracking: Tracking) -> None:
    """Wait until the trackers have been given all, or were dropped."""
    for worker in tracking._workers.values():
        given = threading.Event()
        worker.enqueue_calls([given.set])
        while not worker.is_done and not given.wait(0.01):
            pass


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("tlt_hpc")]


@pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="tensorboard not installed")
def test_event_files_hold_what_metrics_hold_after_kills_and_steps_taken_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config, folder = config_for(tmp_path, "tensorboard"), RunFolder(tmp_path / "tiny")
    events = folder.path / "tensorboard"

    def assert_all_shown(num_steps: int) -> None:
        reader = EventAccumulator(str(events), size_guidance={"scalars": 0})
        reader.Reload()
        shown = {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
        lines = read_lines(folder.metrics).items()
        assert shown == {
            name: [(step + 1, pytest.approx(line[name], rel=1e-6)) for step, line in lines]
            for name in ("training/global_step", "critic/score/mean")
        }
        assert len(shown["critic/score/mean"]) == num_steps

    commit(folder, 0, 1, 2)
    follow(config, folder, 1, 2, 3)
    assert_all_shown(3)
    commit(folder, 3, 4)
    follow(config, folder, 3, 5)
    assert_all_shown(5)
    assert len(list(events.iterdir())) == 1, "events are written again"
    go_back(folder, 2, 3)
    follow(config, folder, 2, 3, 4)
    assert_all_shown(4)


def test_an_absent_package_is_one_line_before_anything_runs(tmp_path, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else find(name, *a))
    said = mistake(capsys, "train", TINY, f"run.folder={tmp_path}", "run.trackers=wandb-offline")
    words = "run.trackers with 'wandb-offline' needs the package 'wandb', which is not installed; pip install wandb"
    assert said == f"tlt: {words}\n" and not list(tmp_path.iterdir())


# --- in place of Weights & Biases, a library that fails as it is told ---


class FakeWandb:
    """Keeps what is logged, by the run's id."""

    class Settings:
        def __init__(self, **settings): ...

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[int, float]]] = {}
        self.mode = "offline"
        self.resumes: list[str | None] = []
        self.exit_codes: list[int] = []
        self.before: Callable[[str], object] = lambda call: None
        """Called at the begin of every call, with its name."""

    def init(self, **options):
        assert (options["mode"], options["project"]) == (self.mode, "tlt")
        self.resumes.append(options["resume"])
        kept = self.runs.setdefault(options["id"], [])
        if options["resume"] is None:
            kept.clear()
        self.before("init")

        def log(figures, step, commit):
            self.before("log")
            assert commit and (not kept or step > kept[-1][0]), "a step twice, or backwards"
            kept.append((step, figures["critic/score/mean"]))

        def finish(exit_code):
            self.before("finish")
            self.exit_codes.append(exit_code)

        return SimpleNamespace(dir="/runs/tiny/wandb/run-1/files", log=log, finish=finish)

    def fail_in(self, *calls: str, error: BaseException) -> None:
        def fail(called):
            if called in calls:
                raise error

        self.before = fail

    def stop_in(self, call: str) -> tuple[threading.Event, threading.Event]:
        """Do not return from a call until the second event is set; the first says that one has begun."""
        begun, released = threading.Event(), threading.Event()
        self.before = lambda called: None if called != call else begun.set() or released.wait()
        return begun, released


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(RunSection, "check_trackers", lambda section: None)
    return fake


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_for(tmp_path, "wandb-offline")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Of a run with four steps."""
    folder = RunFolder(tmp_path / "tiny")
    commit(folder, *range(4))
    return folder


WHOLE = [(step + 1, step / 7) for step in range(4)]
"""What a tracker has once it has been given the four steps."""


def test_wandb_has_each_step_once_under_one_id(config, folder, library, caplog):
    follow(config, folder, 0)
    assert json.loads(folder.tracking.read_text()) == {"wandb": 0, "wandb_id": next(iter(library.runs))}
    follow(config, folder, 1, 2)
    follow(config, folder, 2, 3)
    assert list(library.runs.values()) == [WHOLE[:3]]
    library.fail_in("init", error=ValueError("its server is away"))
    follow(config, folder, 4, 4)
    assert len(warnings_in(caplog)) == 1 and warnings_in(caplog)[0].startswith("wandb failed (ValueError: ")
    go_back(folder, 1)
    follow(config, folder, 2)
    library.before = lambda called: None
    commit(folder, 2, 3, factor=2.0)
    follow(config, folder, 4)
    *others, last = library.runs.values()
    assert others and last == [(1, 0.0), (2, 2 / 7), (3, 4 / 7), (4, 6 / 7)], "another run with all steps"


def test_wandb_online_after_offline_gets_all_steps_under_the_same_id(config, folder, library, tmp_path):
    """What is online may lack what the offline file had."""
    follow(config, folder, 2)
    (run_id,) = library.runs
    offline = [folder.path / "wandb" / f"offline-run-1-{each}" for each in (run_id, "before")]
    for path in offline:
        path.mkdir(parents=True)
    library.mode = "online"
    library.runs.clear()
    online = config_for(tmp_path, "wandb")
    follow(online, folder, 4)
    follow(online, folder, 4)
    assert library.runs == {run_id: WHOLE} and library.resumes == [None, None, "allow"]
    assert [path.exists() for path in offline] == [False, True], "what has another id was never sent"


REST = "the run continues without it; metrics.jsonl has every step, and the next start sends the rest"
SYNC = "; `wandb sync /runs/tiny/wandb/run-1` sends what it has"


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_tracker_that_does_not_answer_is_named_once_and_dropped(call, config, folder, library, caplog, monkeypatch):
    monkeypatch.setattr(trackers, "ANSWER_SECONDS", 0.2)
    _, released = library.stop_in(call)
    tracking = Tracking(config, folder)
    for count in range(1, 5):
        tracking.send_new_steps(count)
        time.sleep(0.1)
    (worker,) = tracking._workers.values()
    if call == "log":
        assert json.loads(folder.tracking.read_text()) == {"wandb": 1, "wandb_id": next(iter(library.runs))}
    assert not tracking.close(lambda: 9.0), "it may hold up the exit of the process"
    assert warnings_in(caplog) == [f"wandb has not answered for 0 s: {REST}{'' if call == 'init' else SYNC}"]
    released.set()
    worker._thread.join()
    library.before = lambda called: None
    with Tracking(config, folder) as tracking:
        tracking.send_new_steps(4)
    assert list(library.runs.values())[-1] == WHOLE and len(warnings_in(caplog)) == 1


def test_a_tracker_that_cannot_keep_up_is_dropped_and_has_what_it_was_given(
    config, folder, library, caplog, monkeypatch
):
    monkeypatch.setattr(trackers, "MAX_BEHIND", 2)
    commit(folder, *range(4, 9))
    begun, released = library.stop_in("log")
    tracking = Tracking(config, folder)
    tracking.send_new_steps(5)
    begun.wait()
    for count in range(6, 10):
        tracking.send_new_steps(count)
    assert warnings_in(caplog) == [f"wandb is more than 2 steps behind: {REST}{SYNC}"]
    released.set()
    (worker,) = tracking._workers.values()
    worker._thread.join()
    assert list(library.runs.values()) == [WHOLE[:1]], "a dropped tracker gets nothing more"
    monkeypatch.setattr(trackers, "MAX_BEHIND", 4)
    with Tracking(config, folder) as tracking:
        tracking.send_new_steps(9)
    assert [step for step, _ in list(library.runs.values())[-1]] == list(range(1, 10)), "as many as no queue holds"
    assert library.exit_codes == [0] and len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("error", [KeyError("a\nb"), SystemExit(3)])
def test_whatever_a_tracker_raises_is_one_line(error, config, folder, library, caplog):
    library.fail_in("log", error=error)
    follow(config, folder, 1, 2)
    (line,) = warnings_in(caplog)
    assert re.fullmatch(rf"wandb failed \({type(error).__name__}: .+\): {re.escape(REST + SYNC)}", line)


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [('{"wandb": 3, "wan', "invalid JSON"), ('{"wandb": "3", "wandb_id": "a"}', "'wandb' is '3'")],
)
def test_a_damaged_record_of_the_trackers_is_one_line(damaged, reason, config, folder, library, caplog):
    follow(config, folder, 1)
    folder.tracking.write_text(damaged)
    follow(config, folder, 2)
    (line,) = warnings_in(caplog)
    assert re.fullmatch(rf"{folder.tracking} cannot be used \(.*{reason}.*\): the trackers get new runs", line)
    assert list(library.runs.values()) == [WHOLE[:1], WHOLE[:2]]
    assert json.loads(folder.tracking.read_text()) == {"wandb": 2, "wandb_id": list(library.runs)[1]}


def test_closing_waits_only_while_time_is_left(config, folder, library, caplog, monkeypatch):
    """The time may shrink meanwhile: Slurm ends a job that it requeues."""
    monkeypatch.setattr(tracking_module, "FAILED_FINISH_SECONDS", 0.1)
    left = [9.0, 8.0, 0.0]
    _, released = library.stop_in("finish")
    with pytest.raises(ZeroDivisionError), Tracking(config, folder) as tracking:
        tracking.send_new_steps(1)
        raise ZeroDivisionError
    tracking = Tracking(config, folder)
    tracking.send_new_steps(1)
    assert not tracking.close(lambda: left.pop(0)) and left == []
    released.set()
    assert warnings_in(caplog) == [f"wandb had no time left to end: {REST}{SYNC}"] * 2


def test_a_preempted_job_waits_for_slurm_whatever_its_tracker_does(tmp_path, monkeypatch):
    """Slurm would take a job that ended by itself for finished."""
    done = []
    world = SimpleNamespace(rank=0, flag=StopFlag(), agree_to_stop=lambda: Stop.KILL)
    world.flag.request(Stop.KILL, "SIGTERM")
    monkeypatch.setattr(rank_commands, "await_preemption", lambda environment: done.append("waited"))
    monkeypatch.setattr(ending, "end_process_within", lambda seconds, status: done.append(f"ends with {status}"))

    def close(seconds_left):
        done.append(f"{seconds_left():.0f} s")
        return False

    assert rank_commands.requeue_stopped_job(world, tmp_path, lambda: "step 1", close) == 75
    assert done == ["7 s", "waited", "ends with 75"]


# --- starts in a process of their own, with the real libraries ---

START = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, "tests")
from test_tracking import commit, config_for, settle
from tlt_hpc.extras import trackers
from tlt_hpc.look import tracking
from tlt_hpc.storage.folder import RunFolder
place = Path(sys.argv[1]); config = config_for(place, sys.argv[2]); folder = RunFolder(place / "tiny")
"""


@needs_wandb
def test_a_process_ends_although_that_of_wandb_does_not_answer(tmp_path):
    code = (
        "tracking.ANSWER_SECONDS = trackers.EXIT_SECONDS = 0.5; commit(folder, 0); tracking.start_early(config.run)\n"
        "with tracking.Tracking(config, folder) as followed:\n"
        "    os.kill(trackers.WeightsAndBiases._process.pid, signal.SIGSTOP)\n"
        "    followed.send_new_steps(1)\n"
    )
    done = python("-c", START + code, tmp_path, "wandb-offline", timeout=60)
    assert done.stderr == (f"wandb had no time left to end: {REST}\n")


def wandb_rows(path: Path) -> list[tuple[int, float]]:
    """Steps and scores in an offline file of W&B: a log of LevelDB, in blocks of 32 KiB, after a head of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, rows = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record.FromString(whole)
            if record.WhichOneof("record_type") == "history":
                found = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                rows.append((int(found["training/global_step"]), float(found["critic/score/mean"])))
            whole = b""
    return rows


@pytest.mark.ci
@needs_wandb
def test_a_start_after_a_kill_writes_all_steps_to_the_offline_file(tmp_path):
    """The library holds steps in memory for seconds, which a SIGKILL takes."""
    place, ids = tmp_path / "tiny", set[str]()
    for old, steps, status in ((0, 2, -9), (2, 3, -9), (3, 4, 0)):
        code = (
            f"commit(folder, *range({old}, {steps})); tracking.start_early(config.run)\n"
            f"followed = tracking.Tracking(config, folder); followed.send_new_steps({steps}); settle(followed)\n"
            f"os.kill(os.getpid(), signal.SIGKILL) if {status} else followed.close(lambda: 60.0)\n"
        )
        done = python("-c", START + code, tmp_path, "wandb-offline", status=status, timeout=60)
        assert "failed" not in done.stderr, done.stderr
        (file,) = (place / "wandb").glob("offline-run-*/run-*.wandb")
        ids |= {json.loads((place / "tracking.json").read_text())["wandb_id"], file.stem.removeprefix("run-")}
    assert len(ids) == 1 and wandb_rows(file) == WHOLE


def test_ranks_that_track_nothing_do_not_load_mlflow(tmp_path):
    """DeepSpeed would import it, for seconds; whoever imports it afterwards gets it."""
    (tmp_path / "mlflow.py").write_text("print('imported')")
    code = "from tlt_hpc.rl.distributed import load_deepspeed; load_deepspeed(); print('loaded'); import mlflow"
    done = python("-c", code, env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"})
    assert done.stdout.split()[-2:] == ["loaded", "imported"]
