"""Whether the policy learns: reward, KL, entropy, gradients, lengths and evaluations by step, from metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.look.analysis.base import Analysis
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.words import listed

SCORE = "critic/score/mean"
FIGURES = {
    "score": SCORE,
    "reward": "critic/rewards/mean",
    "entropy": "actor/entropy",
    "update_kl": "actor/ppo_kl",
    "reference_kl": "actor/kl_loss",
    "mismatch_k3": "training/rollout_k3",
    "grad_norm": "actor/grad_norm",
    "length": "response_length/mean",
    "longest": "response_length/max",
    "cut_share": "response_length/clip_ratio",
}
"""Name of a series -> name of the metric."""
_CORE = "val-core/"


@dataclass(frozen=True)
class Learning(Analysis):
    """Series by name, [S] each; NaN where a line lacks it. ``evaluations``: scores by data set and measure."""

    steps: NDArray[np.int64]
    series: dict[str, NDArray[np.float64]]
    evaluations: dict[str, NDArray[np.float64]]
    not_finite: dict[str, int]
    """Name of a series -> the first step whose value is NaN or infinite."""

    @property
    def verdict(self) -> str:
        return _verdict(self)

    @property
    def has_data(self) -> bool:
        return len(self.steps) > 0

    def has(self, name: str) -> bool:
        """Whether a series has any value but zero."""
        values = self.series[name]
        return bool((np.isfinite(values) & (values != 0)).any())


def analyse_learning(run: RunLog) -> Learning:
    """Analyse all steps that have a line."""
    steps = list(run.lines)
    names = sorted({name for line in run.lines.values() for name in line if name.startswith(_CORE)})
    series = {name: run.metric(metric) for name, metric in FIGURES.items()}
    evaluations = {name.removeprefix(_CORE): run.metric(name) for name in names if not name.endswith("/stderr")}
    bad = {name: step for name, metric in FIGURES.items() if (step := _first_not_finite(run, metric)) is not None}
    return Learning(run.name, run.problems, np.array(steps, np.int64), series, evaluations, bad)


def _first_not_finite(run: RunLog, metric: str) -> int | None:
    told = ((step, line[metric]) for step, line in run.lines.items() if metric in line)
    return next((step for step, value in told if isinstance(value, float) and not np.isfinite(value)), None)


def window_of(num_steps: int) -> int:
    """Window of a moving mean: about a tenth of the steps, odd, from 1 to 21."""
    return min(21, 1 + 2 * (num_steps // 20))


def moving_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Mean of each value and its neighbours in the window; missing values do not count."""
    half = window // 2
    padded = np.concatenate([np.full(half, np.nan), values, np.full(half, np.nan)])
    rows = np.lib.stride_tricks.sliding_window_view(padded, window) if len(values) else padded.reshape(0, 1)
    told = np.isfinite(rows)
    sums = np.where(told, rows, 0.0).sum(1)
    return np.where(told.any(1), sums / np.maximum(told.sum(1), 1), np.nan)


def _verdict(found: Learning) -> str:
    num_steps = len(found.steps)
    if num_steps == 0:
        return "metrics.jsonl has no line yet: no step is committed."
    score = found.series["score"]
    if num_steps == 1:
        return f"One step is committed; its mean score is {score[0]:.3f}. Nothing can be said of learning yet."
    parts = [f"{num_steps} steps, {found.steps[0]} to {found.steps[-1]}.", _change("The mean score", score, ".3f")]
    parts.append(_noise(score))
    if np.isfinite(found.series["entropy"]).any():
        parts.append(_change("The entropy", found.series["entropy"], ".3f", " nats"))
    if np.isfinite(found.series["length"]).any():
        parts.append(_change("The mean response", found.series["length"], ",.0f", " tokens"))
    norms = found.series["grad_norm"]
    if np.isfinite(norms).any():
        parts.append(f"The gradient norm was at most {np.nanmax(norms):.3g}.")
    if found.not_finite:
        told = [f"{name} from step {step} on" for name, step in found.not_finite.items()]
        parts.append(f"NOT FINITE: {listed(told)}; the figures here are of the other steps.")
    parts += [_last(name, values, found.steps) for name, values in found.evaluations.items() if _is_main(name)]
    return " ".join(filter(None, parts))


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
        """Whether the change is at least two standard errors."""
        return self.error is not None and self.first != self.last and abs(self.last - self.first) >= 2 * self.error


def change_of(values: NDArray[np.float64]) -> Change | None:
    """The change over the steps that have a value; None for fewer than two."""
    told = values[np.isfinite(values)]
    if len(told) < 2:
        return None
    quarter = max(1, len(told) // 4)
    error = float(np.std(np.diff(told), ddof=1) / np.sqrt(2) * np.sqrt(2 / quarter)) if quarter > 1 else None
    return Change(float(told[:quarter].mean()), float(told[-quarter:].mean()), quarter, error)


def _change(what: str, values: NDArray[np.float64], form: str, unit: str = "") -> str:
    change = change_of(values)
    if change is None:
        return ""
    over = "first and last step" if change.quarter == 1 else f"means of the first and last {change.quarter} steps"
    return f"{what} went from {change.first:{form}} to {change.last:{form}}{unit} ({over})."


def _noise(score: NDArray[np.float64]) -> str:
    """Whether the change of the score is larger than the variation from step to step."""
    change = change_of(score)
    if change is None or change.error is None:
        return "That is too few steps to tell a trend from chance."
    if not change.is_clear:
        return f"That is within what steps vary by (standard error {change.error:.3f})."
    up = "up" if change.last > change.first else "down"
    if change.error < 1e-3 * abs(change.last - change.first):
        return f"It went {up} evenly."
    return f"That is {abs(change.last - change.first) / change.error:.1f} standard errors {up}."


def _is_main(name: str) -> bool:
    return "/acc/greedy" in name or "/acc/mean@" in name


def _last(name: str, values: NDArray[np.float64], steps: NDArray[np.int64]) -> str:
    told = np.flatnonzero(np.isfinite(values))
    if len(told) == 0:
        return ""
    first = f", {values[told[0]]:.3f} at step {steps[told[0]]}" if len(told) > 1 else ""
    return f"{name.replace('/acc/', ' ')}: {values[told[-1]]:.3f} at step {steps[told[-1]]}{first}."
