"""What speculation gained at equal rollouts: measured against another run's, or estimated from the run's own rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.look.analysis.comparison import RunSeries
from tlt_hpc.look.analysis.environment import read_environment
from tlt_hpc.look.analysis.result import count, listed, seconds, share
from tlt_hpc.look.analysis.run_log import RunLog
from tlt_hpc.look.report.findings import Findings
from tlt_hpc.plan.simulate.counterfactual import estimate_of, estimate_plain
from tlt_hpc.plan.simulate.run_log import run_of

_NO_MATTER = {"speculation", "drafter", "checkpoint", "tracking", "evaluation", "warmup"} | {
    f"run.{key}" for key in ("name", "folder", "num_steps", "stall_factor")
}
"""Sections and keys that may differ between a run and the one that it is held against."""
_MOST_NAMED = 4
_EVEN_PACE = 0.10
"""Difference of the policy updates' seconds, the same work in both runs, up to which they ran at one pace."""
_ERROR, _DOUBTED_ERROR = 0.12, 0.26
"""Of an estimate that is trusted, and of one that is not: the largest of six each (docs/simulator.md)."""
_RESAMPLES = 2000
_FEWEST_STEPS = 3
"""From which an interval can be told."""


@dataclass(frozen=True)
class Gain:
    """The other run's seconds over this one's, above 1 where this one is faster; ``words`` say how that is known.

    ``low`` and ``high``: of ``rollout``, by the steps it rests on or the error that estimates have had.
    ``is_of_speculation``: whether the other one decoded plainly, on a job that is otherwise alike.
    """

    rollout: float
    step: float
    low: float
    high: float
    is_measured: bool
    is_of_speculation: bool
    is_even: bool
    """Whether the machine gave both runs as much, by what the same updates took."""
    num_steps: int
    against: str
    words: str

    @property
    def pays(self) -> bool | None:
        """Whether it does; None where that cannot be told from the steps or the error of the estimate."""
        return True if self.low > 1 else False if self.high < 1 else None


def measured_gain(found: Findings) -> tuple[Gain | None, str]:
    """Against the other run, over the steps that both have timed; or why there is none."""
    assert found.comparison is not None and found.other is not None
    other, own = found.comparison.runs
    steps, ranks_differ = fair_steps(found.other, found.log, other, own)
    if len(steps) == 0:
        return None, f"no step was timed both here and in {other.name}"
    theirs, ours = (_values(run, "rollout_seconds", steps) for run in (other, own))
    whole = tuple(float(_values(run, "step_seconds", steps).sum()) for run in (other, own))
    rollout = float(theirs.sum() / ours.sum())
    pace = _pace(found, steps)
    is_even = pace is None or abs(pace - 1) <= _EVEN_PACE
    # at another pace of the machine the rest of a step took other seconds for the same work: this run's stand for both
    rest = whole[1] - ours.sum()
    step = whole[0] / whole[1] if is_even else float((theirs.sum() + rest) / whole[1])
    low, high = interval(theirs, ours)
    mode = str(found.other.setting("speculation", "mode") or "")
    unlike = _unlike(found, ranks_differ)
    is_of_speculation = mode == "plain" and found.mode in ("ngram", "full") and not unlike
    named = other.name + {"plain": " (without speculation)", "": ""}.get(mode, f" (speculation: {mode})")
    words = (
        f"Measured: the rollouts of {count(len(steps), 'step')} took {seconds(float(ours.sum()))} here and "
        f"{seconds(float(theirs.sum()))} in {named}: they are {faster(rollout)}{_range(low, high)}, whole steps, "
        f"with the policy's update, {faster(step)}."
    )
    if not is_even:
        assert pace is not None
        words += (
            f" Mind the machine: the policy's updates, the same work, took {pace:.2f} times as long there, so the runs "
            "did not have it to themselves alike; whole steps are told with this run's own seconds beside the rollouts."
        )
    words += f" Not like for like: {'; '.join(unlike)}." if unlike else ""
    return Gain(rollout, step, low, high, True, is_of_speculation, is_even, len(steps), other.name, words), ""


def estimated_gain(found: Findings) -> tuple[Gain | None, str]:
    """From the run's own plain rounds, without another run; or why that cannot be."""
    how = "To measure it, give a run of the same seed without speculation: tlt report RUN --against PLAIN_RUN."
    try:
        path = found.log.folder.path
        estimate = estimate_plain(path) if found.other is not None else estimate_of(run_of(path, found.rounds), path)
    except ValueError as error:  # too short, no plain round, replicas: each says which
        return None, f"Not known: {error}. {how}"
    told = np.isin(estimate.steps, found.learning.steps)
    if not told.any():
        return None, f"Not known: none of these steps tells of its rounds. {how}"
    own, plain = float(estimate.rollout_seconds[told].sum()), float(estimate.plain_rollout_seconds[told].sum())
    rollout = plain / own
    step = float(estimate.plain_step_seconds[told].sum() / estimate.step_seconds[told].sum())
    off = _ERROR if estimate.is_trusted else _DOUBTED_ERROR
    words = (
        f"Estimated: the rollouts of {count(int(told.sum()), 'step')} took {seconds(own)}, and without speculation "
        f"would have taken about {seconds(plain)}: they are {faster(rollout)}, whole steps {faster(step)}. It rests on "
        f"{estimate.basis}; estimates like it were up to {share(off, 1)} off. {how}"
    )
    low, high = rollout * (1 - off), rollout * (1 + off)
    return Gain(rollout, step, low, high, False, True, True, int(told.sum()), "", words), ""


