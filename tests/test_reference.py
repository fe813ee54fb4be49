"""The reference that becomes the policy every few steps: when it does, and that a resumed run has the same one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from launch_ranks import run_on_ranks
from test_policy import connect, leave, make_advantages, make_config, make_model, make_rollouts
from test_resume import Silent

from tlt_hpc.config import ConfigError, load_config

TINY = Path(__file__).resolve().parent.parent / "jobs" / "tiny.toml"
OVERRIDES = [
    "rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=60", "rollout.max_live=8",
    "speculation.profile_seconds=0", "speculation.mode=ngram", "algorithm.kl_coefficient=0.2",
    "algorithm.reference_every_steps=2", "optimizer.learning_rate=1e-3",
]  # fmt: skip


def distances_by_step(every: int, stage: int, num_updates: int) -> list[Any]:
    """The distance of each of four steps, and the pieces of the reference that are saved after it."""
    from tlt_hpc.rl.policy import Policy

    world = connect()
    config = make_config(
        algorithm__kl_coefficient=0.5,
        algorithm__reference_every_steps=every,
        algorithm__updates_per_step=num_updates,
        optimizer__zero_stage=stage,
    )
    policy = Policy(make_model(), config, world, reference=make_model())
    found = []
    for step in range(4):
        kl = policy.update(make_rollouts(step), make_advantages(step)).kl_loss
        saved = sum(piece.num_bytes for _, piece in policy.reference_shard())
        found.append([kl, saved, policy.num_reference_bytes])
    policy.close()
    leave()
    return found


@pytest.mark.mpi
@pytest.mark.parametrize(("stage", "num_updates"), [(1, 1), (3, 2)])
def test_the_policy_becomes_the_reference_after_every_second_step(stage: int, num_updates: int) -> None:
    first, second = run_on_ranks(2, distances_by_step, 2, stage, num_updates)
    distances = [kl for kl, _, _ in first]
    assert distances[1] > max(1e-4, 2 * distances[0])
    assert distances[3] > max(1e-4, 2 * distances[2]), "two steps later it is the policy again"
    if num_updates == 1:
        assert [distances[0], distances[2]] == pytest.approx([0, 0], abs=1e-9)
    assert [saved > 0 for _, saved, _ in first] == [False, True, True, True], "the start needs no saving"
    whole = 4 * sum(parameter.numel() for parameter in make_model().parameters())
    assert first[3][1] + second[3][1] == whole == first[0][2] + second[0][2]


def three_ends_of_a_run(folder: str) -> list[str]:
    """The policy after four steps: at one go; with a restart after three; with the checkpoint lost by then as well."""
    from tlt_hpc.mpi.world import World
    from tlt_hpc.rl.distributed import leave_process_group
    from tlt_hpc.run import run

    world = World.connect()

    def steps(name: str, count: int) -> str:
        changes = [f"run.folder={folder}", f"run.name={name}", f"run.num_steps={count}"]
        return run(load_config(TINY, [*OVERRIDES, *changes]), world, Silent()).policy_sha256

    ends = [steps("whole", 4)]
    for name in ("restarted", "replayed"):
        steps(name, 3)
        if name == "replayed" and world.rank == 0:
            shutil.rmtree(Path(folder) / name / "checkpoints")
        world.barrier()
        ends.append(steps(name, 4))
    leave_process_group()
    return ends


@pytest.mark.mpi
def test_a_resumed_run_has_the_reference_that_it_had(tmp_path: Path) -> None:
    """The reference is that of step 2: neither the model of the start nor the policy that is loaded."""
    for whole, restarted, replayed in run_on_ranks(2, three_ends_of_a_run, str(tmp_path), timeout=240):
        assert whole == restarted == replayed


def test_a_reference_that_nothing_reads_is_not_renewed() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(TINY, ["algorithm.reference_every_steps=5"])
    assert str(caught.value) == (
        "algorithm.reference_every_steps = 5 says nothing with algorithm.kl_coefficient = 0.0, which needs no "
        "reference; set a coefficient, or leave algorithm.reference_every_steps out"
    )
