"""A resumed run has what it had when it began to save: policy, moments, drafter, counters, chooser."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import ROOT, run_on_ranks

from tlt_hpc import train as run
from tlt_hpc.config import load_config
from tlt_hpc.drafting import spot
from tlt_hpc.mpi.world import World
from tlt_hpc.rl.distributed import leave_process_group
from tlt_hpc.run import replay, saving, session
from tlt_hpc.storage.step_lines import drop_lines

TINY = ROOT / "jobs" / "tiny.toml"
OVERRIDES = [
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=100", "rollout.max_live=4",
    "run.num_steps=9",
]  # fmt: skip


class Silent:
    """A reporter that shows nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def state_of(job: Any) -> dict[str, Any]:
    """All that is to come back, copied."""
    policy = {name: (piece.start, piece.values.clone()) for name, piece in job.policy.state_shard()}
    engine_drafter = job.drafting.engine_drafter.state_dict()
    return {
        "policy": policy,
        "optimizer_steps": job.policy.optimizer_step_count,
        "weights": {name: weight.clone() for name, weight in job.policy.named_weights()},
        "drafter": job.drafting.spot.trained.state(),
        "drafter_steps": job.drafting.spot.trained.num_steps,
        "served is not trained": bool((engine_drafter["fc"] != job.drafting.spot.trained.drafter.fc).any()),
        "served": {name: tensor.clone() for name, tensor in engine_drafter.items()},
        "chooser": json.loads(json.dumps(job.engine.chooser.acceptance.state())),
    }


def have_a_tail() -> None:
    """Rank 1's last responses wait until rank 0, which has none left, has trained."""
    true_decode = session.decode

    def decode(engine: Any, pulse: Any) -> None:
        others_train = any(status.drafter_steps for status in pulse._roster.statuses)
        if pulse._comm.rank == 1 and engine.num_unfinished <= 2 and not others_train:
            pulse.back_off()
        else:
            true_decode(engine, pulse)

    session.decode = decode


def differences(wanted: Any, got: Any, at: str = "") -> list[str]:
    """Where two states are not the same bits."""
    if isinstance(wanted, dict):
        both = [name for name in wanted if name in got]
        missing = [f"{at}.{name}" for name in wanted.keys() ^ got.keys()]
        return missing + [each for name in both for each in differences(wanted[name], got[name], f"{at}.{name}")]
    if isinstance(wanted, tuple):
        return [each for pair in zip(wanted, got, strict=True) for each in differences(*pair, at)]
    if isinstance(wanted, torch.Tensor):
        same = wanted.dtype == got.dtype and wanted.shape == got.shape
        return [] if same and torch.equal(wanted.view(-1).view(torch.uint8), got.view(-1).view(torch.uint8)) else [at]
    return [] if wanted == got else [at]


def save_go_on_and_come_back(folder: str, changes: list[str]) -> dict[str, Any]:
    config = load_config(TINY, [*OVERRIDES, f"run.folder={folder}", *changes])
    world = World.connect()
    job = run.assemble(config, world)
    saving.resume(job, Silent().replayed)
    saving.reserve_copy(job)
    reserved = job.checkpoints._copy.num_bytes
    summaries: list[Any] = []
    reporter, true_merge = Silent(), spot.Merge
    reporter.stepped = summaries.append
    spot.Merge = lambda *given: time.sleep(2) or true_merge(*given)
    have_a_tail()
    run.take_step(job, 0, reporter)
    spot.Merge = true_merge
    wanted = state_of(job)
    saving.save_checkpoint(job, 1, 0)
    run.take_step(job, 1, Silent())  # changes all of it in place
    job.checkpoints.finish(world)
    moved = differences(wanted, state_of(job))
    taken = job.checkpoints._copy.num_bytes
    job.close()
    if world.rank == 0:
        drop_lines(job.folder.metrics, 1)  # or the step after the save would be repeated from its log
    again = run.assemble(config, world)
    saved, step = saving.resume(again, Silent().replayed)
    assert saved == step
    got = state_of(again)
    again.close()
    leave_process_group()
    if world.rank > 0:  # the chooser is rank 0's on all ranks
        wanted["chooser"] = got["chooser"] = None
    return {
        "step": step,
        "differences": differences(wanted, got),
        "moved": len(moved),
        "tensors": sum(len(wanted[part]) for part in ("policy", "weights", "drafter", "served")),
        "drafter_steps": wanted["drafter_steps"],
        "averaged": wanted["served is not trained"],
        "reserved": reserved == taken > 0,
        "refresh": [summary["timing_s/refresh"] for summary in summaries],
    }


