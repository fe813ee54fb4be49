"""What reaches the policy of a step's scores: penalties for length, the distance from the reference, advantages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tlt_hpc.common.records import FinishReason, Rollout, SampleKey
from tlt_hpc.config import load_config
from tlt_hpc.rl.update import update_policy

ROOT = Path(__file__).parent.parent
LENGTHS = [10, 90, 95, 100]
SCORES = np.array([1, 0, 1, 1], np.float32)


class Policy:
    """Keeps what it is given."""

    def reference_kl(self, rollouts: list[Rollout]) -> np.ndarray:
        return np.array([0.5, 1.0, -0.5, 2.0])

    def update(self, rollouts: list[Rollout], advantages: np.ndarray) -> str:
        self.given = advantages.tolist()
        self.groups = [rollout.key.draw for rollout in rollouts]
        return "stats"


def learned(*overrides: str, scores: np.ndarray = SCORES) -> tuple[Any, list[float]]:
    """What the update says of itself, and the advantages that the policy was given."""
    config = load_config(
        ROOT / "jobs" / "tiny.toml", ["rollout.group_size=2", "rollout.max_new_tokens=100", *overrides]
    )  # fmt: skip
    policy: Any = Policy()
    empty = np.zeros(0, np.int32)
    rollouts = [
        Rollout(SampleKey(0, 0, 0, i // 2, i % 2), empty, np.zeros(n, np.int32), empty, FinishReason.EOS, 0, n, 0.0)
        for i, n in enumerate(LENGTHS)
    ]
    update = update_policy(config, policy, rollouts, scores)
    assert policy.groups == [index // 2 for index in update.trained]
    return update, policy.given


def test_without_penalties_rewards_are_scores() -> None:
    update, given = learned("algorithm.name=dr-grpo")
    assert update.rewards.tolist() == SCORES.tolist() and update.reward_kl == 0 and update.stats == "stats"
    assert given == update.advantages.tolist() == [0.5, -0.5, 0, 0]


def test_length_is_punished_before_the_advantage() -> None:
    update, given = learned("algorithm.name=dr-grpo", "algorithm.overlong_buffer=20")
    assert update.rewards.tolist() == pytest.approx([1, -0.5, 0.25, 0])
    assert given == pytest.approx([0.75, -0.75, 0.125, -0.125])


def test_what_dynamic_sampling_leaves_out_is_not_learned_from() -> None:
    sizes = "rollout.prompts_per_step=1", "algorithm.updates_per_step=1", "algorithm.max_refills=1"
    update, given = learned("algorithm.name=dr-grpo", *sizes, scores=np.array([1, 1, 0, 1], np.float32))
    assert update.trained.tolist() == [2, 3] and update.rewards.tolist() == [0, 1] and given == [-0.5, 0.5]
    assert update.informative_share == 0.5, "of all groups that were drawn"


def test_the_distance_is_taken_from_the_reward() -> None:
    update, given = learned("algorithm.name=rloo", "algorithm.kl_estimator=k1", "algorithm.kl_coefficient=0.1")
    assert update.rewards.tolist() == pytest.approx([0.95, -0.1, 1.05, 0.8])
    assert given == pytest.approx([1.05, -1.05, 0.25, -0.25])
    assert update.reward_kl == pytest.approx(3.0 / sum(LENGTHS))


def test_whole_batch_advantages_count_tokens() -> None:
    _, given = learned("algorithm.name=reinforce++")
    mean = 205 / 295
    assert given[0] / given[1] == pytest.approx((1 - mean) / -mean, rel=1e-4)