def faster(ratio: float) -> str:
    """``1.52 times as fast``, or slower, or neither."""
    if abs(ratio - 1) < 0.02:
        return "as fast"
    return f"{ratio:.2f} times as fast" if ratio > 1 else f"slower by a factor of {1 / ratio:.2f}"


def interval(theirs: NDArray[np.float64], ours: NDArray[np.float64]) -> tuple[float, float]:
    """Of the ratio of sums, 95 of 100 by resampling steps; nothing to infinity of fewer than three."""
    number = len(ours)
    if number < _FEWEST_STEPS:
        return 0.0, float("inf")
    chosen = np.random.default_rng(0).integers(0, number, (_RESAMPLES, number))
    ratios = theirs[chosen].sum(1) / ours[chosen].sum(1)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)


def fair_steps(
    theirs: RunLog, ours: RunLog, other: RunSeries, own: RunSeries
) -> tuple[NDArray[np.int64], tuple[int, int] | None]:
    """Steps that both have timed, without those of which an earlier start had generated a part.

    Of them those that had as many ranks in both; where none had, all of them, and both numbers.
    """
    cut = {int(step) for run in (other, own) for step in run.steps[run.series["kept_tokens"] > 0]}
    names = ("rollout_seconds", "step_seconds")
    common = sorted(set(other.steps.tolist()) & set(own.steps.tolist()) - cut)
    timed = [
        step
        for step in common
        if all(np.isfinite(v) and v > 0 for run in (other, own) for name in names for v in _values(run, name, [step]))
    ]
    ranks = {step: (len(theirs.files(step)), len(ours.files(step))) for step in timed}
    alike = [step for step in timed if ranks[step][0] == ranks[step][1] or 0 in ranks[step]]
    if alike or not timed:
        return np.array(alike, np.int64), None
    return np.array(timed, np.int64), ranks[timed[0]]


def other_settings(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Keys that two configurations have otherwise and that are no part of speculation, nor of where a run lies."""
    flat = [
        {f"{section}.{key}": value for section, table in config.items() if isinstance(table, dict)
         for key, value in table.items() if section not in _NO_MATTER}
        for config in (theirs, ours)
    ]  # fmt: skip
    names = sorted(set(flat[0]) & set(flat[1]))  # a key that one of them lacks is of another version's
    return [name for name in names if flat[0][name] != flat[1][name] and name not in _NO_MATTER]


def _values(run: RunSeries, name: str, steps: Any) -> NDArray[np.float64]:
    return run.series[name][np.isin(run.steps, steps)]


def _pace(found: Findings, steps: NDArray[np.int64]) -> float | None:
    """Seconds of the policy's updates there over those here, which are the same work; None where one does not tell."""
    assert found.other is not None
    theirs, ours = (
        float(log.metric("timing_s/update_actor", steps.tolist()).sum()) for log in (found.other, found.log)
    )
    return theirs / ours if np.isfinite(theirs) and np.isfinite(ours) and ours > 0 else None


def _range(low: float, high: float) -> str:
    return f" ({low:.2f} to {high:.2f}, by how much steps differ)" if np.isfinite(high) and high - low >= 0.005 else ""


def _unlike(found: Findings, ranks: tuple[int, int] | None) -> list[str]:
    """What makes the comparison unfair, in words."""
    assert found.other is not None and found.comparison is not None
    parts = [f"it ran on {count(ranks[0], 'rank')}, this on {ranks[1]}"] if ranks else []
    if changed := other_settings(found.other.config, found.log.config):
        parts.append(f"settings besides speculation differ ({listed(changed[:_MOST_NAMED])})")
    theirs, ours = (_machines(run) for run in (found.other, found.log))
    if theirs and ours and theirs != ours:
        parts.append(f"it ran on {listed(sorted(theirs))}, this on {listed(sorted(ours))}")
    if any(step is not None for step in found.comparison.first_difference.values()):
        parts.append("the responses differ, so the work was not the same")
    return parts


def _machines(run: RunLog) -> set[str]:
    """Kinds of processors and GPUs that a run was on."""
    hosts = [host for start in read_environment(run) for host in start.hosts]
    return {name for host in hosts for name in (host.gpus or {host.processor: 1})}
