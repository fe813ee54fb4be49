"""Held against a recorded run: costs from some of its steps, the seconds of the others from their lengths alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tlt_hpc.simulate.measured import costs_as_chosen, phases_of, read_rounds, setting_of
from tlt_hpc.simulate.run_log import RunLog
from tlt_hpc.simulate.step import simulate

WITHIN = 0.10


@dataclass(frozen=True)
class Check:
    """Seconds of the predicted steps together; ``rollout_spread`` is the mean error of single steps, without sign.

    ``machine_drift``: seconds of a round in the predicted steps over those of the fitted ones, same batch and strategy;
    no model can know of it.
    """

    run: str
    mode: str
    num_ranks: int
    split: str
    num_steps: int
    rollout_measured: float
    rollout_predicted: float
    step_measured: float
    step_predicted: float
    idle_measured: float
    idle_predicted: float
    rollout_spread: float
    machine_drift: float

    @property
    def rollout_error(self) -> float:
        return self.rollout_predicted / self.rollout_measured - 1

    @property
    def step_error(self) -> float:
        return self.step_predicted / self.step_measured - 1

    @property
    def holds(self) -> bool:
        """Whether both errors are within a tenth."""
        return max(abs(self.rollout_error), abs(self.step_error)) <= WITHIN

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"rollout_error": self.rollout_error, "step_error": self.step_error, "holds": self.holds}


def validate(log: RunLog) -> list[Check]:
    """Fit on the first half and predict the second; then on every other step, where a machine's drift cancels.

    Raises:
        ValueError: fewer than four steps.
    """
    count = len(log.steps)
    if count < 4:
        raise ValueError(f"{log.name} has {count} steps to learn from; --validate needs 4 or more")
    half = count // 2
    return [
        check(log, "second half", slice(0, half), slice(half, count)),
        check(log, "every other", slice(0, count, 2), slice(1, count, 2)),
    ]


def check(log: RunLog, split: str, fitted: slice, asked: slice) -> Check:
    """Predict the ``asked`` steps from the ``fitted`` ones."""
    known, unknown = log.part(fitted), log.part(asked)
    setting = setting_of(known)
    steps = simulate(unknown.lengths, costs_as_chosen(known, setting.max_live), setting, phases_of(known))
    single = np.abs(steps.rollout_seconds / unknown.rollout_seconds - 1)
    return Check(
        run=log.name,
        mode=log.config.speculation.mode,
        num_ranks=log.num_ranks,
        split=split,
        num_steps=len(unknown.steps),
        rollout_measured=float(unknown.rollout_seconds.sum()),
        rollout_predicted=float(steps.rollout_seconds.sum()),
        step_measured=float(unknown.step_seconds.sum()),
        step_predicted=float(steps.step_seconds.sum()),
        idle_measured=float(unknown.idle_rank_seconds.sum()),
        idle_predicted=float(steps.idle_rank_seconds.sum()),
        rollout_spread=float(single.mean()),
        machine_drift=drift(known, unknown),
    )


def drift(known: RunLog, unknown: RunLog) -> float:
    """Seconds of like rounds, by the batch, in one part of a run over another: weighted by the latter's seconds."""
    before, _ = read_rounds(known)
    after, _ = read_rounds(unknown)
    total, expected = 0.0, 0.0
    for name in set(after.strategy.tolist()):
        for bucket in np.unique(after.bucket):
            now = (after.strategy == name) & (after.bucket == bucket)
            then = (before.strategy == name) & (before.bucket == bucket)
            if now.any() and then.any():
                total += float(after.seconds[now].sum())
                expected += float(before.seconds[then].mean()) * np.count_nonzero(now)
    return total / expected if expected else float("nan")
