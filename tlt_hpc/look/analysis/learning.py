"""Whether the policy learns: reward, KL, entropy, gradients, lengths and evaluations by step, from metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.look.analysis.result import Analysis, listed
from tlt_hpc.look.analysis.run_log import RunLog

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
"""Name of a series -> of the metric."""
_CORE = "val-core/"


@dataclass(frozen=True)
class Learning(Analysis):
    """Series by name, [S] each; NaN where a line does not tell. ``evaluations``: scores by data set and measure."""

    steps: NDArray[np.int64]
    series: dict[str, NDArray[np.float64]]
    evaluations: dict[str, NDArray[np.float64]]
    not_finite: dict[str, int]
    """By name of a series: the first step whose figure is there and is no number."""

    @property
    def has_data(self) -> bool:
        return len(self.steps) > 0

    def has(self, name: str) -> bool:
        """Whether a series tells anything but zero."""
        values = self.series[name]
        return bool((np.isfinite(values) & (values != 0)).any())


def analyse_learning(run: RunLog) -> Learning:
    """Of all steps that have a line."""
    steps = list(run.lines)
    names = sorted({name for line in run.lines.values() for name in line if name.startswith(_CORE)})
    series = {name: run.metric(metric) for name, metric in FIGURES.items()}
    evaluations = {name.removeprefix(_CORE): run.metric(name) for name in names if not name.endswith("/stderr")}
    bad = {name: step for name, metric in FIGURES.items() if (step := _first_not_finite(run, metric)) is not None}
    found = Learning(run.name, "", run.problems, np.array(steps, np.int64), series, evaluations, bad)
    return Learning(**{**vars(found), "verdict": _verdict(found)})


def _first_not_finite(run: RunLog, metric: str) -> int | None:
    told = ((step, line[metric]) for step, line in run.lines.items() if metric in line)
    return next((step for step, value in told if isinstance(value, float) and not np.isfinite(value)), None)


def window_of(num_steps: int) -> int:
    """Steps of a moving mean: a tenth of them, odd, from none to 21."""
    return min(21, 1 + 2 * (num_steps // 20))


def moving_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """The mean of each value and its neighbours, as many as there are and are numbers."""
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
    """Means of the first and last quarter of the steps; ``error``: standard error of their difference, None of too few.

    The error is taken from what neighbouring steps differ by, so a slow drift is not in it.
    """

    first: float
    last: float
    quarter: int
    error: float | None

    @property
    def is_clear(self) -> bool:
        """Whether it stands out of what goes up and down from step to step."""
        return self.error is not None and self.first != self.last and abs(self.last - self.first) >= 2 * self.error


def change_of(values: NDArray[np.float64]) -> Change | None:
    """Of the steps that tell; None of fewer than two."""
    told = values[np.isfinite(values)]
    if len(told) < 2:
        return None
    quarter = max(1, len(told) // 4)
    error = float(np.std(np.diff(told), ddof=1) / np.sqrt(2) * np.sqrt(2 / quarter)) if quarter > 1 else None
    return Change(float(told[:quarter].mean()), float(told[-quarter:].mean()), quarter, error)


def _change(what: str, values: NDArray[np.float64], form: str, unit: str = "") -> str:
    """From the mean of the first quarter of the steps to that of the last."""
    told = values[np.isfinite(values)]
    if len(told) < 2:
        return ""
    quarter = max(1, len(told) // 4)
    first, last = told[:quarter].mean(), told[-quarter:].mean()
    over = "first and last step" if quarter == 1 else f"means of the first and last {quarter} steps"
    return f"{what} went from {first:{form}} to {last:{form}}{unit} ({over})."


def _noise(score: NDArray[np.float64]) -> str:
    """Whether a change stands out of what goes up and down from step to step."""
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
