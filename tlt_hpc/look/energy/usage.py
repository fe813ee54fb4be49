"""Energy that a run used: joules by step and by token, and mean watts, from metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.words import count
from tlt_hpc.look.analysis.base import Analysis
from tlt_hpc.look.energy.counters import CPU, GPU
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.words import joules as joules_in_words
from tlt_hpc.look.words import listed, share, span_of

KINDS = {GPU: "GPUs", CPU: "processors"}
"""Kind of counter -> in words."""
_TOKENS, _KEPT = "perf/total_num_tokens", "rollout/kept_tokens"
_SECONDS = "timing_s/step"


@dataclass(frozen=True)
class Energy(Analysis):
    """By step, [S], without the time between steps; ``joules`` and ``rollout_joules`` by kind of counter.

    GPUs: those that ranks use. Processors (and memory, where it has counters): those of whole nodes. NaN where a line
    lacks the value.
    """

    steps: NDArray[np.int64]
    joules: dict[str, NDArray[np.float64]]
    rollout_joules: dict[str, NDArray[np.float64]]
    tokens: NDArray[np.float64]
    """Response tokens that the step generated, without those of an earlier start."""
    seconds: NDArray[np.float64]
    reasons: tuple[str, ...]
    """Why counters could not be read when the run was last started."""

    @property
    def verdict(self) -> str:
        return _verdict(self) if self.told else _not_told(self)

    @property
    def told(self) -> tuple[str, ...]:
        """Kinds that at least one step has."""
        return tuple(kind for kind, values in self.joules.items() if np.isfinite(values).any())

    @property
    def has_data(self) -> bool:
        return bool(self.told)

    @property
    def joules_a_token(self) -> dict[str, float]:
        """Joules of whole steps per token, by kind that has data."""
        return {kind: rate for kind in self.told if np.isfinite(rate := _ratio(self.joules[kind], self.tokens))}

    @property
    def watts(self) -> dict[str, float]:
        """Mean over the steps, by kind that has data."""
        return {kind: rate for kind in self.told if np.isfinite(rate := _ratio(self.joules[kind], self.seconds))}


def _ratio(joules: NDArray[np.float64], over: NDArray[np.float64]) -> float:
    """Ratio of the sums over the steps that have both."""
    told = np.isfinite(joules) & np.isfinite(over)
    whole = float(over[told].sum())
    return float(joules[told].sum()) / whole if whole > 0 else float("nan")


def analyse_energy(run: RunLog) -> Energy:
    """Analyse all steps that have a line."""
    kept, energy = run.metric(_KEPT), run.starts[-1].energy if run.starts else {}
    return Energy(
        run=run.name,
        problems=run.problems,
        steps=np.array(list(run.lines), np.int64),
        joules={kind: run.metric(f"energy/{kind}_joules") for kind in KINDS},
        rollout_joules={kind: run.metric(f"energy/rollout_{kind}_joules") for kind in KINDS},
        tokens=run.metric(_TOKENS) - np.where(np.isfinite(kept), kept, 0.0),
        seconds=run.metric(_SECONDS),
        reasons=tuple(f"{KINDS.get(kind, kind)}: {why}" for kind, why in energy.items() if why),
    )


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


def _not_told(found: Energy) -> str:
    if len(found.steps) == 0:
        return "metrics.jsonl has no line yet: no step is committed."
    why = f" ({'; '.join(found.reasons)})" if found.reasons else ""
    return f"Energy is unknown: no counter of this machine can be read{why}."
