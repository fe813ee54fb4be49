"""Trackers: they get what metrics.jsonl has, once, and their failures end no run."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tlt_hpc.cli import rank_commands
from tlt_hpc.cli.main import main
from tlt_hpc.cluster.stopping import Stop, StopFlag
from tlt_hpc.config import Config, TrackingSection, load_config
from tlt_hpc.look import trackers
from tlt_hpc.look import tracking as tracking_module
from tlt_hpc.look.tracking import Tracking
from tlt_hpc.mpi import ending
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.step_lines import add_line, drop_lines, read_lines

ROOT = Path(__file__).parent.parent
TINY = ROOT / "jobs" / "tiny.toml"
needs_tensorboard = pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="tensorboard not installed")
needs_mlflow = pytest.mark.skipif(not importlib.util.find_spec("mlflow"), reason="mlflow-skinny not installed")
needs_trackio = pytest.mark.skipif(not importlib.util.find_spec("trackio"), reason="trackio not installed")
needs_wandb = pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="wandb not installed")


def config_for(folder: Path, *overrides: str) -> Config:
    return load_config(TINY, [f"run.folder={folder}", *overrides])


def commit(folder: RunFolder, *steps: int, factor: float = 1.0) -> None:
    for step in steps:
        add_line(
            folder.metrics,
            {"training/global_step": float(step + 1), "critic/score/mean": factor * step / 7, "drafter/why": "always"},
        )


def told(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows: tag -> step -> value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    found = {}
    for tag in reader.Tags()["scalars"]:
        events = reader.Scalars(tag)
        found[tag] = {event.step: event.value for event in events}
        assert len(found[tag]) == len(events), f"{tag} has a step twice"
    return found


def logged(folder: RunFolder) -> dict[str, dict[int, float]]:
    """The same from metrics.jsonl; trackers count steps from 1."""
    found: dict[str, dict[int, float]] = {}
    for step, line in read_lines(folder.metrics).items():
        for name, value in line.items():
            if not isinstance(value, str):
                found.setdefault(name, {})[step + 1] = pytest.approx(value, rel=1e-6)
    return found


def follow(config: Config, folder: RunFolder, *num_steps: int) -> None:
    """One start of a run that follows after each of these numbers of steps, and is killed: nothing is closed."""
    tracking = Tracking(config, folder)
    for count in num_steps:
        tracking.follow(count)
        settle(tracking)


def settle(tracking: Tracking) -> None:
    """Wait until the trackers have been given all, or were dropped."""
    for worker in tracking._workers.values():
        given = threading.Event()
        worker.put([given.set])
        while not worker.is_done and not given.wait(0.01):
            pass


def warnings_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("tlt_hpc")]


@needs_tensorboard
def test_event_files_hold_what_metrics_hold_after_kills_and_steps_taken_back(tmp_path):
    config, folder = config_for(tmp_path, "tracking.tensorboard=true"), RunFolder(tmp_path / "tiny")
    events = folder.path / "tensorboard"
    commit(folder, 0, 1, 2)
    follow(config, folder, 1, 2, 3)
    assert told(events) == logged(folder)
    commit(folder, 3, 4)
    follow(config, folder, 3, 5)
    assert told(events) == logged(folder) and len(list(events.iterdir())) == 1, "events are written again"
    # resumed from an earlier checkpoint: steps 2 and on are others now
    drop_lines(folder.metrics, 2)
    commit(folder, 2, 3, factor=2.0)
    follow(config, folder, 2, 3, 4)
    assert told(events) == logged(folder)
    assert max(told(events)["critic/score/mean"]) == 4


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "tracking.wandb=offline",
            "tracking.wandb = 'offline' needs the package 'wandb', which is not installed; pip install wandb",
        ),
        (
            "tracking.mlflow=true",
            "tracking.mlflow = true needs the package 'mlflow', which is not installed; pip install mlflow-skinny",
        ),
        (
            "tracking.trackio=true",
            "tracking.trackio = true needs the package 'trackio', which is not installed; pip install trackio",
        ),
    ],
)
def test_an_absent_package_is_one_line_before_anything_runs(override, words, tmp_path, capsys, monkeypatch):
    find, absent = importlib.util.find_spec, override.partition("=")[0].removeprefix("tracking.")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == absent else find(name, *a))
    assert main(["train", str(TINY), f"run.folder={tmp_path}", override]) == 2
    assert capsys.readouterr().err == f"tlt: {words}\n" and not list(tmp_path.iterdir())


class FakeWandb:
    """Stands for the library: keeps what is logged, by the run's id."""

    class Error(Exception):
        pass

    class Settings:
        def __init__(self, **settings): ...

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[int, float]]] = {}
        self.fails = False
        self.is_offline = True
        self.resume: str | None = None
        self.before = lambda call: None
        """Called at the begin of every call, with its name."""
        self.ended: list[int] = []
        self.finish = self.ended.append
        """Called at the end of every run, with the exit code."""

    def init(self, **options):
        assert options["mode"] == ("offline" if self.is_offline else "online") and options["project"] == "tlt"
        self.resume = options["resume"]
        kept = self.runs.setdefault(options["id"], [])
        if self.resume is None:
            kept.clear()
        library = self
        self.before("init")
        if self.fails:
            raise self.Error("its server is away")

        class Run:
            dir = "/runs/tiny/wandb/run-1/files"

            def log(self, figures, step, commit):
                library.before("log")
                if library.fails:
                    raise library.Error("its server is away")
                assert commit and (not kept or step > kept[-1][0]), "a step twice, or backwards"
                kept.append((step, figures["critic/score/mean"]))

            def finish(self, exit_code):
                library.before("finish")
                library.finish(exit_code)

        return Run()


