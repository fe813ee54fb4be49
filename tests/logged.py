"""What a run of one rank logs of a step, for tests that read logs and roll nothing out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tlt_hpc.common.records import Rollout, RolloutTiming
from tlt_hpc.storage.rollout_log import StepRecord


def step_record(step: int, rollouts: Sequence[Rollout], rewards: Any, **changes: Any) -> StepRecord:
    """A step without speculation or drafter, but for the fields in ``changes``; all ordered by key."""
    rewards = np.asarray(rewards, np.float32)
    fields: dict[str, Any] = {
        "advantages": np.zeros(len(rewards), np.float32),
        "timing": RolloutTiming(0.0, 3.0, 4.0),
        "micro_steps": (),
        "harvested_seconds": 0.0,
        "strategy_names": ("off",),
        "strategy_rounds": np.array([1]),
        "strategy_tokens": np.array([1]),
        "decisions": np.zeros((0, 2), np.int32),
        "guarded_near_ties": 0,
        "metrics": {},
    }
    return StepRecord(step=step, rank=0, num_ranks=1, rollouts=tuple(rollouts), rewards=rewards, **fields | changes)
