"""Joules of a run by step, by token and as mean watts, from metrics.jsonl; absent where no counter could be read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.look.analysis.environment import read_environment
from tlt_hpc.look.analysis.result import Analysis, count, listed, share, span_of
from tlt_hpc.look.analysis.run_log import RunLog

KINDS = {"gpu": "GPUs", "cpu": "processors"}
"""Kind of counter, as metrics name it -> in words."""
_TOKENS, _KEPT = "perf/total_num_tokens", "rollout/kept_tokens"
_SECONDS = "timing_s/step"


@dataclass(frozen=True)
class Energy(Analysis):
    """By step, [S], without what lies between two steps; ``joules`` and ``rollout_joules`` by kind of counter.

    Of all ranks, or of all nodes: GPUs that ranks use; processors, and memory where it is counted, of whole nodes.
    NaN where a line does not tell.
    """

    steps: NDArray[np.int64]
    joules: dict[str, NDArray[np.float64]]
    rollout_joules: dict[str, NDArray[np.float64]]
    tokens: NDArray[np.float64]
    """Response tokens that the step generated: without those that an earlier start had left."""
    seconds: NDArray[np.float64]

    @property
    def told(self) -> tuple[str, ...]:
        """Kinds of which at least one step tells."""
        return tuple(kind for kind, values in self.joules.items() if np.isfinite(values).any())

    @property
    def has_data(self) -> bool:
        return bool(self.told)

    @property
    def joules_a_token(self) -> dict[str, float]:
        """By kind: of whole steps, over their tokens; kinds that tell nothing are left out."""
        return {kind: rate for kind in self.told if np.isfinite(rate := _ratio(self.joules[kind], self.tokens))}

    @property
    def watts(self) -> dict[str, float]:
        """By kind, the mean over the steps."""
        return {kind: rate for kind in self.told if np.isfinite(rate := _ratio(self.joules[kind], self.seconds))}


def _ratio(joules: NDArray[np.float64], over: NDArray[np.float64]) -> float:
    """Of sums, over the steps that tell both."""
    told = np.isfinite(joules) & np.isfinite(over)
    whole = float(over[told].sum())
    return float(joules[told].sum()) / whole if whole > 0 else float("nan")


def analyse_energy(run: RunLog) -> Energy:
    """Of all steps that have a line."""
    kept = run.metric(_KEPT)
    found = Energy(
        run=run.name,
        verdict="",
        problems=(),
        steps=np.array(list(run.lines), np.int64),
        joules={kind: run.metric(f"energy/{kind}_joules") for kind in KINDS},
        rollout_joules={kind: run.metric(f"energy/rollout_{kind}_joules") for kind in KINDS},
        tokens=run.metric(_TOKENS) - np.where(np.isfinite(kept), kept, 0.0),
        seconds=run.metric(_SECONDS),
    )
    verdict = _verdict(found) if found.told else _not_told(run, len(found.steps))
    return Energy(**{**vars(found), "verdict": verdict, "problems": run.problems})


def joules_in_words(value: float) -> str:
    """830 J, 12.3 kJ, 4.56 MJ, 7.89 GJ."""
    for unit, size in (("GJ", 1e9), ("MJ", 1e6), ("kJ", 1e3)):
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} J"


def _verdict(found: Energy) -> str:
    parts = [f"{span_of(found.steps).capitalize()}: {listed([_of_kind(found, kind) for kind in found.told])}."]
    if found.joules_a_token:
        told = [f"{joules_in_words(rate)} of {KINDS[kind]}" for kind, rate in found.joules_a_token.items()]
        parts.append(f"A generated token took {listed(told)}, updates included.")
    if found.watts:
        told = [f"{rate:,.0f} W of {KINDS[kind]}" for kind, rate in found.watts.items()]
        parts.append(f"On average {listed(told)}.")
    if "cpu" in found.told:
        parts.append("Processors are those of whole nodes, with what other jobs had there.")
    return " ".join(parts)


def _of_kind(found: Energy, kind: str) -> str:
    joules, rollout = found.joules[kind], found.rollout_joules[kind]
    told = np.isfinite(joules)
    whole = float(joules[told].sum())
    some = "" if told.all() else f", told by {told.sum()} of {count(len(told), 'step')}"
    both = told & np.isfinite(rollout)
    in_rollouts = share(float(rollout[both].sum()), float(joules[both].sum()))
    return f"{joules_in_words(whole)} by {KINDS[kind]} ({in_rollouts} of it in rollouts{some})"


def _not_told(run: RunLog, num_steps: int) -> str:
    if num_steps == 0:
        return "metrics.jsonl has no line yet: no step is committed."
    starts = read_environment(run)
    reasons = [f"{KINDS.get(kind, kind)}: {why}" for kind, why in starts[-1].energy.items() if why] if starts else []
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return f"Energy is not told: this machine lets no counter be read{why}."
