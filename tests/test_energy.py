"""Joules are those that the counters have counted, wraps included; where a part cannot be read, nothing is told."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch_ranks import ROOT, run_on_ranks
from small_run import small_run
from test_metrics import RECORDS, UPDATE

from tlt_hpc.common.source import git_commit
from tlt_hpc.look.analysis.comparison import analyse_comparison
from tlt_hpc.look.energy import counters as energy_counters
from tlt_hpc.look.energy.counters import NoCounterError, Nvml, Rapl
from tlt_hpc.look.energy.meter import Counters, Meter, Reach, told_kinds
from tlt_hpc.look.energy.usage import analyse_energy
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.words import joules
from tlt_hpc.storage.environment_lines import read_environments
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
    monkeypatch.setattr(energy_counters, "POWERCAP", tmp_path / "powercap")
    return Powercap(tmp_path / "powercap")


# --- processors ---


def test_processors_and_memory_are_summed_and_their_parts_left_out(powercap: Powercap) -> None:
    powercap.energy(5_000_000, 7_000_000, 1_000_000)
    counter = Rapl()
    assert counter.joules() == 0
    powercap.energy(6_000_000, 9_000_000, 1_500_000)
    assert counter.joules() == pytest.approx(3.5)
    counter.close()


def test_a_wrapped_counter_goes_on(powercap: Powercap) -> None:
    powercap.energy(RANGE - 2_000_000, 0, 0)
    counter = Rapl()
    powercap.energy(1_000_000, 0, 0)
    assert counter.joules() == pytest.approx(3.0)
    powercap.energy(4_000_000, 0, 0)
    assert counter.joules() == pytest.approx(6.0)
    counter.close()


def test_wraps_between_two_readings_of_the_run_are_seen(powercap: Powercap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy_counters, "KEEP_UP_SECONDS", 0.01)
    counter = Rapl()
    for microjoules in (RANGE - 10, 10, RANGE - 10, 20):
        powercap.set("intel-rapl:0", microjoules)
        until = time.monotonic() + 20
        while counter._domains[0].last != microjoules and time.monotonic() < until:
            time.sleep(0.005)
    assert counter.joules() == pytest.approx((2 * RANGE + 20) / 1e6)
    counter.close()
    until = time.monotonic() + 20
    while num_readers() and time.monotonic() < until:
        time.sleep(0.005)
    assert num_readers() == 0, "its thread has ended"


def num_readers() -> int:
    return sum(thread.name == "energy" for thread in threading.enumerate())


def test_a_machine_without_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy_counters, "POWERCAP", tmp_path / "none")
    with pytest.raises(NoCounterError, match="has no intel-rapl"):
        Rapl()


def test_a_counter_that_may_not_be_read(powercap: Powercap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root reads a file whatever its mode, so the refusal is made."""
    true_open = Path.open

    def refuse(path: Path, *given, **more):
        if path.name == "energy_uj" and path.parent.name == "intel-rapl:1":
            raise PermissionError(13, "Permission denied", str(path))
        return true_open(path, *given, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(NoCounterError, match="intel-rapl:1/energy_uj may be read by root alone"):
        Rapl()


def test_a_counter_that_is_lost_stays_lost(powercap: Powercap) -> None:
    counter = Rapl()
    powercap.set("intel-rapl:1", 1)
    (powercap.path / "intel-rapl:1" / "energy_uj").write_text("gone")
    for text in ("gone", "5\n"):
        (powercap.path / "intel-rapl:1" / "energy_uj").write_text(text)
        with pytest.raises(NoCounterError, match="invalid literal"):
            counter.joules()
    counter.close()


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


@pytest.mark.parametrize("uuid", (UUID, "GPU-old"))
def test_a_gpu_counts_millijoules(nvml: FakeNvml, uuid: str) -> None:
    counter = Nvml(uuid)
    begun = counter.joules()
    nvml.gpus[uuid][0] += 2500
    assert counter.joules() - begun == pytest.approx(2.5)
    counter.close()
    assert nvml.num_open == 0


@pytest.mark.parametrize(
    ("uuid", "why"),
    (("GPU-pascal", "Not Supported"), ("GPU-split", r"split \(MIG\)"), ("GPU-none", "NVML on GPU-none: Not Found")),
)
def test_a_gpu_without_a_counter(nvml: FakeNvml, uuid: str, why: str) -> None:
    with pytest.raises(NoCounterError, match=why):
        Nvml(uuid)
    assert nvml.num_open == 0, "the library is let go"


def test_without_the_package_and_without_its_library(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NVMLError("NVML Shared Library Not Found")

    nvml.nvmlInit = fail
    with pytest.raises(NoCounterError, match="Shared Library Not Found"):
        Nvml(UUID)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoCounterError, match="nvidia-ml-py is not installed"):
        Nvml(UUID)


# --- a step ---


def test_a_step_and_its_rollout(powercap: Powercap, nvml: FakeNvml) -> None:
    counters = Counters("a", UUID, True)
    meter = Meter(counters, [counters.reach], 0)
    powercap.set("intel-rapl:0", 1_000_000)  # before the step: a save
    meter.begin_step()
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
    assert nvml.num_open == 0 and counters.open == {}


def test_a_gpu_of_several_ranks_and_a_node_are_read_once(powercap: Powercap, nvml: FakeNvml) -> None:
    both = [Counters("a", UUID, True), Counters("a", UUID, False), Counters("b", UUID, True)]
    reaches = [counters.reach for counters in both]
    meters = [Meter(counters, reaches, rank) for rank, counters in enumerate(both)]
    for meter in meters:
        meter.begin_step()
    powercap.set("intel-rapl:1", 4_000_000)
    nvml.gpus[UUID][0] += 3000
    taken = [meter.end_step() for meter in meters]
    assert [step["energy/gpu_joules"] for step in taken] == [3.0, 0.0, 3.0]
    assert [step["energy/cpu_joules"] for step in taken] == [4.0, 0.0, 4.0]
    assert nvml.num_open == 2
    for meter in meters:
        meter.close()


def test_what_one_node_lacks_is_told_by_none() -> None:
    whole = Reach("a", UUID)
    assert told_kinds([whole, Reach("b", "GPU-c")]) == {"gpu": "", "cpu": ""}
    lacking = Reach("b", "GPU-c", {"cpu": "may be read by root alone"})
    assert told_kinds([whole, lacking]) == {"gpu": "", "cpu": "b: may be read by root alone"}
    assert told_kinds([whole, Reach("a")]) == {"cpu": ""}, "of GPUs that some ranks go without, nothing"


def test_where_nothing_can_be_read_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy_counters, "POWERCAP", tmp_path)
    counters = Counters("a", "", True)
    meter = Meter(counters, [counters.reach], 0)
    meter.begin_step()
    meter.end_rollout()
    assert meter.end_step() == {} and counters.reach.lacking == {"cpu": f"{tmp_path} has no intel-rapl"}
    meter.close()


