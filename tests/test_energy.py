"""Joules are what the counters counted; if one of them cannot be read, none is recorded."""

from __future__ import annotations

import math
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch_ranks import ROOT, run_on_ranks
from small_run import set_lines, small_run
from test_resume import Silent

from tlt_hpc.config import load_config
from tlt_hpc.extras.report.analysis.comparison import analyse_comparison
from tlt_hpc.extras.report.analysis.energy_use import energy_in_words
from tlt_hpc.look.energy import EnergyMeter, EnergyReach, NoCounterError, Nvml
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.mpi.world import World
from tlt_hpc.rl.distributed import leave_process_group
from tlt_hpc.run import job
from tlt_hpc.storage.records import read_environments
from tlt_hpc.storage.step_lines import read_lines
from tlt_hpc.train import run

UUID = "GPU-1a2b"


# --- GPUs ---


class NVMLError(Exception):
    pass


class NotSupportedError(NVMLError):
    pass


class FakeNvml(SimpleNamespace):
    """The part of the package that is used; GPUs by UUID: their millijoules, and whether MIG splits them."""

    def __init__(self) -> None:
        super().__init__(NVMLError=NVMLError, NVMLError_NotSupported=NotSupportedError, NVML_DEVICE_MIG_ENABLE=1)
        self.gpus = {UUID: (5000, 0), "GPU-pascal": (-1, 0), "GPU-split": (5000, 1)}
        self.num_open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.num_open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in self.gpus:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMigMode(self, gpu: str) -> tuple[int, int]:  # noqa: N802
        return self.gpus[gpu][1], self.gpus[gpu][1]

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: str) -> int:  # noqa: N802
        if self.gpus[gpu][0] < 0:
            raise NotSupportedError("Not Supported")
        return self.gpus[gpu][0]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.mark.parametrize(
    ("uuid", "why"), (("GPU-pascal", "Not Supported"), ("GPU-split", r"split \(MIG\)"), ("GPU-none", "Not Found"))
)
def test_a_gpu_without_a_counter(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, uuid: str, why: str) -> None:
    with pytest.raises(NoCounterError, match=why):
        Nvml(uuid)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoCounterError, match="nvidia-ml-py is not installed"):
        Nvml(uuid)


# --- a step ---


def test_a_gpu_of_several_ranks_is_read_once(nvml: FakeNvml) -> None:
    meters = [EnergyMeter(hostname, UUID) for hostname in ("a", "a", "b")]
    for rank, meter in enumerate(meters):
        assert meter.agree([each.reach for each in meters], rank) == {"gpu": ""}
    nvml.gpus[UUID] = (6_000, 0)  # before the step
    for meter in meters:
        meter.begin_step()
    nvml.gpus[UUID] = (15_000, 0)
    for meter in meters:
        meter.end_rollout()
    nvml.gpus[UUID] = (20_000, 0)
    taken = [meter.end_step() for meter in meters]
    assert taken[0] == taken[2] == {"energy/gpu_joules": 14.0, "energy/rollout_gpu_joules": 9.0}
    assert taken[1] == dict.fromkeys(taken[0], 0.0) and nvml.num_open == 2
    meters[0].begin_step()
    nvml.gpus[UUID] = (-1, 0)
    meters[0].end_rollout()
    nvml.gpus[UUID] = (25_000, 0)
    assert all(map(math.isnan, meters[0].end_step().values())), "a counter that was lost stays lost"
    for meter in meters:
        meter.close()
    assert nvml.num_open == 0


def test_counters_that_one_rank_lacks_are_used_by_none(nvml: FakeNvml) -> None:
    meter, lacking = EnergyMeter("a", UUID), EnergyMeter("b", "GPU-pascal")
    assert meter.agree([meter.reach, EnergyReach("b", "GPU-c")], 0) == {"gpu": ""} and nvml.num_open == 2
    assert meter.agree([meter.reach, lacking.reach], 0) == {"gpu": "b: NVML: Not Supported"}
    assert EnergyMeter("a", UUID).agree([meter.reach, EnergyReach("b")], 0) == {}, "some ranks have no GPU"
    meter.begin_step()
    meter.end_rollout()
    assert meter.end_step() == {}


# --- what was logged ---


def with_energy(path: Path, joules: float) -> RunLog:
    set_lines(small_run(path), {}, *[{"energy/gpu_joules": joules, "perf/total_num_tokens": 16.0}] * 2)
    return RunLog(path)


def test_joules_by_token_and_watts(tmp_path: Path) -> None:
    run, other = with_energy(tmp_path / "run", 960.0), with_energy(tmp_path / "other", 480.0)
    assert energy_in_words(run) == "The steps took 1.92 kJ by GPUs (60 J a generated token, 100 W)."
    assert "Energy of GPUs (joules a step) 480 and 960" in analyse_comparison([run, other]).verdict
    silent = RunLog(small_run(tmp_path / "silent").path)
    assert energy_in_words(silent) == "Energy is unknown: no counter of a GPU can be read."
    assert "joules" not in analyse_comparison([run, silent]).verdict


# --- a run ---


@pytest.mark.mpi
@pytest.mark.ci
def test_a_run_logs_joules(tmp_path: Path) -> None:
    """Two ranks that share a GPU, whose counter advances by a joule at each reading."""
    run_on_ranks(2, train_beside_a_counter, str(tmp_path), timeout=240)
    (line,) = read_lines(tmp_path / "tiny" / "metrics.jsonl").values()
    assert line["energy/gpu_joules"] == 2.0 and line["energy/rollout_gpu_joules"] == 1.0
    ((start,), problems) = read_environments(tmp_path / "tiny" / "environment.jsonl")
    assert not problems and start.energy == {"gpu": ""} and [host.num_ranks for host in start.hosts] == [2]


def train_beside_a_counter(folder: str) -> None:
    nvml, world = FakeNvml(), World.connect()
    read = count(1000, 1000)
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda gpu: next(read)
    sys.modules["pynvml"] = nvml  # type: ignore[assignment]
    job.EnergyMeter = lambda hostname, _: EnergyMeter(hostname, UUID)  # type: ignore[assignment,misc]
    changes = ["rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=48", "run.num_steps=1"]
    config = load_config(ROOT / "jobs" / "tiny.toml", [f"run.folder={folder}", "run.ranks=2", *changes])
    run(config, world, Silent())
    assert (next(read) > 2000) == (world.rank == 0), "one rank reads, once all have tried"
    leave_process_group()
