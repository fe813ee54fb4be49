"""Checks the simulator against a recorded run: costs from some of its steps predict the seconds of the others."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.plan.simulate.measured import (
    LEAST_ROUNDS,
    RecordedRounds,
    costs_as_chosen,
    phases_of,
    read_rounds,
    setting_of,
)
from tlt_hpc.plan.simulate.run_log import RecordedRun
from tlt_hpc.plan.simulate.step import simulate

WITHIN = 0.10


@dataclass(frozen=True)
class Check:
    """Seconds of the predicted steps together; ``rollout_spread`` is the mean absolute error of single steps.

    ``machine_drift``: seconds of a round in the predicted steps over those of the fitted ones, same batch and strategy,
    which no model can know. ``rollout_at_one_pace``: seconds of the predicted steps' rollouts if each of their rounds
    had taken what one like it took in the fitted steps; the difference from it is the model's own error.
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
    rollout_at_one_pace: float

    @property
    def rollout_error(self) -> float:
        return self.rollout_predicted / self.rollout_measured - 1

    @property
    def model_error(self) -> float:
        """The rollout's error on a machine that keeps its pace."""
        return self.rollout_predicted / self.rollout_at_one_pace - 1

    @property
    def step_error(self) -> float:
        return self.step_predicted / self.step_measured - 1

    @property
    def holds(self) -> bool:
        """Whether both errors are within a tenth."""
        return max(abs(self.rollout_error), abs(self.step_error)) <= WITHIN

    def as_json(self) -> dict[str, Any]:
        errors = {"rollout": self.rollout_error, "step": self.step_error, "model": self.model_error}
        return asdict(self) | {f"{name}_error": value for name, value in errors.items()} | {"holds": self.holds}


def validate(log: RecordedRun) -> list[Check]:
    """Fit on the first half and predict the second; then fit on every other step, so that a machine's drift cancels.

    Raises:
        ValueError: fewer than four steps.
    """
    count = len(log.steps)
    if count < 4:
        raise ValueError(f"{log.name} has {count} steps to learn from; --validate needs 4 or more")
    half = count // 2
    return [
        check(log, "half", slice(0, half), slice(half, count)),
        check(log, "odd", slice(0, count, 2), slice(1, count, 2)),
    ]


def check(log: RecordedRun, split: str, fitted: slice, asked: slice) -> Check:
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
        rollout_at_one_pace=retimed(known, unknown) + float(unknown.stop_seconds.sum()),
    )


def drift(known: RecordedRun, unknown: RecordedRun) -> float:
    """Seconds of rounds in ``unknown`` over those of like rounds in ``known``."""
    rounds, _ = read_rounds(unknown)
    return float(rounds.seconds.sum() / paced(read_rounds(known)[0], rounds).sum())


def retimed(known: RecordedRun, unknown: RecordedRun) -> float:
    """Seconds of the rollouts in ``unknown``, with rounds and prompts at the pace of ``known``."""
    before, read_seconds = read_rounds(known)
    total = 0.0
    for step in range(len(unknown.steps)):
        seconds = []
        for rank, own in enumerate(unknown.ranks[step]):
            one = replace(unknown.part(slice(step, step + 1)), ranks=((own,),))
            read = read_seconds * int(np.count_nonzero(unknown.lengths[step, rank]))
            seconds.append(float(paced(before, read_rounds(one)[0]).sum()) + read)
        total += max(seconds)
    return total


def paced(before: RecordedRounds, rounds: RecordedRounds) -> NDArray[np.float64]:
    """Seconds of each round, replaced by the mean of its strategy and power of two, or else of that power of two.

    A strategy's mean is used from ``LEAST_ROUNDS`` rounds on: a first round may take several times as long as the next.
    """
    names = tuple(dict.fromkeys((*before.names, *rounds.names)))
    places = [np.array([names.index(name) for name in part.names], np.int64) for part in (before, rounds)]
    number = np.concatenate([places[0][before.strategy], places[1][rounds.strategy]])
    buckets = np.concatenate([before.bucket, rounds.bucket]).astype(np.int64)
    most, count = 1 + int(buckets.max(initial=0)), len(before.seconds)

    def means(keys: NDArray[np.int64], size: int, least: int = 1) -> NDArray[np.float64]:
        """Mean of each key's earlier rounds, for the rounds asked about; NaN if there were too few."""
        num = np.bincount(keys[:count], minlength=size)
        sums = np.bincount(keys[:count], before.seconds, size)
        return np.where(num >= least, sums / np.maximum(num, 1), np.nan)[keys[count:]]

    same, like = means(number * most + buckets, len(names) * most, LEAST_ROUNDS), means(buckets, most)
    whole = float(before.seconds.mean())
    mean: NDArray[np.float64] = np.where(np.isfinite(same), same, np.where(np.isfinite(like), like, whole))
    return mean