@pytest.fixture
def library(monkeypatch) -> FakeWandb:
    """Stands in for wandb."""
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(TrackingSection, "check_installed", lambda section: None)
    return fake


def test_wandb_has_each_step_once_under_one_id(tmp_path, library, caplog):
    config, folder = config_for(tmp_path, "tracking.wandb=offline"), RunFolder(tmp_path / "tiny")
    commit(folder, 0, 1, 2, 3)
    follow(config, folder, 0)
    assert json.loads(folder.tracking.read_text()) == {"wandb": 0, "wandb_id": next(iter(library.runs))}
    follow(config, folder, 1, 2)
    follow(config, folder, 2, 3)
    assert list(library.runs.values()) == [[(step + 1, step / 7) for step in range(3)]]
    library.fails = True
    follow(config, folder, 4, 4)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["wandb failed (Error"]
    library.fails = False
    # steps taken back: another run of W&B with all of them
    drop_lines(folder.metrics, 1)
    commit(folder, 1, factor=2.0)
    follow(config, folder, 1, 2)
    assert list(library.runs.values())[1:] == [[(1, 0.0), (2, 2 / 7)]]


def test_a_run_with_steps_that_were_taken_back_is_not_continued_later(tmp_path, library):
    """Also if the tracker could not be opened before the new steps were as many as the old."""
    config, folder = config_for(tmp_path, "tracking.wandb=offline"), RunFolder(tmp_path / "tiny")
    commit(folder, 0, 1, 2)
    follow(config, folder, 3)
    drop_lines(folder.metrics, 1)
    commit(folder, 1, factor=2.0)
    library.fails = True
    follow(config, folder, 2)
    library.fails = False
    commit(folder, 2, 3, factor=2.0)
    follow(config, folder, 4)
    assert list(library.runs.values())[-1] == [(1, 0.0), (2, 2 / 7), (3, 4 / 7), (4, 6 / 7)]


REST = "the run continues without it; metrics.jsonl has every step, and the next start sends the rest"
SYNC = "; `wandb sync /runs/tiny/wandb/run-1` sends what it has"


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_tracker_that_does_not_answer_is_named_once_and_dropped(call, tmp_path, library, caplog, monkeypatch):
    monkeypatch.setattr(trackers, "ANSWER_SECONDS", 0.3)
    config, folder = config_for(tmp_path, "tracking.wandb=offline"), RunFolder(tmp_path / "tiny")
    commit(folder, *range(9))
    released = threading.Event()
    library.before = lambda called: None if called != call else released.wait()
    tracking = Tracking(config, folder)
    for count in range(1, 9):
        tracking.follow(count)
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
        tracking.follow(9)
    assert [step for step, _ in list(library.runs.values())[-1]] == list(range(1, 10)) and len(warnings_in(caplog)) == 1


