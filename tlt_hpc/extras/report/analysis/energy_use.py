"""Energy that a run's GPUs used: joules, joules by token and mean watts, from metrics.jsonl."""

from __future__ import annotations

import numpy as np

from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.words import joules


def energy_in_words(run: RunLog) -> str:
    """The energy of all steps that have a line, of the GPUs that ranks use."""
    tokens = run.metric("perf/total_num_tokens") - np.nan_to_num(run.metric("rollout/kept_tokens"))
    values, taken = run.metric("energy/gpu_joules"), run.metric("timing_s/step")
    known = np.isfinite(values + tokens + taken)
    total, num_tokens, seconds = (float(each[known].sum()) for each in (values, tokens, taken))
    if min(total, num_tokens, seconds) > 0:
        return (
            f"The steps took {joules(total)} by GPUs ({joules(total / num_tokens)} a generated token, "
            f"{total / seconds:,.0f} W)."
        )
    why = run.starts[-1].energy.get("gpu") if run.starts else ""
    return f"Energy is unknown: no counter of a GPU can be read{f' ({why})' if why else ''}."
