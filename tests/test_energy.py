"""Joules are those that the counters have counted, wraps included; if a part cannot be read, none are recorded."""

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

from tlt_hpc.common.source import git_commit
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
    """A folder as Linux shows it: two packages with cores, one of them with memory, a platform, and a double."""

    DOMAINS = ("0:package-0", "0.0:core", "0.1:dram", "1:package-1", "2:psys")

    def __init__(self, path: Path) -> None:
        self.path = path
        for domain in self.DOMAINS:
            zone, _, name = domain.partition(":")
            self._make(f"intel-rapl:{zone.replace('.', ':')}", name)
        self._make("intel-rapl-mmio:0", "package-0")
        (path / "intel-rapl").mkdir()

    def _make(self, zone: str, name: str) -> None:
        (self.path / zone).mkdir(parents=True)
        (self.path / zone / "name").write_text(f"{name}\n")
        (self.path / zone / "max_energy_range_uj").write_text(f"{RANGE}\n")
        self.set(zone, 0)

    def set(self, zone: str, microjoules: int) -> None:
        path = self.path / zone / "energy_uj"
        path.touch()
        with path.open("r+b") as file:  # in one write, without truncating: a thread may be reading
            file.write(b"%-31d\n" % microjoules)

    def energy(self, package_0: int, package_1: int, dram: int) -> None:
        self.set("intel-rapl:0", package_0)
        self.set("intel-rapl:1", package_1)
        self.set("intel-rapl:0:1", dram)
        for other in ("intel-rapl:0:0", "intel-rapl:2", "intel-rapl-mmio:0"):
            self.set(other, 3 * package_0)


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Powercap:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "powercap")
    return Powercap(tmp_path / "powercap")


# --- processors ---


def test_processors_and_memory_are_summed_over_wraps(powercap: Powercap) -> None:
    powercap.energy(RANGE - 2_000_000, 7_000_000, 1_000_000)
    counter = Rapl()
    assert counter.joules() == 0
    powercap.energy(1_000_000, 9_000_000, 1_500_000)
    assert counter.joules() == pytest.approx(3.0 + 2.0 + 0.5)
    powercap.energy(4_000_000, 9_000_000, 1_500_000)
    assert counter.joules() == pytest.approx(8.5)
    counter.close()


def test_a_thread_reads_often_enough_for_wraps(powercap: Powercap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "KEEP_UP_SECONDS", 0.01)
    counter, zone = Rapl(), powercap.path / "intel-rapl:0" / "energy_uj"
    for microjoules in (RANGE - 10, 10, RANGE - 10, 20):
        powercap.set("intel-rapl:0", microjoules)
        while counter._last[zone] != microjoules:
            time.sleep(0.005)
    assert counter.joules() == pytest.approx((2 * RANGE + 20) / 1e6)
    counter.close()


def test_counters_that_are_missing_refused_or_lost(powercap: Powercap, monkeypatch: pytest.MonkeyPatch) -> None:
    counter, path = Rapl(), powercap.path / "intel-rapl:1" / "energy_uj"
    path.write_text("gone")
    with pytest.raises(NoCounterError, match="invalid literal"):
        counter.joules()
    counter.close()
    path.write_text("5\n")
    true_read = Path.read_text

    def refuse(file: Path, *given: str, **more: str) -> str:  # root reads a file whatever its mode
        if file == path:
            raise PermissionError(13, "Permission denied", str(file))
        return true_read(file, *given, **more)

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(NoCounterError, match="intel-rapl:1/energy_uj may be read by root alone"):
        Rapl()
    monkeypatch.setattr(energy, "POWERCAP", powercap.path / "none")
    meter = EnergyMeter("a", "", True)
    assert meter.reach.lacking == {"cpu": f"{powercap.path}/none has no intel-rapl"}


# --- GPUs ---


class NVMLError(Exception):
    pass


class NotSupportedError(NVMLError):
    pass