def test_a_tracker_that_cannot_keep_up_is_dropped_and_has_what_it_was_given(tmp_path, library, caplog, monkeypatch):
    monkeypatch.setattr(trackers, "MAX_BEHIND", 2)
    config, folder = config_for(tmp_path, "tracking.wandb=offline"), RunFolder(tmp_path / "tiny")
    commit(folder, *range(9))
    reached, released = threading.Event(), threading.Event()
    library.before = lambda called: None if called != "log" else reached.set() or released.wait()
    tracking = Tracking(config, folder)
    tracking.follow(5)
    reached.wait()
    for count in range(6, 10):
        tracking.follow(count)
    (worker,) = tracking._workers.values()
    assert warnings_in(caplog)[0].startswith("wandb is more than 2 steps behind") and len(warnings_in(caplog)) == 1
    released.set()
    worker._thread.join()
    assert [len(run) for run in library.runs.values()] == [1], "a dropped tracker gets nothing more"


def test_a_slow_tracker_gets_the_steps_in_order(tmp_path, library, caplog):
    """Also as many as no queue holds, if it is switched on late."""
    config, folder = config_for(tmp_path, "tracking.wandb=offline"), RunFolder(tmp_path / "tiny")
    commit(folder, *range(trackers.MAX_BEHIND + 30))
    library.before = lambda called: time.sleep(0.002)
    with Tracking(config, folder) as tracking:
        for count in range(trackers.MAX_BEHIND + 20, trackers.MAX_BEHIND + 31):
            tracking.follow(count)
    assert [[step for step, _ in run] for run in library.runs.values()] == [list(range(1, trackers.MAX_BEHIND + 31))]
    assert not warnings_in(caplog) and library.ended == [0]


@pytest.mark.parametrize("error", [KeyError("a\nb"), SystemExit(3)])
def test_whatever_a_tracker_raises_is_one_line(error, tmp_path, library, caplog):
    config, folder = config_for(tmp_path, "tracking.wandb=offline"), RunFolder(tmp_path / "tiny")
    commit(folder, 0, 1)

    def fail(called):
        if called == "log":
            raise error

    library.before = fail
    follow(config, folder, 1, 2)
    (line,) = warnings_in(caplog)
    assert line.startswith(f"wandb failed ({type(error).__name__}: ") and line.endswith(f"): {REST}{SYNC}")
    assert "\n" not in line


def test_a_process_ends_although_a_tracker_does_not_answer(tmp_path):
    code = (
        "import sys, threading; from pathlib import Path; sys.path.insert(0, 'tests')\n"
        "from test_tracking import commit, config_for\n"
        "from tlt_hpc.look import tracking, trackers; from tlt_hpc.storage.folder import RunFolder\n"
        "trackers.TensorBoard.__init__ = lambda *_: threading.Event().wait(); tracking.ANSWER_SECONDS = 0.2\n"
        f"place = Path({str(tmp_path)!r}); folder = RunFolder(place / 'tiny'); commit(folder, 0)\n"
        "config = config_for(place, 'tracking.tensorboard=true')\n"
        "with tracking.Tracking(config, folder) as followed: followed.follow(1)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, f"tensorboard had no time left to end: {REST}\n")


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (b'{"wandb": 3, "wan', "invalid JSON"),
        (b'{"wandb": "3", "wandb_id": "a"}', "'wandb' is '3'"),
        (None, "Is a dir"),
    ],
)
def test_a_damaged_record_of_the_trackers_is_one_line(damaged, reason, tmp_path, library, caplog):
    config, folder = config_for(tmp_path, "tracking.wandb=offline"), RunFolder(tmp_path / "tiny")
    commit(folder, 0, 1)
    follow(config, folder, 1)
    folder.tracking.unlink()
    folder.tracking.mkdir() if damaged is None else folder.tracking.write_bytes(damaged)
    follow(config, folder, 2)
    line = warnings_in(caplog)[0]
    assert line.startswith(f"{folder.tracking} cannot be used (") and reason in line
    assert line.endswith("): the trackers get new runs") and "\n" not in line
    if damaged is None:  # nor can it be replaced
        assert [line.partition(":")[0] for line in warnings_in(caplog)[1:]] == ["wandb failed (WriteError"]
        return
    assert len(warnings_in(caplog)) == 1
    assert list(library.runs.values()) == [[(1, 0.0)], [(1, 0.0), (2, 1 / 7)]]
    assert json.loads(folder.tracking.read_text()) == {"wandb": 2, "wandb_id": list(library.runs)[1]}


