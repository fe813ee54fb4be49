"""Joules are what the counters counted, including wraps; if one counter cannot be read, its kind is not recorded."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch_ranks import ROOT, run_on_ranks
from small_run import set_lines, small_run

from tlt_hpc.look import energy
from tlt_hpc.look.analysis.comparison import analyse_comparison
from tlt_hpc.look.analysis.energy_use import energy_in_words
from tlt_hpc.look.energy import EnergyMeter, EnergyReach, NoCounterError, Nvml, Rapl
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.storage.records import read_environments
from tlt_hpc.storage.step_lines import read_lines

RANGE = 65_532_610_987  # AMD's
UUID = "GPU-1a2b"


class Powercap:
    """A folder as Linux shows it: two packages, one with cores and memory; a platform; one package a second time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for zone, name in (("0", "package-0"), ("0:0", "core"), ("0:1", "dram"), ("1", "package-1"), ("2", "psys")):
            self._make(f"intel-rapl:{zone}", name)
        self._make("intel-rapl-mmio:0", "package-0")

    def _make(self, zone: str, name: str) -> None:
        (self.path / zone).mkdir(parents=True)
        (self.path / zone / "name").write_text(f"{name}\n")
        (self.path / zone / "max_energy_range_uj").write_text(f"{RANGE}\n")
        (self.path / zone / "energy_uj").write_text(f"{0:<31}\n")

    def set(self, **microjoules: int) -> None:
        """Counters by zone: ``z0_1`` is intel-rapl:0:1."""
        for zone, value in microjoules.items():
            with (self.path / f"intel-rapl:{zone[1:].replace('_', ':')}" / "energy_uj").open("r+b") as file:
                file.write(b"%-31d\n" % value)  # in one write, without truncating: a thread may be reading


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Powercap:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "powercap")
    return Powercap(tmp_path / "powercap")


# --- processors ---


