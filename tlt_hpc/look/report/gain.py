"""How much faster a run is than another one on the same rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.words import count
from tlt_hpc.look.analysis.comparison import ROLLOUT, STEP, timed_steps
from tlt_hpc.look.report.findings import RunFindings
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.words import listed, seconds, times_as_fast

_MAY_DIFFER = {"speculation", "drafter", "checkpoint", "tracking", "evaluation", "warmup"} | {
    f"run.{key}" for key in ("name", "folder", "num_steps", "stall_factor")
}
"""Sections and keys that may differ between two runs that are compared."""
_MAX_NAMED = 4
_EVEN_PACE = 0.10
"""Policy updates are the same work in both runs: up to this difference in time the machine was equally fast."""
_RESAMPLES = 2000
_FEWEST_STEPS = 3
"""Fewest steps for an interval."""
_HOW = (
    "Not measured. Compare with a run of the same seed without speculation (speculation.mode=plain, some steps are "
    "enough): tlt report RUN --against PLAIN_RUN."
)


@dataclass(frozen=True)
class RunGain:
    """The other run's seconds divided by this run's: above 1 if this run is faster. ``words`` say how that is known.

    ``low`` and ``high``: interval of ``rollout``, from the variation of steps.
    ``is_of_speculation``: whether the other run decoded without speculation, and is otherwise the same job.
    ``is_even``: whether the machine was equally fast for both runs, judged by the policy updates.
    """

    rollout: float
    step: float
    low: float
    high: float
    num_steps: int
    words: str
    is_of_speculation: bool
    is_even: bool
    against: str

    @property
    def pays(self) -> bool | None:
        """Whether the run is faster; None if 1 lies within the interval."""
        return True if self.low > 1 else False if self.high < 1 else None


def gain_of(found: RunFindings) -> tuple[RunGain | None, str]:
    """The gain, or None and the reason why it is unknown."""
    if found.other is not None:
        return _measured(found, found.other)
    return None, "" if found.mode in ("plain", "") or not found.is_begun else _HOW


def _measured(found: RunFindings, log: RunLog) -> tuple[RunGain | None, str]:
    """Measure against the other run, over the steps that both have timed."""
    assert found.comparison is not None
    other, own = found.comparison.runs
    steps, ranks = timed_steps(other, own)
    if len(steps) == 0:
        return None, f"Nothing was measured: no step was timed both here and in {other.name}."
    theirs, ours = (run.values(ROLLOUT, steps) for run in (other, own))
    whole = [float(run.values(STEP, steps).sum()) for run in (other, own)]
    rollout = float(theirs.sum() / ours.sum())
    updates = [float(run.metric("timing_s/update_actor", steps.tolist()).sum()) for run in (log, found.log)]
    pace = updates[0] / updates[1] if np.isfinite(sum(updates)) and updates[1] > 0 else 1.0
    is_even = abs(pace - 1) <= _EVEN_PACE
    # if the machine was not equally fast, this run's seconds outside of rollouts stand for both
    step = whole[0] / whole[1] if is_even else float((theirs.sum() + whole[1] - ours.sum()) / whole[1])
    low, high = interval(theirs, ours)
    mode, unlike = str(log.setting("speculation", "mode") or "unknown"), _unlike(found, log, ranks)
    spread = f" ({low:.2f} to {high:.2f}, by how much steps differ)" if 0.005 <= high - low < np.inf else ""
    words = (
        f"Measured: the rollouts of {count(len(steps), 'step')} took {seconds(float(ours.sum()))} here and "
        f"{seconds(float(theirs.sum()))} in {other.name} (speculation: {mode}): they are {times_as_fast(rollout)}"
        f"{spread}, whole steps, with the policy's update, {times_as_fast(step)}."
    )
    if not is_even:
        words += (
            f" The machine was not equally fast: the policy's updates, the same work, took {pace:.2f} times as long "
            "there. The figure for whole steps uses this run's own seconds outside of the rollouts."
        )
    words += f" Not a fair comparison: {'; '.join(unlike)}." if unlike else ""
    is_of_speculation = mode == "plain" and found.mode in ("ngram", "full") and not unlike
    return RunGain(rollout, step, low, high, len(steps), words, is_of_speculation, is_even, other.name), ""


def interval(theirs: NDArray[np.float64], ours: NDArray[np.float64]) -> tuple[float, float]:
    """95 % interval of the ratio of sums, by resampling steps; 0 to infinity for fewer than three steps."""
    number = len(ours)
    if number < _FEWEST_STEPS:
        return 0.0, float("inf")
    chosen = np.random.default_rng(0).integers(0, number, (_RESAMPLES, number))
    low, high = np.percentile(theirs[chosen].sum(1) / ours[chosen].sum(1), (2.5, 97.5))
    return float(low), float(high)


def other_settings(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Keys whose values differ between two configurations, except those of speculation and of the run's folder."""
    flat = [
        {f"{section}.{key}": value for section, table in config.items() if isinstance(table, dict)
         for key, value in table.items() if section not in _MAY_DIFFER}
        for config in (theirs, ours)
    ]  # fmt: skip
    names = sorted(flat[0].keys() & flat[1].keys())  # a key that one of them lacks belongs to another version
    return [name for name in names if flat[0][name] != flat[1][name] and name not in _MAY_DIFFER]


def _unlike(found: RunFindings, log: RunLog, ranks: tuple[int, int] | None) -> list[str]:
    """What makes the comparison unfair, one phrase each."""
    assert found.comparison is not None
    parts = [f"it ran on {count(ranks[0], 'rank')}, this on {ranks[1]}"] if ranks else []
    if changed := other_settings(log.config, found.log.config):
        parts.append(f"settings besides speculation differ ({listed(changed[:_MAX_NAMED])})")
    theirs, ours = (_machines(run) for run in (log, found.log))
    if theirs and ours and theirs != ours:
        parts.append(f"it ran on {listed(sorted(theirs))}, this on {listed(sorted(ours))}")
    if any(step is not None for step in found.comparison.first_difference.values()):
        parts.append("the responses differ, so the work was not the same")
    return parts


def _machines(run: RunLog) -> set[str]:
    """Names of the processors and GPUs that a run used."""
    hosts = [host for start in run.starts for host in start.hosts]
    return {name for host in hosts for name in (host.gpus or {host.processor: 1})}