def test_a_kind_that_another_node_lacks_is_let_go(powercap: Powercap, nvml: FakeNvml) -> None:
    counters = Counters("a", UUID, True)
    meter = Meter(counters, [counters.reach, Reach("b", "GPU-c", {"gpu": "broken"})], 0)
    assert nvml.num_open == 0 and list(meter.end_step()) == ["energy/cpu_joules", "energy/rollout_cpu_joules"]
    meter.close()


def test_a_lost_counter_is_warned_of_once_and_its_figures_are_none(
    powercap: Powercap, caplog: pytest.LogCaptureFixture
) -> None:
    counters = Counters("a", "", True)
    meter = Meter(counters, [counters.reach], 0)
    meter.begin_step()
    (powercap.path / "intel-rapl:0" / "energy_uj").write_text("?")
    for _ in range(2):
        meter.end_rollout()
        assert all(math.isnan(value) for value in meter.end_step().values())
        meter.begin_step()
    assert len(caplog.records) == 1 and "energy is not told from here on" in caplog.text
    meter.close()


def test_a_part_that_was_lost_leaves_the_sum_out() -> None:
    from dataclasses import replace

    from tlt_hpc.look.metrics import summarise, summarise_rank

    def summary_of(*joules: float) -> dict[str, float]:
        own = [
            replace(record, metrics={**record.metrics, "energy/cpu_joules": value})
            for record, value in zip(RECORDS, joules, strict=True)
        ]
        world = SimpleNamespace(allgather=lambda item: [summarise_rank(record) for record in own])
        return summarise(world, own[0], UPDATE, None, {"gen": 8.0, "step": 10.0}).metrics

    assert summary_of(3.0, 4.5)["energy/cpu_joules"] == 7.5
    assert "energy/cpu_joules" not in summary_of(3.0, math.nan)


