"""Energy that a run used: joules, joules by token and mean watts, from metrics.jsonl."""

from __future__ import annotations

import numpy as np

from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.words import joules, listed

_KINDS = {"gpu": "GPUs", "cpu": "processors, of whole nodes, including other jobs there,"}
"""Kind of counter -> in words."""


def energy_in_words(run: RunLog) -> str:
    """The energy of all steps that have a line: of the GPUs that ranks use, and of their nodes' processors."""
    tokens = run.metric("perf/total_num_tokens") - np.nan_to_num(run.metric("rollout/kept_tokens"))
    taken, parts = run.metric("timing_s/step"), []
    for kind, words in _KINDS.items():
        values = run.metric(f"energy/{kind}_joules")
        known = np.isfinite(values + tokens + taken)
        total = float(values[known].sum())
        if total > 0 and (tokens[known].sum() > 0 < taken[known].sum()):
            ratios = f"{joules(total / tokens[known].sum())} a generated token, {total / taken[known].sum():,.0f} W"
            parts.append(f"{joules(total)} by {words} ({ratios})")
    if parts:
        return f"The steps took {listed(parts)}."
    lacking = [f"{kind}: {why}" for kind, why in (run.starts[-1].energy if run.starts else {}).items() if why]
    why = f" ({'; '.join(lacking)})" if lacking else ""
    return f"Energy is unknown: no counter of this machine can be read{why}."
