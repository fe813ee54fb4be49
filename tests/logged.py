"""Responses, and what a run of one rank logs of a step, for tests that roll nothing out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tlt_hpc.common.records import FinishReason, Rollout, RolloutTiming, SampleKey
from tlt_hpc.storage.rollout_log import StepRecord


def make_rollout(key: SampleKey, prompt: Sequence[int] = (), response: Sequence[int] = (), **changes: Any) -> Rollout:
    """A finished response of log-probs 0, but for the fields in ``changes``."""
    fields: dict[str, Any] = {
        "log_probs": np.zeros(len(response), np.float32),
        "finish_reason": FinishReason.EOS,
        "weight_version": 0,
        "num_target_passes": 1,
        "finished_seconds": 0.0,
    }
    return Rollout(key, np.array(prompt, np.int32), np.array(response, np.int32), **fields | changes)


def step_record(step: int, rollouts: Sequence[Rollout], rewards: Any, **changes: Any) -> StepRecord:
    """A step without speculation or drafter, but for the fields in ``changes``; all ordered by key."""
    rewards = np.asarray(rewards, np.float32)
    fields: dict[str, Any] = {
        "rank": 0,
        "num_ranks": 1,
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
    return StepRecord(step=step, rollouts=tuple(rollouts), rewards=rewards, **fields | changes)