def test_closing_waits_only_while_time_is_left(tmp_path, library, caplog, monkeypatch):
    """The time may shrink meanwhile: Slurm ends a job that it requeues."""
    monkeypatch.setattr(tracking_module, "FAILED_FINISH_SECONDS", 0.1)
    folder, never, left = RunFolder(tmp_path / "tiny"), threading.Event(), [9.0, 8.0, 0.0]
    library.finish = lambda exit_code: never.wait()
    commit(folder, 0)
    config = config_for(tmp_path, "tracking.wandb=offline")
    with pytest.raises(ZeroDivisionError), Tracking(config, folder) as tracking:
        tracking.follow(1)
        raise ZeroDivisionError
    tracking = Tracking(config, folder)
    tracking.follow(1)
    assert not tracking.close(lambda: left.pop(0)) and left == []
    never.set()
    assert warnings_in(caplog) == [f"wandb had no time left to end: {REST}{SYNC}"] * 2
    library.finish = library.ended.append
    with Tracking(config, folder) as tracking:
        tracking.follow(1)
    assert library.ended == [0]


def test_a_preempted_job_waits_for_slurm_whatever_its_tracker_does(tmp_path, monkeypatch):
    """Slurm would take a job that ended by itself for finished."""
    done = []
    world = SimpleNamespace(rank=0, flag=StopFlag(), agree_to_stop=lambda: Stop.KILL)
    world.flag.request(Stop.KILL, "SIGTERM")
    monkeypatch.setattr(rank_commands, "await_preemption", lambda environment: done.append("waited"))
    monkeypatch.setattr(ending, "end_within", lambda seconds, status: done.append(f"ends with {status}"))

    def close(seconds_left):
        done.append(f"{seconds_left():.0f} s")
        return False

    assert rank_commands.stop_early(world, tmp_path, lambda: "step 1", close) == 75
    assert done == ["7 s", "waited", "ends with 75"]


@needs_wandb
def test_wandb_offline_writes_files_and_nothing_else(tmp_path, monkeypatch):
    """The real library, in a process of its own: it stays with the one that made it."""
    folder = RunFolder(tmp_path / "tiny")
    commit(folder, 0, 1)
    code = (
        "from pathlib import Path; from tlt_hpc.config import load_config\n"
        "from tlt_hpc.storage.folder import RunFolder\n"
        "from tlt_hpc.look.tracking import Tracking, start_early\n"
        f"config = load_config({str(TINY)!r}, ['tracking.wandb=offline']); start_early(config.tracking)\n"
        f"tracking = Tracking(config, RunFolder(Path({str(folder.path)!r})))\n"
        "tracking.follow(2); tracking.close(lambda: 60.0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "failed" not in done.stderr, done.stderr
    (file,) = (folder.path / "wandb").glob("offline-run-*/run-*.wandb")
    run_id = json.loads((folder.path / "tracking.json").read_text())["wandb_id"]
    assert file.name == f"run-{run_id}.wandb"
    assert b"critic/score/mean" in file.read_bytes() and b"0.14285714285714285" in file.read_bytes()


KILLED = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, "tests")
from test_tracking import commit, config_for, settle
from tlt_hpc.look import tracking
from tlt_hpc.storage.folder import RunFolder
place, name, old, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
folder = RunFolder(place / "tiny"); commit(folder, *range(old, steps))
config = config_for(place, f"tracking.{name}")
tracking.start_early(config.tracking)
followed = tracking.Tracking(config, folder)
followed.follow(steps); settle(followed)
if sys.argv[5] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
followed.close(lambda: 60.0)
"""


def wandb_steps(path: Path) -> list[int]:
    """The steps in an offline file of W&B: a log of LevelDB, in blocks of 32 KiB, after a head of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, steps = path.read_bytes(), 7, b"", []
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
                steps.append(int(found["training/global_step"]))
            whole = b""
    return steps


