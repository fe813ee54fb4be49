"""The top of a report: a few key figures, and how much faster a run is than another one on the same rollouts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tlt_hpc.common.formatting import format_count
from tlt_hpc.extras.report.findings import RunFindings
from tlt_hpc.look.columns import SCORE
from tlt_hpc.look.cost import cost_of
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.series import Speed, change_of, differing_settings, speed_of
from tlt_hpc.look.text_format import format_percent, format_seconds, join_names

_MAX_NAMED = 4


@dataclass(frozen=True)
class KeyFigure:
    """A figure with a label and an explanation. ``tone``: good, plain or bad, for the page's colours."""

    label: str
    value: str
    words: str
    tone: str = "plain"


@dataclass(frozen=True)
class RunGain:
    """The speed of a run relative to the run ``against``.

    ``unlike``: what makes the comparison unfair, one phrase each. ``is_of_speculation``: whether the other run decoded
    without speculation, and is otherwise the same job.
    """

    against: str
    speed: Speed
    unlike: tuple[str, ...]
    is_of_speculation: bool


def gain_of(found: RunFindings) -> RunGain | None:
    """The gain; None without another run, or if no step was timed in both."""
    if found.other is None or found.comparison is None:
        return None
    other, own = found.comparison.runs
    speed = speed_of(other, own)
    if speed is None:
        return None
    unlike = []
    if own.num_ranks != other.num_ranks:
        unlike.append(f"it ran on {format_count(other.num_ranks, 'rank')}, this on {own.num_ranks}")
    if changed := differing_settings(found.other.config, found.log.config):
        unlike.append(f"settings besides speculation differ ({join_names(changed[:_MAX_NAMED])})")
    theirs, ours = _machines(found.other), _machines(found.log)
    if theirs and ours and theirs != ours:
        unlike.append(f"it ran on {join_names(sorted(theirs))}, this on {join_names(sorted(ours))}")
    if any(step is not None for step in found.comparison.first_difference.values()):
        unlike.append("the responses differ, so the work was not the same")
    is_of_speculation = (
        found.other.speculation_mode == "plain"
        and found.log.speculation_mode in ("ngram", "frozen", "full")
        and not unlike
    )
    return RunGain(other.name, speed, tuple(unlike), is_of_speculation)


def _machines(run: RunLog) -> set[str]:
    """Names of the processors and GPUs that a run used."""
    hosts = [host for start in run.environments_of_starts for host in start.hosts]
    return {name for host in hosts for name in (host.gpus or {host.processor: 1})}


def key_figures(found: RunFindings, gain: RunGain | None) -> list[KeyFigure]:
    """The key figures that are known."""
    known = [
        _score_key_figure(found),
        _evaluation_key_figure(found),
        *_idle_key_figures(found),
        _gain_key_figure(gain),
        _exactness_key_figure(found),
        _cost_key_figure(found),
    ]
    return [card for card in known if card is not None]


def _score_key_figure(found: RunFindings) -> KeyFigure | None:
    change = change_of(found.learning.series[SCORE])
    if change is None:
        return None
    over = "step" if change.quarter == 1 else f"{change.quarter} steps"
    doubt = "; too few steps to tell" if change.error is None else "; within what steps vary by"
    doubt = "" if change.is_clear else doubt
    tone = "plain" if not change.is_clear else "good" if change.last > change.first else "bad"
    value = f"{change.first:.2f} \u2192 {change.last:.2f}"
    return KeyFigure("Score", value, f"mean score, first and last {over}{doubt}", tone)


def _evaluation_key_figure(found: RunFindings) -> KeyFigure | None:
    """The mean score on the first data set that was evaluated between steps."""
    learning = found.learning
    name = next((name for name in learning.evaluations if "/acc/mean@" in name), "")
    scores = [(step, score) for step, score in zip(learning.steps, learning.evaluations.get(name, ()), strict=False)
              if np.isfinite(score)]  # fmt: skip
    if not scores:
        return None
    value = " \u2192 ".join(f"{score:.2f}" for _, score in dict.fromkeys((scores[0], scores[-1])))
    steps = " and ".join(f"{step}" for step, _ in dict.fromkeys((scores[0], scores[-1])))
    return KeyFigure("Evaluated", value, f"{name.replace('/acc/', ', ')}, after step {steps}")


def _idle_key_figures(found: RunFindings) -> list[KeyFigure]:
    idle, whole = found.throughput.total_idle_seconds, found.throughput.total_rollout_seconds
    if found.num_ranks < 2 or whole <= 0:
        return []
    words = f"of the ranks' rollout time was spent waiting for the last rank ({format_seconds(idle)} together)"
    known = [KeyFigure("Idle", format_percent(idle, whole), words)]
    if found.log.speculation_mode in ("frozen", "full") and idle > 0:
        updates = format_count(found.log.total("drafter/steps"), "update")
        words = f"of the waiting trained the draft model ({updates}) or generated responses ahead"
        known.append(KeyFigure("Harvested", format_percent(found.throughput.total_harvested_seconds, idle), words))
    return known


def _cost_key_figure(found: RunFindings) -> KeyFigure | None:
    cost = cost_of(found.log)
    return None if cost is None else KeyFigure("Cost", cost.hours_text, cost.unit_and_rate_text)


def _gain_key_figure(gain: RunGain | None) -> KeyFigure | None:
    if gain is None:
        return None
    value, steps = f"{gain.speed.rollout:.2f}\u00d7", f"whole steps: {gain.speed.step:.2f}\u00d7"
    if not gain.is_of_speculation:
        words = f"its seconds over this run's, in rollouts; {steps}; no measure of speculation"
        return KeyFigure(f"Against {gain.against}", value, words)
    tone = {True: "good", False: "bad", None: "plain"}[gain.speed.is_faster]
    words = (
        f"the speed of the same rollouts without speculation (median of {format_count(len(gain.speed.steps), 'step')})"
    )
    return KeyFigure("Gained", value, f"{words}; {steps}", tone)


def _exactness_key_figure(found: RunFindings) -> KeyFigure | None:
    """The key figure on whether speculation changed any token, and how that is known."""
    if found.other is not None and found.comparison is not None and len(found.comparison.compared_steps):
        name, steps = found.comparison.runs[0].name, format_count(len(found.comparison.compared_steps), "step")
        first = next((step for step in found.comparison.first_difference.values() if step is not None), None)
        if first is None:
            is_proof = found.log.speculation_mode != "plain" and found.other.speculation_mode == "plain"
            what = "with and without speculation" if is_proof else f"as in {name}"
            return KeyFigure("Text", "the same", f"token for token, {what} ({steps} compared)", "good")
        if differing_settings(found.other.config, found.log.config):
            return None
        why = "" if found.is_exact else ": in this precision near-ties may be decided either way"
        return KeyFigure("Text", "differs", f"from that of {name}, from step {first} on{why}", "bad")
    if found.log.speculation_mode in ("plain", ""):
        return None
    if found.is_exact:
        return KeyFigure("Text", "not compared", "the same by construction; --against a plain run proves it")
    return KeyFigure("Text", "exact samples", "near-ties may be decided either way in this precision")
