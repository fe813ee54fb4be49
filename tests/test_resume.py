"""A resumed run has what it had when it began to save: policy, moments, drafter, counters, chooser."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import ROOT, run_on_ranks

from tlt_hpc import train as run
from tlt_hpc.config import load_config
from tlt_hpc.mpi.world import World
from tlt_hpc.rl.distributed import leave_process_group
from tlt_hpc.run import replay, saving, session

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
        "weights": {name: weight.clone() for name, weight in job.policy.gather_named_weights()},
        "drafter": job.drafting.spot.trained.host_state_copy(),
        "drafter_steps": job.drafting.spot.trained.num_steps,
        "served is not trained": bool((engine_drafter["fc"] != job.drafting.spot.trained.drafter.fc).any()),
        "served": {name: tensor.clone() for name, tensor in engine_drafter.items()},
        "chooser": json.loads(json.dumps(job.engine.chooser.acceptance.state())),
    }


def have_a_tail() -> None:
    """Rank 1's last responses wait until rank 0, which has none left, has trained."""
    true_decode = session.decode_one_round

    def decode(engine: Any, pulse: Any) -> None:
        others_train = any(status.drafter_steps for status in pulse._roster.statuses)
        if pulse._comm.rank == 1 and engine.num_unfinished <= 2 and not others_train:
            pulse.back_off()
        else:
            true_decode(engine, pulse)

    session.decode_one_round = decode


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


def save_and_come_back(folder: str) -> dict[str, Any]:
    """Started again from what two steps have saved: the drafter alone, a checkpoint of all, and damaged files."""
    world = World.connect()

    def start() -> tuple[Any, int]:
        job = run.build_job(load_config(TINY, [*OVERRIDES, f"run.folder={folder}"]), world)
        update, memory = replay.update_policy, job.engine._cache._memory
        replay.update_policy = lambda *given: released.append(memory.is_released) or update(*given)
        step = saving.resume(job, Silent().show_replayed_step)[1]
        replay.update_policy = update
        return job, step

    def start_again() -> dict[str, Any]:
        world.barrier()
        again, step = start()
        got = {**state_of(again), **({"chooser": wanted["chooser"]} if world.rank else {})}  # it is rank 0's on all
        differ, learned = differences(wanted, got), differences(started["drafter"], got["drafter"])
        if world.rank == 0:
            saving.drop_steps_after(again.folder, again.drafting, step)
        if saves_all:
            saving.save_checkpoint(again, step, 0)
            again.checkpoints.wait_for_save(world)
        again.close()
        world.barrier()
        left = sorted(path.name for path in alone.iterdir())
        return {"step": step, "differ": differ, "learned": len(learned), "alone": left}

    released: list[bool] = []
    have_a_tail()
    job, _ = start()
    saving.reserve_copy(job)
    reserved, started = job.drafting.checkpoints._copy.num_bytes, state_of(job)
    for step in range(2):
        run.take_step(job, step, Silent())
        saving.begin_drafter_save_if_due(job, step + 1)
        saving.wait_for_saves_all_ranks(job)
    wanted, alone, logs = state_of(job), job.folder.drafter_checkpoints, job.folder.rollout_logs(0)
    sizes = [reserved, job.drafting.checkpoints._copy.num_bytes]
    whole = job.folder.checkpoints
    job.close()
    found, saves_all = {}, True
    found["alone"] = start_again()
    saves_all = False
    found["all"] = start_again()
    if world.rank == 0:
        shutil.rmtree(whole)
    for name, damaged in {"without": alone.glob("*/drafter-00000*"), "anew": logs}.items():
        for path in damaged:
            path.write_bytes(b"")
        found[name] = start_again()
    leave_process_group()
    return {**found, "sizes": sizes, "averaged": wanted["served is not trained"], "released": released}


@pytest.mark.mpi
@pytest.mark.ci
def test_what_comes_back_is_what_there_was_at_the_save(tmp_path: Path) -> None:
    for found in run_on_ranks(2, save_and_come_back, str(tmp_path)):
        both = ["step-000001", "step-000002"]
        for name in ("alone", "all"):
            assert found[name]["learned"] > 20, "nothing was trained in the tail"
            assert found[name] == {"step": 2, "differ": [], "learned": found[name]["learned"], "alone": both}
        # trained again on what features there are: not the same, and not what it was
        without, anew = found["without"], found["anew"]
        assert without["step"] == 2 and without["learned"] > 20 and without["differ"]
        assert all(".drafter" in name or "served" in name or "chooser" in name for name in without["differ"])
        # its steps are generated again: a drafter that has seen their responses is none of theirs
        assert (anew["step"], anew["learned"], anew["alone"]) == (0, 0, [])
        assert found["averaged"], "the engine drafts with the last merge's weights"
        assert found["sizes"][0] == found["sizes"][1] > 0, "a save asked for memory that was not taken before"
        assert found["released"] == [True] * 4, "the pages' memory, in the repeated updates"