@pytest.mark.parametrize(
    "name", [pytest.param("wandb=offline", marks=needs_wandb), pytest.param("trackio=true", marks=needs_trackio)]
)
def test_a_start_after_a_kill_writes_all_steps_to_a_local_tracker(name, tmp_path):
    """The libraries hold steps in memory for seconds, which a SIGKILL takes."""
    folder, environment = tmp_path / "tiny", {**os.environ, "HF_HUB_OFFLINE": "1"}
    for old, steps, end in ((0, 3, "kill"), (3, 4, "kill"), (4, 5, "close")):
        command = [sys.executable, "-c", KILLED, str(tmp_path), name, str(old), str(steps), end]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == (-9 if end == "kill" else 0) and "failed" not in done.stderr, done.stderr
        if name.startswith("wandb"):
            ids = {json.loads((folder / "tracking.json").read_text())["wandb_id"]}
            files = list((folder / "wandb").glob("offline-run-*/run-*.wandb"))
            assert {file.stem.removeprefix("run-") for file in files} == ids and len(files) == 1, "one id at all starts"
    if name.startswith("wandb"):
        assert wandb_steps(files[0]) == [1, 2, 3, 4, 5]
    else:
        assert list(trackio_runs(folder).values()) == [[(step + 1, step / 7) for step in range(5)]]


def test_wandb_online_after_offline_gets_all_steps_under_the_same_id(tmp_path, library, monkeypatch):
    """What is online may lack what the offline file had."""
    folder, modes = RunFolder(tmp_path / "tiny"), []
    commit(folder, 0, 1, 2)
    follow(config_for(tmp_path, "tracking.wandb=offline"), folder, 2)
    (run_id,) = library.runs
    offline = [folder.path / "wandb" / f"offline-run-1-{each}" for each in (run_id, "before")]
    for path in offline:
        path.mkdir(parents=True)
    library.is_offline = False
    library.before = lambda call: modes.append(library.resume) if call == "init" else None
    library.runs.clear()
    follow(config_for(tmp_path, "tracking.wandb=online"), folder, 3)
    follow(config_for(tmp_path, "tracking.wandb=online"), folder, 3)
    assert library.runs == {run_id: [(step + 1, step / 7) for step in range(3)]} and modes == [None, "allow"]
    assert [path.exists() for path in offline] == [False, True], "what has another id was never sent"


STOPPED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, "tests")
from test_tracking import commit, config_for
from tlt_hpc.extras import trackers
from tlt_hpc.look import tracking
from tlt_hpc.storage.folder import RunFolder
tracking.ANSWER_SECONDS = trackers.EXIT_SECONDS = 0.5
place = Path(sys.argv[1]); folder = RunFolder(place / "tiny"); commit(folder, 0)
config = config_for(place, "tracking.wandb=offline")
tracking.start_early(config.tracking)
with tracking.Tracking(config, folder) as followed:
    os.kill(trackers.WeightsAndBiases._process.pid, signal.SIGSTOP)
    followed.follow(1)
"""


@needs_wandb
def test_a_process_ends_although_that_of_wandb_does_not_answer(tmp_path):
    command = [sys.executable, "-c", STOPPED, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, f"wandb had no time left to end: {REST}\n")


# --- MLflow and trackio ---

EVERY_START = """
import os, socket, sys
from pathlib import Path
def refuse(*arguments): os.write(2, b"THE NETWORK"); os._exit(9)
socket.getaddrinfo = socket.socket.connect = refuse
sys.path.insert(0, {here!r})
from test_tracking import commit, config_for
from tlt_hpc.look.tracking import Tracking, start_early
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.step_lines import drop_lines
config, folder = config_for(Path({place!r}), "tracking.{name}=true"), RunFolder(Path({place!r}) / "tiny")
start_early(config.tracking)
with Tracking(config, folder) as tracking:
    {actions}