class FakeNvml(SimpleNamespace):
    """The package as far as it is used; GPUs by UUID, their millijoules, and whether they are split."""

    def __init__(self, **gpus: tuple[int, int | None]) -> None:
        super().__init__(NVMLError=NVMLError, NVMLError_NotSupported=NotSupportedError, NVML_DEVICE_MIG_ENABLE=1)
        self.gpus = {f"GPU-{name}": list(gpu) for name, gpu in gpus.items()}
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
        mode = self.gpus[gpu][1]
        if mode is None:
            raise NotSupportedError("Not Supported")
        return mode, mode

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: str) -> int:  # noqa: N802
        if self.gpus[gpu][0] < 0:
            raise NotSupportedError("Not Supported")
        return self.gpus[gpu][0]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(**{"1a2b": (5000, 0), "old": (5000, None), "pascal": (-1, None), "split": (5000, 1)})
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


def meters_of(*ranks: EnergyMeter, others: tuple[EnergyReach, ...] = ()) -> list[EnergyMeter]:
    reaches = [*(meter.reach for meter in ranks), *others]
    for rank, meter in enumerate(ranks):
        meter.agree(reaches, rank)
        meter.begin_step()
    return list(ranks)


def test_a_step_and_its_rollout(powercap: Powercap, nvml: FakeNvml) -> None:
    powercap.set("intel-rapl:0", 1_000_000)  # before the step: a save
    (meter,) = meters_of(EnergyMeter("a", UUID, True))
    powercap.set("intel-rapl:0", 3_000_000)
    nvml.gpus[UUID][0] += 10_000
    meter.end_rollout()
    powercap.set("intel-rapl:0", 8_000_000)
    nvml.gpus[UUID][0] += 5_000
    assert meter.end_step() == {
        "energy/gpu_joules": 15.0,
        "energy/rollout_gpu_joules": 10.0,
        "energy/cpu_joules": 7.0,
        "energy/rollout_cpu_joules": 2.0,
    }
    meter.close()
    assert nvml.num_open == 0


def test_a_gpu_of_several_ranks_and_a_node_are_read_once(powercap: Powercap, nvml: FakeNvml) -> None:
    meters = meters_of(EnergyMeter("a", UUID, True), EnergyMeter("a", UUID, False), EnergyMeter("b", UUID, True))
    for meter in meters:
        meter.end_rollout()
    powercap.set("intel-rapl:1", 4_000_000)
    nvml.gpus[UUID][0] += 3000
    taken = [meter.end_step() for meter in meters]
    assert [step["energy/gpu_joules"] for step in taken] == [3.0, 0.0, 3.0]
    assert [step["energy/cpu_joules"] for step in taken] == [4.0, 0.0, 4.0]
    assert nvml.num_open == 2
    for meter in meters:
        meter.begin_step()
    (powercap.path / "intel-rapl:0" / "energy_uj").write_text("?")
    meters[0].end_rollout()
    taken = meters[0].end_step()
    assert math.isnan(taken["energy/cpu_joules"]) and math.isnan(taken["energy/rollout_cpu_joules"]), "it is lost"
    for meter in meters:
        meter.close()


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
    assert not problems and [host.num_ranks for host in start.hosts] == [2] and start.hosts[0].gpus == {}
    assert start.hosts[0].num_cores == len(os.sched_getaffinity(0)) and start.mpi and start.threads == "1"
    assert start.energy == {"cpu": ""} and start.commit == git_commit(ROOT) and start.launcher.startswith("mpiexec")


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
    run = with_energy(tmp_path / "run", 960.0)
    assert energy_in_words(run) == "The steps took 1.92 kJ by GPUs (60 J a generated token, 100 W)."
    assert (
        "Energy of GPUs (joules a step) 480 and 960"
        in analyse_comparison([run, with_energy(tmp_path / "other", 480.0)]).verdict
    )
    silent = RunLog(small_run(tmp_path / "silent").path)
    assert energy_in_words(silent) == "Energy is unknown: no counter of this machine can be read."
    assert "joules" not in analyse_comparison([run, silent]).verdict
