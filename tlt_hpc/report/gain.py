"""What speculation gained at equal rollouts: measured against another run's, or estimated from the run's own rounds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.analysis.comparison import Comparison, RunSeries
from tlt_hpc.analysis.result import count, seconds
from tlt_hpc.report.findings import Findings
from tlt_hpc.simulate.counterfactual import estimate_of
from tlt_hpc.simulate.run_log import run_of


class Text(Enum):
    """Whether the other run's responses are the same."""

    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Gain:
    """Seconds without over seconds with speculation, above 1 where it pays; ``words`` say how that is known."""

    rollout: float
    step: float
    is_measured: bool
    words: str


def measured_gain(found: Findings) -> Gain | None:
    """Against the other run, over the steps that both have; None where there is no other, or nothing in common."""
    if found.comparison is None or found.other is None:
        return None
    other, own = found.comparison.runs
    steps = _fair_steps(found.comparison, other, own)
    sums = {name: (_sum(other, name, steps), _sum(own, name, steps)) for name in ("rollout_seconds", "step_seconds")}
    if len(steps) == 0 or not all(np.isfinite(both).all() and min(both) > 0 for both in sums.values()):
        return None
    rollout, step = (theirs / ours for theirs, ours in sums.values())
    theirs, ours = sums["rollout_seconds"]
    mode = found.other.setting("speculation", "mode")
    named = other.name + (" (without speculation)" if mode == "plain" else f" (speculation: {mode})" if mode else "")
    words = (
        f"Measured: the rollouts of {count(len(steps), 'step')} took {seconds(ours)} here and {seconds(theirs)} in "
        f"{named}: they are {faster(rollout)}, whole steps, with the policy's update, {faster(step)}."
    )
    return Gain(rollout, step, True, f"{words}{_unlike(found)}")


def estimated_gain(found: Findings) -> tuple[Gain | None, str]:
    """From the run's own plain rounds, without another run; or why that cannot be."""
    path = found.log.folder.path
    how = "to measure it: tlt report RUN --against a run of the same seed without speculation"
    try:
        estimate = estimate_of(run_of(path, found.rounds), path)
    except ValueError as error:  # too short, no plain round, replicas: each says which
        return None, f"Not known: {error} ({how})."
    own, plain = float(estimate.rollout_seconds.sum()), float(estimate.plain_rollout_seconds.sum())
    doubt = "" if estimate.is_trusted else " Less than half of it was seen, so it may be off by a fifth."
    words = (
        f"Estimated: the rollouts of {count(len(estimate.steps), 'step')} took {seconds(own)}, and without speculation "
        f"would have taken about {seconds(plain)}: they are {faster(estimate.rollout_gain)}, whole steps "
        f"{faster(estimate.step_gain)}. It rests on {estimate.basis}.{doubt} It is an estimate; {how}."
    )
    return Gain(estimate.rollout_gain, estimate.step_gain, False, words), ""


def text_of(found: Findings) -> Text:
    """Whether the tokens are those of the other run, as far as both were read."""
    if found.comparison is None or len(found.comparison.compared_steps) == 0:
        return Text.UNKNOWN
    same = all(step is None for step in found.comparison.first_difference.values())
    return Text.SAME if same else Text.DIFFERENT


def faster(ratio: float) -> str:
    """``1.52 times as fast``, or slower, or neither."""
    if abs(ratio - 1) < 0.02:
        return "as fast as without"
    return f"{ratio:.2f} times as fast" if ratio > 1 else f"slower by a factor of {1 / ratio:.2f}"


def _fair_steps(found: Comparison, other: RunSeries, own: RunSeries) -> NDArray[np.int64]:
    """Common steps, without those of which an earlier start had generated a part, for which no second was taken."""
    cut = {int(step) for run in (other, own) for step in run.steps[run.series["kept_tokens"] > 0]}
    return np.array([step for step in found.common_steps.tolist() if step not in cut], np.int64)


def _sum(run: RunSeries, name: str, steps: NDArray[np.int64]) -> float:
    return float(run.series[name][np.isin(run.steps, steps)].sum())


def _unlike(found: Findings) -> str:
    """What makes the comparison unfair, in words."""
    assert found.other is not None
    other = {summary.num_ranks for step in found.other.steps[:1] for summary in found.other.ranks(step)}
    parts = []
    if other and other != {found.num_ranks}:
        parts.append(f"it ran on {count(max(other), 'rank')}, this on {found.num_ranks}")
    if text_of(found) is Text.DIFFERENT:
        parts.append("the responses differ, so the work was not the same")
    return f" Not like for like: {'; '.join(parts)}." if parts else ""
