"""Checks the simulator against a recorded run: costs from some of its steps predict the seconds of the others."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from tlt_hpc.plan.simulate.recorded import RecordedRun, costs_as_chosen, phases_of
from tlt_hpc.plan.simulate.step import setting_from, simulate

TOLERANCE = 0.10


@dataclass(frozen=True)
class PredictionCheck:
    """Measured and predicted seconds of the predicted steps, summed."""

    run: str
    mode: str
    num_ranks: int
    split: str
    """``half``: the second half of the steps is predicted from the first; ``odd``: every other step."""
    rollout_measured: float
    rollout_predicted: float
    step_measured: float
    step_predicted: float
    idle_measured: float
    idle_predicted: float

    @property
    def rollout_error(self) -> float:
        return self.rollout_predicted / self.rollout_measured - 1

    @property
    def step_error(self) -> float:
        return self.step_predicted / self.step_measured - 1

    @property
    def holds(self) -> bool:
        """Whether both errors are within a tenth."""
        return max(abs(self.rollout_error), abs(self.step_error)) <= TOLERANCE

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "rollout_error": self.rollout_error,
            "step_error": self.step_error,
            "holds": self.holds,
        }


def validate(run: RecordedRun) -> list[PredictionCheck]:
    """Fit on the first half and predict the second; then fit on every other step, so that a machine's drift cancels.

    Raises:
        ValueError: fewer than four steps.
    """
    count = len(run.rollout_seconds)
    if count < 4:
        raise ValueError(f"{run.name} has {count} steps to learn from; --validate needs 4 or more")
    half = count // 2
    return [
        _predicted(run, "half", slice(0, half), slice(half, count)),
        _predicted(run, "odd", slice(0, count, 2), slice(1, count, 2)),
    ]


def _predicted(run: RecordedRun, split: str, fitted: slice, asked: slice) -> PredictionCheck:
    known, unknown = run.part(fitted), run.part(asked)
    setting = setting_from(run.config)
    # prompts are read at the measured seconds, each one token long
    setting = replace(setting, prompt_tokens=1.0, read_share=1.0, stop_seconds=float(known.stop_seconds.mean()))
    steps = simulate(unknown.lengths, costs_as_chosen(known, setting.max_live), setting, phases_of(known))
    return PredictionCheck(
        run=run.name,
        mode=run.config.speculation.mode,
        num_ranks=run.num_ranks,
        split=split,
        rollout_measured=float(unknown.rollout_seconds.sum()),
        rollout_predicted=float(steps.rollout_seconds.sum()),
        step_measured=float(unknown.step_seconds.sum()),
        step_predicted=float(steps.step_seconds.sum()),
        idle_measured=float(unknown.idle_rank_seconds.sum()),
        idle_predicted=float(steps.idle_rank_seconds.sum()),
    )