def test_processors_and_memory_are_summed_over_wraps(powercap: Powercap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores and ``psys`` count the same energy again. A thread reads often enough to see each wrap."""
    powercap.set(z0=RANGE - 2_000_000, z1=7_000_000, z0_1=1_000_000)
    monkeypatch.setattr(energy, "KEEP_UP_SECONDS", 0.01)
    counter = Rapl()
    assert counter.joules() == 0
    powercap.set(z0=1_000_000, z1=9_000_000, z0_1=1_500_000, z0_0=5_000_000, z2=5_000_000)
    assert counter.joules() == pytest.approx(3.0 + 2.0 + 0.5)
    for microjoules in (RANGE - 10, 10, RANGE - 10, 20):
        powercap.set(z0=microjoules)
        while counter._last[powercap.path / "intel-rapl:0" / "energy_uj"] != microjoules:
            time.sleep(0.005)
    assert counter.joules() == pytest.approx(5.5 + (2 * RANGE + 20 - 1_000_000) / 1e6)
    counter.close()


def test_counters_that_are_missing_or_protected(powercap: Powercap, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path) -> str:  # root may read a file of any mode
        raise PermissionError(13, "Permission denied", str(file))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        with pytest.raises(NoCounterError, match="intel-rapl:0/name may be read by root alone"):
            Rapl()
    monkeypatch.setattr(energy, "POWERCAP", powercap.path / "none")
    assert EnergyMeter("a", "", True).reach.lacking == {"cpu": f"{powercap.path}/none has no intel-rapl"}


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


def test_a_gpu_of_several_ranks_and_a_node_are_read_once(powercap: Powercap, nvml: FakeNvml) -> None:
    meters = [EnergyMeter("a", UUID, True), EnergyMeter("a", UUID, False), EnergyMeter("b", UUID, True)]
    for rank, meter in enumerate(meters):
        meter.agree([each.reach for each in meters], rank)
    powercap.set(z0=1_000_000)  # before the step
    for meter in meters:
        meter.begin_step()
    powercap.set(z0=3_000_000)
    nvml.gpus[UUID] = (15_000, 0)
    for meter in meters:
        meter.end_rollout()
    powercap.set(z1=5_000_000)
    nvml.gpus[UUID] = (20_000, 0)
    taken = [meter.end_step() for meter in meters]
    gpu = {"energy/gpu_joules": 15.0, "energy/rollout_gpu_joules": 10.0}
    assert taken[0] == {**gpu, "energy/cpu_joules": 7.0, "energy/rollout_cpu_joules": 2.0}
    assert taken[1] == dict.fromkeys(taken[0], 0.0) and taken[2] == taken[0] and nvml.num_open == 2
    meters[0].begin_step()
    (powercap.path / "intel-rapl:0" / "energy_uj").write_text("?")
    meters[0].end_rollout()
    lost = meters[0].end_step()
    assert math.isnan(lost["energy/cpu_joules"]) and math.isnan(lost["energy/rollout_cpu_joules"])
    for meter in meters:
        meter.close()
    assert nvml.num_open == 0


def test_a_kind_that_one_node_lacks_is_used_by_none(powercap: Powercap, nvml: FakeNvml) -> None:
    meter, whole = EnergyMeter("a", UUID, True), EnergyReach("b", "GPU-c")
    assert meter.agree([meter.reach, whole], 0) == {"gpu": "", "cpu": ""}
    assert meter.agree([meter.reach, EnergyReach("b")], 0) == {"cpu": ""}, "some ranks have no GPU"
    lacking = EnergyReach("b", "GPU-c", {"cpu": "may be read by root alone"})
    assert meter.agree([meter.reach, lacking], 0) == {"gpu": "", "cpu": "b: may be read by root alone"}
    meter.begin_step()
    meter.end_rollout()
    assert nvml.num_open == 0 and list(meter.end_step()) == ["energy/gpu_joules", "energy/rollout_gpu_joules"]


@pytest.mark.mpi
@pytest.mark.ci
def test_a_run_logs_joules_and_what_it_runs_on(tmp_path: Path) -> None:
    """Two ranks of one node, one of which reads a counter that advances by a joule at each reading."""
    run_on_ranks(2, train_beside_a_counter, str(tmp_path), timeout=240)
    (line,) = read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl").values()
    assert line["energy/cpu_joules"] == 2.0 and line["energy/rollout_cpu_joules"] == 1.0
    assert "energy/gpu_joules" not in line
    ((start,), problems) = read_environments(tmp_path / "runs" / "tiny" / "environment.jsonl")
    assert not problems and start.energy == {"cpu": ""} and [host.num_ranks for host in start.hosts] == [2]
    assert start.hosts[0].num_cores == len(os.sched_getaffinity(0)) and start.launcher.startswith("mpiexec")


def train_beside_a_counter(folder: str) -> None:
    from tlt_hpc.cli.display import Screen, StepReporter
    from tlt_hpc.config import load_config
    from tlt_hpc.mpi.world import World
    from tlt_hpc.rl.distributed import leave_process_group
    from tlt_hpc.train import run

    world, readings = World.connect(), []
    energy.POWERCAP = Path(folder) / "powercap"
    if world.rank == 0:
        Powercap(energy.POWERCAP)
    world.barrier()
    Rapl.joules = lambda counter: float(len(readings.append(0) or readings))  # type: ignore[assignment,func-returns-value]
    changes = ["rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=48", "run.num_steps=1"]
    config = load_config(ROOT / "jobs" / "tiny.toml", [f"run.folder={folder}/runs", "run.ranks=2", *changes])
    run(config, world, StepReporter(Screen(world.rank == 0)))
    assert bool(readings) == (world.rank == 0), "one rank of a node reads"
    leave_process_group()
    world.leave()


# --- what was logged ---


def with_energy(path: Path, joules: float) -> RunLog:
    set_lines(small_run(path), {}, *[{"energy/gpu_joules": joules, "perf/total_num_tokens": 16.0}] * 2)
    return RunLog(path)


def test_joules_by_token_and_watts(tmp_path: Path) -> None:
    run, other = with_energy(tmp_path / "run", 960.0), with_energy(tmp_path / "other", 480.0)
    assert energy_in_words(run) == "The steps took 1.92 kJ by GPUs (60 J a generated token, 100 W)."
    assert "Energy of GPUs (joules a step) 480 and 960" in analyse_comparison([run, other]).verdict
    silent = RunLog(small_run(tmp_path / "silent").path)
    assert energy_in_words(silent) == "Energy is unknown: no counter of this machine can be read."
    assert "joules" not in analyse_comparison([run, silent]).verdict
