"""Series of a run's metrics by step, and what is found from them: changes over a run, and ratios between two runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tlt_hpc.common.formatting import FIRST_STEP
from tlt_hpc.look.columns import COLUMNS, COMPARED
from tlt_hpc.look.run_log import RunLog

_TIMED = ("rollout", "step")
"""Not known of a step of which an earlier start generated a part."""
_RESAMPLES = 2000
_MAY_DIFFER = {"speculation", "drafter", "checkpoint", "evaluation", "warmup"} | {
    f"run.{key}" for key in ("name", "folder", "num_steps", "stall_factor", "trackers")
}
"""Sections and keys that may differ between two runs that are compared."""


def step_numbers(steps: Iterable[int]) -> NDArray[np.int64]:
    """The numbers [S] from 1 of steps that a run log counts from 0: all results of analyses have these."""
    return np.array([step + FIRST_STEP for step in steps], np.int64)


@dataclass(frozen=True)
class Change:
    """Means of the first and last quarter of the steps; ``error``: standard error of their difference, None if unknown.

    The error is estimated from the differences of neighbouring steps, so that a slow drift does not enlarge it.
    """

    first: float
    last: float
    quarter: int
    error: float | None

    @property
    def is_clear(self) -> bool:
        """True if the change is at least two standard errors."""
        return self.error is not None and self.first != self.last and abs(self.last - self.first) >= 2 * self.error


def change_of(values: NDArray[np.float64]) -> Change | None:
    """The change of values [S] over the steps that have one; None for fewer than two."""
    known = values[np.isfinite(values)]
    if len(known) < 2:
        return None
    quarter = max(1, len(known) // 4)
    error = float(np.std(np.diff(known), ddof=1) / np.sqrt(quarter)) if quarter > 1 else None
    return Change(float(known[:quarter].mean()), float(known[-quarter:].mean()), quarter, error)


@dataclass(frozen=True)
class RunSeries:
    """One run's metrics by step from 1, [S] each; NaN where unknown. ``num_ranks``: the most with a log of a step."""

    name: str
    steps: NDArray[np.int64]
    series: dict[str, NDArray[np.float64]]
    num_ranks: int

    def values(self, name: str, steps: ArrayLike) -> NDArray[np.float64]:
        """The values [N] of a series on those of the given steps that the run has."""
        return self.series[name][np.isin(self.steps, steps)]

    def mean(self, name: str, steps: ArrayLike) -> float:
        """Mean over the given steps that have a value; NaN if none has."""
        values = self.values(name, steps)
        return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def compared_series(run: RunLog, name: str) -> RunSeries:
    """A run's metrics as they are compared, under this name."""
    series = {each: run.metric(COLUMNS[each].metric) for each in COMPARED}
    for each in _TIMED:
        series[each][run.metric("rollout/kept_tokens") > 0] = np.nan
    num_ranks = max((len(run.files(step)) for step in run.steps), default=0)
    return RunSeries(name, step_numbers(run.lines), series, num_ranks)


def differing_settings(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Keys whose values differ between two configurations, except those of speculation and of the run's folder."""
    flat = [
        {f"{section}.{key}": value for section, table in config.items() if isinstance(table, dict)
         for key, value in table.items() if section not in _MAY_DIFFER}
        for config in (theirs, ours)
    ]  # fmt: skip
    names = sorted(flat[0].keys() & flat[1].keys())  # a key that one of them lacks belongs to another version
    return [name for name in names if flat[0][name] != flat[1][name] and name not in _MAY_DIFFER]


@dataclass(frozen=True)
class Speed:
    """A run's seconds divided by another run's, on the steps that both have timed: above 1 if the other is faster.

    ``rollout``: median of the steps' ratios, with its interval ``low`` to ``high``. ``step``: the same for whole steps,
    if both had taken the other run's seconds outside of rollouts. These are the same work, and would otherwise measure
    how busy the machine was.
    """

    rollout: float
    step: float
    low: float
    high: float
    steps: NDArray[np.int64]

    @property
    def is_faster(self) -> bool | None:
        """True if the other run is faster; None if 1 lies within the interval."""
        return True if self.low > 1 else False if self.high < 1 else None


class PairedRatio(NamedTuple):
    """Median of a ratio over steps, and the 95 % interval of that median."""

    median: float
    low: float
    high: float


def paired_ratio(theirs: ArrayLike, ours: ArrayLike) -> PairedRatio:
    """Ratio of two runs' seconds [S] by step; the interval is found by resampling steps (bootstrap, fixed seed).

    It is 0 to infinity for fewer than three steps.
    """
    ratios = np.asarray(theirs, float) / np.asarray(ours, float)
    number, median = len(ratios), float(np.median(ratios))
    if number < 3:
        return PairedRatio(median, 0.0, float("inf"))
    chosen = np.random.default_rng(0).integers(0, number, (_RESAMPLES, number))
    low, high = np.percentile(np.median(ratios[chosen], 1), (2.5, 97.5))
    return PairedRatio(median, float(low), float(high))


def speed_of(first: RunSeries, other: RunSeries) -> Speed | None:
    """The ratio of the first run's seconds to another run's; None if no step was timed in both."""
    runs = first, other
    times = [np.where(run.series["rollout"] > 0, run.series["rollout"] * run.series["step"], np.nan) for run in runs]
    timed = [run.steps[np.isfinite(each) & (each > 0)] for run, each in zip(runs, times, strict=True)]
    if not len(steps := np.intersect1d(timed[0], timed[1])):
        return None
    theirs, ours = (run.values("rollout", steps) for run in runs)
    whole = other.values("step", steps)
    rollout, step = paired_ratio(theirs, ours), paired_ratio(theirs + whole - ours, whole)
    return Speed(rollout.median, step.median, rollout.low, rollout.high, steps)


def to_json_types(value: Any) -> Any:
    """Turn arrays into lists, dataclasses into dictionaries, and NaN and infinity into None."""
    if is_dataclass(value) and not isinstance(value, type):
        # dataclasses.asdict would copy every array
        return {field.name: to_json_types(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray):
        return to_json_types(value.tolist())
    if isinstance(value, Mapping):
        return {str(to_json_types(key)): to_json_types(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_types(each) for each in value]
    if isinstance(value, np.generic):
        return to_json_types(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value