def save_between_and_come_back(folder: str) -> list[dict[str, Any]]:
    """Started again after steps that no checkpoint has: the drafter saved alone, damaged, and of steps to come."""
    world = World.connect()

    def start() -> tuple[Any, int]:
        config = load_config(TINY, [*OVERRIDES, f"run.folder={folder}"])
        job = run.assemble(config, world)
        update, memory = replay.update_policy, job.engine._cache._memory
        replay.update_policy = lambda *given: released.append(memory.is_released) or update(*given)
        found = saving.resume(job, Silent().replayed)[1]
        replay.update_policy = update
        return job, found

    released: list[bool] = []
    have_a_tail()
    job, _ = start()
    saving.reserve_copy(job)
    reserved = job.drafting.checkpoints._copy.num_bytes
    started = state_of(job)["drafter"]
    for step in range(2):
        run.take_step(job, step, Silent())
        saving.save_drafter_if_due(job, step + 1)
        saving.finish_saves(job)
    wanted, alone = state_of(job), job.folder.drafter_checkpoints
    sizes = reserved, job.drafting.checkpoints._copy.num_bytes
    job.close()
    found = [sorted(path.name for path in alone.iterdir())]
    results = []
    damages: list[Sequence[Path]] = [(), [*alone.glob("*/drafter-00000*")], job.folder.rollout_logs(0)]
    for damaged in damages:
        world.barrier()
        if world.rank == 0:
            for path in damaged:
                path.write_bytes(b"")
        world.barrier()
        again, step = start()
        got = state_of(again)
        if world.rank == 0:
            saving.drop_steps_after(again.folder, again.drafting, step)
        world.barrier()
        again.close()
        found.append(sorted(path.name for path in alone.iterdir()))
        if world.rank > 0:  # the chooser is rank 0's on all ranks
            wanted["chooser"] = got["chooser"] = None
        at_start = differences(started, got["drafter"])
        results.append({"step": step, "differences": differences(wanted, got), "not as at the start": len(at_start)})
    leave_process_group()
    return [*results, {"found": found, "sizes": sizes, "released": released}]


@pytest.mark.mpi
@pytest.mark.ci
def test_the_drafter_comes_back_from_between_two_checkpoints(tmp_path: Path) -> None:
    for saved, damaged, again, rest in run_on_ranks(2, save_between_and_come_back, str(tmp_path)):
        assert saved == {"step": 2, "differences": [], "not as at the start": saved["not as at the start"]}
        assert saved["not as at the start"] > 20
        # trained again on what features there are: not the same, and not what it was
        assert damaged["step"] == 2 and damaged["differences"] and damaged["not as at the start"] > 20
        assert all(".drafter" in name or "served" in name or "chooser" in name for name in damaged["differences"])
        # its steps are generated again: a drafter that has seen their responses is none of theirs
        assert again["step"] == 0 and not again["not as at the start"]
        assert rest["found"] == [*[["step-000001", "step-000002"]] * 3, []]
        assert rest["sizes"][0] == rest["sizes"][1] > 0
        assert rest["released"] == [True] * 4, "the pages' memory, in the repeated updates"


@pytest.mark.mpi
@pytest.mark.ci
@pytest.mark.parametrize("changes", [[], pytest.param(["optimizer.zero_stage=3"], marks=pytest.mark.slow)])
def test_what_comes_back_is_what_there_was_at_the_save(tmp_path: Path, changes: list[str]) -> None:
    for result in run_on_ranks(2, save_go_on_and_come_back, str(tmp_path), changes):
        assert result["step"] == 1
        assert result["differences"] == []
        assert result["moved"] > result["tensors"] / 2, "the step after the save changed nothing"
        assert result["drafter_steps"] > 0, "nothing was trained in the tail"
        assert result["averaged"], "the engine drafts with the last merge's weights"
        assert result["reserved"], "the first save asked for memory that was not taken before"
        assert all(seconds > 2 for seconds in result["refresh"]), "posting the merge is in no phase"


def ends_with_and_without_a_restart(folder: str) -> list[str]:
    """The policy after two steps of ranks that share sequences, without a break and with one after the first."""
    world = World.connect()

    def steps(name: str, count: int) -> str:
        changes = ["optimizer.sequence_parallel=2", "speculation.mode=ngram", "rollout.max_new_tokens=60"]
        changes += [f"run.folder={folder}", f"run.name={name}", f"run.num_steps={count}"]
        config = load_config(TINY, [*OVERRIDES, *changes])
        return run.run(config, world, Silent()).policy_sha256

    ends = [steps("whole", 2), steps("broken", 1), steps("broken", 2)]
    leave_process_group()
    return ends


@pytest.mark.mpi
def test_a_restart_of_ranks_that_share_sequences_is_exact(tmp_path: Path) -> None:
    for whole, half, resumed in run_on_ranks(2, ends_with_and_without_a_restart, str(tmp_path)):
        assert resumed == whole != half