"""


def start(name: str, place: Path, actions: str) -> None:
    """One start of a run with the real library, in a process that ends if anything opens the network."""
    code = EVERY_START.format(here=str(ROOT / "tests"), place=str(place), name=name, actions=actions)
    foreign = ("MLFLOW", "TRACKIO", "HF_", "PYTEST")
    environment = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
    environment |= {"HF_TOKEN": "hf_of_a_user", "TRACKIO_SPACE_ID": "someone/space", "TRACKIO_SERVER_URL": "http://a.b"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "failed" not in done.stderr and "NETWORK" not in done.stderr, done.stderr


def mlflow_runs(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of a figure, by run, in the order of the files."""
    found = {}
    for path in folder.glob("mlruns/*/*/metrics/critic/score/mean"):
        rows = [line.split() for line in path.read_text().splitlines()]
        found[path.parents[3].name] = [(int(step), float(value)) for _, value, step in rows]
    return found


def trackio_runs(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    database = sqlite3.connect(folder / "trackio" / "tlt.db")
    for run_id, step, metrics in database.execute("select run_id, step, metrics from metrics order by id"):
        found.setdefault(run_id, []).append((step, json.loads(metrics)["critic/score/mean"]))
    database.close()
    return found


@pytest.mark.parametrize(
    ("name", "runs_in"),
    [
        pytest.param("mlflow", mlflow_runs, marks=needs_mlflow),
        pytest.param("trackio", trackio_runs, marks=needs_trackio),
    ],
)
def test_a_local_tracker_has_each_step_once_and_opens_no_network(name, runs_in, tmp_path):
    folder = tmp_path / "tiny"
    start(name, tmp_path, "commit(folder, 0, 1, 2); tracking.follow(2)")
    start(name, tmp_path, "tracking.follow(2); tracking.follow(3)")
    state = folder / "tracking.json"
    first = json.loads(state.read_text()) if name == "mlflow" else {}
    assert list(runs_in(folder).values()) == [[(step + 1, step / 7) for step in range(3)]]
    start(name, tmp_path, "drop_lines(folder.metrics, 1); commit(folder, 1, factor=2.0); tracking.follow(2)")
    runs = runs_in(folder)
    if name == "trackio":  # its database is written anew
        assert list(runs.values()) == [[(1, 0.0), (2, 2 / 7)]] and not state.exists()
    else:
        new = json.loads(state.read_text())["mlflow_id"]
        assert first["mlflow"] == 3 and set(runs) == {first["mlflow_id"], new} and runs[new] == [(1, 0.0), (2, 2 / 7)]


@needs_mlflow
def test_mlflow_says_how_a_run_stands_and_what_it_is(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config, folder = config_for(tmp_path, "tracking.mlflow=true"), RunFolder(tmp_path / "tiny")
    add_line(folder.metrics, {"training/global_step": 1.0, "val-core/gcd/acc/mean@8": float("nan")})
    with pytest.raises(ZeroDivisionError), Tracking(config, folder) as tracking:
        tracking.follow(1)
        raise ZeroDivisionError
    from mlflow import MlflowClient

    client = MlflowClient(str(folder.path / "mlruns"))
    run_id = json.loads(folder.tracking.read_text())["mlflow_id"]
    run = client.get_run(run_id)
    assert run.info.status == "FAILED" and run.data.params["rollout.group_size"] == str(config.rollout.group_size)
    assert math.isnan(run.data.metrics["val-core/gcd/acc/mean_8"])
    tracking = Tracking(config, folder)
    tracking.follow(1)
    settle(tracking)
    assert client.get_run(run_id).info.status == "RUNNING"
    tracking.close(lambda: 9.0)
    assert client.get_run(run_id).info.status == "FINISHED"


@needs_mlflow
def test_an_mlflow_server_that_is_away_ends_no_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    config, folder = config_for(tmp_path, "tracking.mlflow=true"), RunFolder(tmp_path / "tiny")
    commit(folder, 0)
    follow(config, folder, 1)
    told = warnings_in(caplog)
    assert len(told) == 1 and told[0].startswith("mlflow failed (MlflowException") and "127.0.0.1" in told[0]


@needs_mlflow
def test_ranks_that_track_nothing_do_not_load_mlflow():
    code = "import sys; from tlt_hpc.rl.distributed import load_deepspeed; load_deepspeed(); "
    code += "print('mlflow' in sys.modules); import mlflow; print(mlflow.MlflowClient.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["False", "MlflowClient"]
