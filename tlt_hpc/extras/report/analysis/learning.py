"""Whether the policy learns: reward, KL, entropy, gradients, lengths and evaluations by step, from metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.extras.report.analysis.base import StepAnalysis
from tlt_hpc.look.columns import COLUMNS, LEARNING, SCORE
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.series import change_of, step_numbers
from tlt_hpc.look.text_format import join_names

_CORE = "val-core/"


@dataclass(frozen=True)
class Learning(StepAnalysis):
    """Series by name, [S] each; NaN where a line lacks it. ``evaluations``: scores by data set and measure."""

    series: dict[str, NDArray[np.float64]]
    evaluations: dict[str, NDArray[np.float64]]
    not_finite: dict[str, int]
    """Name of a series -> the first step whose value is NaN or infinite."""

    def has(self, name: str) -> bool:
        """True if a series has any value but zero."""
        return bool(np.nan_to_num(self.series[name], posinf=0, neginf=0).any())

    @property
    def verdict(self) -> str:
        """The change of scores and other series over the run, in one paragraph."""
        if not self.has_data:
            return "metrics.jsonl has no line yet: no step is committed."
        score, norms = self.series[SCORE], self.series["grad_norm"]
        if len(self.steps) == 1:
            return f"One step is committed; its mean score is {score[0]:.3f}. Nothing can be said of learning yet."
        parts = [
            f"{len(self.steps)} steps, {self.steps[0]} to {self.steps[-1]}.",
            _change_sentence("The mean score", score, ".3f"),
            _noise_sentence(score),
            _change_sentence("The entropy", self.series["entropy"], ".3f", " nats"),
            _change_sentence("The mean response", self.series["length"], ",.0f", " tokens"),
            f"The gradient norm was at most {np.nanmax(norms):.3g}." if np.isfinite(norms).any() else "",
        ]
        if self.not_finite:
            bad = [f"{name} from step {step} on" for name, step in self.not_finite.items()]
            parts.append(f"NOT FINITE: {join_names(bad)}; the figures here are of the other steps.")
        for name, values in self.evaluations.items():
            known = np.flatnonzero(np.isfinite(values))
            if len(known) and ("/acc/greedy" in name or "/acc/mean@" in name):
                told = [f"{values[i]:.3f} at step {self.steps[i]}" for i in sorted({known[-1], known[0]}, reverse=True)]
                parts.append(f"{name.replace('/acc/', ' ')}: {', '.join(told)}.")
        return " ".join(filter(None, parts))


def analyse_learning(run: RunLog) -> Learning:
    """Analyse all steps that have a line."""
    names = sorted({name for line in run.lines.values() for name in line if name.startswith(_CORE)})
    bad = dict[str, int]()
    for step, line in run.lines.items():
        for name in LEARNING:
            if not np.isfinite(line.get(COLUMNS[name].metric, 0.0)):
                bad.setdefault(name, step + 1)
    return Learning(
        run=run.name,
        problems=run.problems,
        steps=step_numbers(run.lines),
        series={name: run.metric(COLUMNS[name].metric) for name in LEARNING},
        evaluations={name.removeprefix(_CORE): run.metric(name) for name in names if not name.endswith("/stderr")},
        not_finite=bad,
    )


def window_of(num_steps: int) -> int:
    """Window of a moving mean: about a tenth of the steps, odd, from 1 to 21."""
    return min(21, 1 + 2 * (num_steps // 20))


def moving_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """The mean [S] of each of the values [S] and its neighbours in the window; missing ones do not count."""
    ones, known = np.ones(window), np.isfinite(values)
    if not len(values):
        return values
    half = window // 2
    sums, counts = (np.convolve(each, ones)[half : half + len(values)] for each in (np.where(known, values, 0), known))
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _change_sentence(what: str, values: NDArray[np.float64], form: str, unit: str = "") -> str:
    change = change_of(values)
    if change is None:
        return ""
    over = "first and last step" if change.quarter == 1 else f"means of the first and last {change.quarter} steps"
    return f"{what} went from {change.first:{form}} to {change.last:{form}}{unit} ({over})."


def _noise_sentence(score: NDArray[np.float64]) -> str:
    """A sentence on whether the change of the score is larger than the variation from step to step."""
    change = change_of(score)
    if change is None or change.error is None:
        return "That is too few steps to tell a trend from chance."
    if not change.is_clear:
        return f"That is within what steps vary by (standard error {change.error:.3f})."
    return f"That is clearly {'up' if change.last > change.first else 'down'} (standard error {change.error:.3f})."
