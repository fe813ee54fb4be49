"""The reference that becomes the policy every few steps: when it does, and that a resumed run has the same one."""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch_ranks import run_on_ranks
from safetensors.torch import load_file, save_file
from test_policy import connect, leave, make_advantages, make_config, make_model, make_rollouts
from test_resume import Silent

from tlt_hpc.config import load_config

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
    policy = Policy(make_model(), config, world, reference=make_model)
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


def moved(model: Any) -> Any:
    """Not the policy: there is a distance at once."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


def hashes_at_stage_3() -> list[list[str]]:
    """The policy after two steps, the reference renewed between them: once sharded, once whole on every rank.

    By where the distance is taken from. Nothing but the reference differs: the policy of another stage has other bits.
    """
    from tlt_hpc.rl.policy import Policy
    from tlt_hpc.rl.reference import Reference

    world = connect()
    found = []
    for kl_in, estimator in (("loss", "k3"), ("reward", "k1")):
        recipe = {"name": "rloo", "kl_coefficient": 0.5, "kl_estimator": estimator}
        recipe["reference_every_steps"] = 1
        settings = {f"algorithm__{key}": value for key, value in recipe.items()}
        digests = []
        for is_dealt in (True, False):
            config = make_config(optimizer__zero_stage=3, **settings)
            start = make_model if world.rank else lambda: moved(make_model())  # rank 0's weights alone are dealt
            policy = Policy(make_model(), config, world, reference=start)
            if not is_dealt:
                whole = make_config(optimizer__zero_stage=1, **settings)
                policy._reference = Reference(moved(make_model()), whole, world, None)
            for step in range(2):
                rollouts, advantages = make_rollouts(step), make_advantages(step)
                if kl_in == "reward":
                    advantages = (advantages - 0.5 * policy.reference_kl(rollouts)).astype(np.float32)
                policy.update(rollouts, advantages)
            digests.append(policy.sha256())
            policy.close()
        found.append(digests)
    leave()
    return found


@pytest.mark.mpi
def test_a_reference_that_is_dealt_out_gives_the_bits_of_a_whole_one() -> None:
    ranks = run_on_ranks(2, hashes_at_stage_3)
    assert ranks[0] == ranks[1]
    (in_loss, whole_in_loss), (in_reward, whole_in_reward) = ranks[0]
    assert in_loss == whole_in_loss and in_reward == whole_in_reward and in_loss != in_reward


def share_and_whole(policy: Any, world: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes of this rank's share of the reference, and all shares put together."""
    own = [(name, piece.start, piece.values.numpy().copy()) for name, piece in policy._reference.shard()]
    whole = {name: torch.zeros_like(parameter) for name, parameter in make_model().named_parameters()}
    for name, start, values in [piece for rank in world.allgather(own) for piece in rank]:
        whole[name].view(-1)[start : start + values.size] = torch.from_numpy(values)
    return sum(values.nbytes for _, _, values in own), whole


def save_or_load(stages: list[int], folder: str, saves: bool) -> list[list[Any]]:
    """By stage: this rank's bytes of a renewed reference that is saved, or of a saved one that is loaded; its hash."""
    from tlt_hpc.rl.policy import Policy

    world = connect()
    found = []
    for number, stage in enumerate(stages):
        settings = {"algorithm__kl_coefficient": 0.5, "algorithm__reference_every_steps": 1}
        config = make_config(optimizer__zero_stage=stage, **settings)
        policy = Policy(make_model(), config, world, reference=make_model)
        file = Path(folder) / f"{number}.safetensors"
        if saves:
            policy.update(make_rollouts(), make_advantages())
        else:
            policy.load_reference(load_file(file).__getitem__)
        held, whole = share_and_whole(policy, world)
        if saves and world.rank == 0:
            save_file(whole, file)
        bits = b"".join(whole[name].numpy().tobytes() for name in sorted(whole))
        found.append([sha256(bits).hexdigest(), held])
        policy.close()
    leave()
    return found


@pytest.mark.mpi
def test_a_reference_is_loaded_on_any_number_of_ranks(tmp_path: Path) -> None:
    saved = run_on_ranks(2, save_or_load, [1, 3], str(tmp_path), True)
    loaded = run_on_ranks(3, save_or_load, [3, 1], str(tmp_path), False)
    size = 4 * sum(parameter.numel() for parameter in make_model().parameters())
    for ranks in (saved, loaded):
        for number in range(2):
            (digest,) = {rank[number][0] for rank in ranks}
            assert digest == saved[0][number][0]
            shares = [rank[number][1] for rank in ranks]
            assert sum(shares) == size and max(shares) <= 1.1 * size / len(ranks), shares


def three_ends_of_a_run(folder: str, stage: int) -> list[str]:
    """The policy after four steps: at one go; with a restart after three; with the checkpoint lost by then as well."""
    from tlt_hpc.mpi.world import World
    from tlt_hpc.rl.distributed import leave_process_group
    from tlt_hpc.train import run

    world = World.connect()

    def steps(name: str, count: int) -> str:
        changes = [
            f"run.folder={folder}",
            f"run.name={name}",
            f"run.num_steps={count}",
            f"optimizer.zero_stage={stage}",
        ]
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
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_reference_that_it_had(tmp_path: Path, stage: int) -> None:
    """The reference is that of step 2: neither the model of the start nor the policy that is loaded."""
    for whole, restarted, replayed in run_on_ranks(2, three_ends_of_a_run, str(tmp_path), stage, timeout=240):
        assert whole == restarted == replayed
