"""Holds the memory that `tlt plan` predicts against what a run takes: its own phases, two steps, every tensor counted.

    python tools/check_memory_plan.py                                       # jobs/tiny.toml, short, one rank (no tail)
    python tools/check_memory_plan.py optimizer.zero_stage=3 ...            # other settings
    mpiexec -n 2 python -m mpi4py tools/check_memory_plan.py ...            # two ranks, also of one GPU

Responses are made to run to their full length, so that passes are as full as they can become. On a CPU the bytes of
live tensors are counted (many times slower than a run); on CUDA the allocator's peaks are read, and what the plan
assumes of CUDA itself is left out. Status 1: a phase is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import run_script

# isort: split
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tlt_hpc.cli.display import Screen, StepReporter
from tlt_hpc.config import Config, load_config
from tlt_hpc.mpi.roster import Roster
from tlt_hpc.mpi.world import World
from tlt_hpc.plan.memory.engine import PAGES
from tlt_hpc.plan.memory.phases import plan_memory
from tlt_hpc.plan.memory.plan import MemoryPlan
from tlt_hpc.plan.memory.situation import Situation
from tlt_hpc.rl.distributed import leave_process_group
from tlt_hpc.rl.update import update_policy
from tlt_hpc.run.job import Job, build_job
from tlt_hpc.run.rollout_loop import close_feature_cache, roll_out
from tlt_hpc.run.saving import begin_save, reserve_copy, resume
from tlt_hpc.run.session import choose_device
from tlt_hpc.train import gather_step_rollouts, merging_drafters

JOB = Path(__file__).resolve().parent.parent / "jobs" / "tiny.toml"
SHORT = (
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=96", "rollout.max_live=16",
    "optimizer.micro_batch_tokens=1024", "algorithm.updates_per_step=1",
    "drafter.micro_step_tokens=512", "run.num_steps=2",
)  # fmt: skip
"""Seconds instead of minutes."""
MICRO_STEPS, TOLERANCE = 3, 0.15
STEPS = 2
"""The first makes the optimiser's moments."""


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of living tensors in each phase, over all that was measured of it; without those before the first.

    A tensor's storage counts once, however many views it has, until the last is gone. On CUDA the allocator's own
    counters are read; elsewhere every operation of this thread is watched, which makes it many times slower. Buffers
    that a kernel takes and gives back inside are not seen there. What the process occupies beside its tensors is none
    of it, so a figure repeats to the byte on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._sizes: dict[int, int] = {}
        self._live = self._peak = 0
        self._before = self._begin()
        self.peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what is done within it."""
        self._begin()
        with self:
            yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._peak = torch.cuda.max_memory_allocated(self._device)
        self.peaks[name] = max(self.peaks.get(name, 0), self._peak - self._before)

    def _begin(self) -> int:
        """Return the bytes that are alive; the peak is counted anew."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return torch.cuda.memory_allocated(self._device)
        for tensor in _all_tensors():
            self._see(tensor)
        self._peak = self._live
        return self._live

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if self._device.type != "cuda":
            for leaf in tree_leaves(results):
                if isinstance(leaf, Tensor):
                    self._see(leaf)
            self._peak = max(self._peak, self._live)
        return results

    def _see(self, tensor: Tensor) -> None:
        if tensor.device.type != self._device.type or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        self._live += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def _forget(self, key: int) -> None:
        self._live -= self._sizes.pop(key)


def _all_tensors() -> Iterator[Tensor]:
    gc.unfreeze()  # what existed when libraries were imported is not listed otherwise
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):  # isinstance would ask objects that load themselves when they are asked
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad


def measure(config: Config, world: World) -> dict[str, int]:
    """The peak of each phase of the plan on this rank, in bytes."""
    meter = Meter(choose_device(config.model, world))
    with meter.phase("start"):
        job = build_job(config, world)
    try:
        job.engine._rows.ends.fill_(-1)  # no end token: responses run to their full length
        resume(job, StepReporter(Screen(False)).show_replayed_step)
        reserve_copy(job)
        for step in range(STEPS):
            take_step(job, step, meter)
        pool = job.engine.memory_table()[PAGES]
        if job.decoder.device.type == "cuda":  # it is not torch's allocator's
            meter.peaks = {phase: peak + pool * (phase != "update") for phase, peak in meter.peaks.items()}
        else:  # its tensors live on without memory
            meter.peaks["update"] -= pool
    finally:
        job.close()
    return meter.peaks


def take_step(job: Job, step: int, meter: Meter) -> None:
    """As ``run.take_step``, phase by phase, and a checkpoint; nothing is logged."""
    with (
        meter.phase("rollout"),
        patch.object(Roster, "others_still_generate", return_value=False),
    ):  # the tail is measured apart
        outcome = roll_out(job, step, StepReporter(Screen(False)))
    assert job.drafting is not None
    if job.world.size > job.replica.size:  # else no rank waits for another, and none trains
        with meter.phase("tail"):
            for _ in range(MICRO_STEPS):
                job.drafting.spot.take_micro_step()
    close_feature_cache(job.drafting, outcome.stopped)
    rollouts, scores = gather_step_rollouts(
        job, outcome.rollouts, outcome.scorer.judge_and_wait_for_rewards(outcome.rollouts)
    )
    job.engine.release_pages()
    with meter.phase("update"):
        with merging_drafters(job, outcome.idle_work.trains):
            update_policy(job.config, job.policy, rollouts, scores)
        job.load_policy(step + 1)
    with meter.phase("save"):
        begin_save(job, step + 1)
        job.checkpoints.wait_for_save(job.world)


def assumed(plan: MemoryPlan) -> int:
    """Bytes that the plan assumes of CUDA itself, which are no tensors."""
    return sum(count for name, count in plan.phases[0].parts.items() if "assumed" in name)


def main() -> int:
    """Measure, and compare with the plan; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there as well")
    options = parser.parse_args()
    world = World.connect()
    with tempfile.TemporaryDirectory() as own:
        overrides = [*SHORT, *options.overrides, f"run.folder={world.broadcast(own)}"]
        config = load_config(JOB, overrides)
        peaks = measure(config, world)
        leave_process_group()
        world.barrier()
    return report(config, world, peaks, options.json)


def report(config: Config, world: World, peaks: dict[str, int], path: Path | None) -> int:
    """Print predicted against measured, of the rank that took most; the exit status."""
    from tlt_hpc.plan.memory.shapes import find_shape

    all_peaks = world.allgather(peaks)
    device = choose_device(config.model, world).type
    shape = find_shape(config.model.path, None)
    plan = plan_memory(Situation(config, shape, world.size, world.size, "cuda" if device == "cuda" else "cpu"))
    rows = {}
    for phase in plan.phases:
        predicted, measured = phase.num_bytes - assumed(plan), max(each[phase.name] for each in all_peaks)
        rows[phase.name] = {"predicted": predicted, "measured": measured, "ratio": predicted / measured}
    if world.rank == 0:
        print(f"{'phase':10s} {'predicted':>10s} {'measured':>10s} {'ratio':>7s}")
        for name, row in rows.items():
            print(f"{name:10s} {row['predicted'] / 1e6:10.1f} {row['measured'] / 1e6:10.1f} {row['ratio']:7.3f}")
        if path:
            path.write_text(json.dumps(rows), encoding="utf-8")
    world.barrier()
    return int(any(abs(row["ratio"] - 1) > TOLERANCE for row in rows.values()))


if __name__ == "__main__":
    sys.exit(run_script("check_memory_plan", main))
