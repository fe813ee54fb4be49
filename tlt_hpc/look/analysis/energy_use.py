"""Energy that a run used: joules by step and by token, and mean watts, from metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.look.analysis.base import Analysis
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.words import joules, listed

KINDS = {"gpu": "GPUs", "cpu": "processors"}
"""Kind of counter -> in words."""


@dataclass(frozen=True)
class EnergyUse(Analysis):
    """By kind of counter that the metrics have: joules of each step, [S], and ratios over the steps that have them.

    GPUs: those that ranks use. Processors (and memory, where it has counters): those of whole nodes.
    """

    joules: dict[str, NDArray[np.float64]]
    joules_a_token: dict[str, float]
    watts: dict[str, float]
    reasons: tuple[str, ...]
    """Why counters could not be read when the run was last started."""

    @property
    def has_data(self) -> bool:
        return bool(self.joules)

    @property
    def verdict(self) -> str:
        if not self.joules:
            why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
            return f"Energy is unknown: no counter of this machine can be read{why}."
        parts = []
        for kind, values in self.joules.items():
            token, watts = self.joules_a_token[kind], self.watts[kind]
            ratios = f" ({joules(token)} a generated token, {watts:,.0f} W)" if np.isfinite(token + watts) else ""
            parts.append(f"{joules(float(np.nansum(values)))} by {KINDS[kind]}{ratios}")
        shared = " Processors are those of whole nodes, including other jobs there." if "cpu" in self.joules else ""
        return f"The steps took {listed(parts)}.{shared}"


def analyse_energy(run: RunLog) -> EnergyUse:
    """Analyse all steps that have a line."""
    tokens = run.metric("perf/total_num_tokens") - np.nan_to_num(run.metric("rollout/kept_tokens"))
    values = {kind: run.metric(f"energy/{kind}_joules") for kind in KINDS}
    values = {kind: each for kind, each in values.items() if np.isfinite(each).any()}
    lack = run.starts[-1].energy if run.starts else {}
    return EnergyUse(
        run=run.name,
        problems=run.problems,
        joules=values,
        joules_a_token={kind: _ratio(each, tokens) for kind, each in values.items()},
        watts={kind: _ratio(each, run.metric("timing_s/step")) for kind, each in values.items()},
        reasons=tuple(f"{KINDS.get(kind, kind)}: {why}" for kind, why in lack.items() if why),
    )


def _ratio(values: NDArray[np.float64], over: NDArray[np.float64]) -> float:
    """Ratio of the sums over the steps that have both; NaN if there is none."""
    both = np.isfinite(values + over)
    whole = float(over[both].sum())
    return float(values[both].sum()) / whole if whole > 0 else float("nan")