@pytest.mark.mpi
def test_a_run_logs_joules_and_each_start_what_it_runs_on(tmp_path: Path) -> None:
    """Two ranks of one node, one of whose counters goes on by a joule from each reading to the next."""
    run_on_ranks(2, train_beside_a_counter, str(tmp_path), timeout=240)
    lines = read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert list(lines) == [0, 1]
    for line in lines.values():
        assert line["energy/cpu_joules"] == 2.0 and line["energy/rollout_cpu_joules"] == 1.0
        assert "energy/gpu_joules" not in line
    starts, problems = read_environments(tmp_path / "runs" / "tiny" / "environment.jsonl")
    assert len(starts) == 2 and not problems
    for start in starts:
        assert [host.num_ranks for host in start.hosts] == [2] and start.hosts[0].gpus == {}
        assert start.hosts[0].num_cores == len(os.sched_getaffinity(0)) and start.mpi and start.threads == "1"
        assert start.energy == {"cpu": ""} and start.commit == git_commit(ROOT) and start.launcher.startswith("mpiexec")


def train_beside_a_counter(folder: str) -> None:
    from tlt_hpc.cli.display import make_reporter
    from tlt_hpc.config import load_config
    from tlt_hpc.mpi.world import World
    from tlt_hpc.rl.distributed import leave_process_group
    from tlt_hpc.train import run

    world = World.connect()
    energy_counters.POWERCAP = Path(folder) / "powercap"
    if world.rank == 0:
        Powercap(energy_counters.POWERCAP)
    world.barrier()
    true_joules, readings = Rapl.joules, []

    def count(counter: Rapl) -> float:
        readings.append(true_joules(counter))
        (energy_counters.POWERCAP / "intel-rapl:0" / "energy_uj").write_text(f"{len(readings) * 1_000_000}\n")
        return readings[-1]

    Rapl.joules = count  # type: ignore[method-assign]
    changes = ["rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=48"]
    for num_steps in (1, 2):
        options = [f"run.folder={folder}/runs", "run.ranks=2", f"run.num_steps={num_steps}", *changes]
        with make_reporter(world.rank == 0) as reporter:
            run(load_config(ROOT / "jobs" / "tiny.toml", options), world, reporter)
    assert bool(readings) == (world.rank == 0), "one rank of a node reads"
    leave_process_group()
    world.leave()


# --- what was logged ---


def with_energy(path: Path, factor: float = 1.0, steps: tuple[int, ...] = (0, 1, 2), **more: float) -> RunLog:
    folder = small_run(path)
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    for row in rows:
        row |= {"perf/total_num_tokens": 21.0, **more}
        if row["training/global_step"] in steps:
            row |= {"energy/gpu_joules": 960.0 * factor, "energy/rollout_gpu_joules": 240.0 * factor}
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunLog(path)


def test_joules_by_step_by_token_and_watts(tmp_path: Path) -> None:
    found = analyse_energy(with_energy(tmp_path / "run", **{"rollout/kept_tokens": 5.0}))
    assert found.told == ("gpu",) and found.joules["gpu"].tolist() == [960.0] * 3
    assert found.joules_a_token == {"gpu": pytest.approx(60.0)} and found.watts == {"gpu": pytest.approx(100.0)}
    assert "Steps 0 to 2: 2.88 kJ by GPUs (25 % of it in rollouts)." in found.verdict
    assert "60 J of GPUs" in found.verdict and "100 W of GPUs" in found.verdict
    assert "whole nodes" not in found.verdict
    json.dumps(found.to_json(), allow_nan=False)


def test_steps_that_do_not_tell_are_counted_apart(tmp_path: Path) -> None:
    found = analyse_energy(with_energy(tmp_path / "run", steps=(1,)))
    assert found.watts == {"gpu": pytest.approx(100.0)} and "told by 1 of 3 steps" in found.verdict


def test_a_run_without_counters_says_why(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run")
    found = analyse_energy(RunLog(folder.path))
    assert not found.has_data and found.verdict == "Energy is unknown: no counter of this machine can be read."
    folder.metrics.write_text("")
    assert "no step is committed" in analyse_energy(RunLog(folder.path)).verdict


def test_energy_is_compared_where_both_tell_it(tmp_path: Path) -> None:
    one, other = with_energy(tmp_path / "one"), with_energy(tmp_path / "other", 0.5)
    found = analyse_comparison([one, other])
    assert "joules a step of GPUs 480 and 960" in found.verdict and "processors" not in found.verdict
    silent = RunLog(small_run(tmp_path / "silent").path)
    assert "joules" not in analyse_comparison([one, silent]).verdict


@pytest.mark.parametrize(
    ("value", "words"), ((0.5, "0.5 J"), (999.4, "999 J"), (999.9, "1 kJ"), (12345, "12.3 kJ"), (4.56e9, "4.56 GJ"))
)
def test_joules_for_people(value: float, words: str) -> None:
    assert joules(value) == words
