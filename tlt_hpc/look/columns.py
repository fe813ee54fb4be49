"""The metrics that tables, comparisons and figures show, each described once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_MANY_DIGITS = 1e10


class Column(NamedTuple):
    """A metric of ``metrics.jsonl``: its name there, a heading and a unit for figures, and a number format."""

    metric: str
    heading: str
    unit: str
    form: str = ".2f"


SCORE = "score"
COLUMNS = {
    SCORE: Column("critic/score/mean", "Score", "mean of the responses", ".3f"),
    "reward": Column("critic/rewards/mean", "Reward that the update saw", "mean of the responses", ".3f"),
    "length": Column("response_length/mean", "Mean response", "tokens", ".0f"),
    "longest": Column("response_length/max", "Longest response", "tokens", ".0f"),
    "accept_length": Column("drafter/spec_decode/mean_acceptance_length", "Accept length", "tokens per pass"),
    "entropy": Column("actor/entropy", "Entropy of the policy", "nats per token", ".3f"),
    "update_kl": Column("actor/ppo_kl", "KL of the update (old to new policy)", "nats per token", ".3g"),
    "reference_kl": Column("actor/kl_loss", "KL to the reference", "nats per token", ".3g"),
    "mismatch_k3": Column("training/rollout_k3", "Rollout against trainer (k3)", "nats per token", ".3g"),
    "grad_norm": Column("actor/grad_norm", "Gradient norm", "before clipping", ".3g"),
    "idle": Column("rollout/idle_rank_seconds", "Idle", "rank-seconds"),
    "harvested": Column("rollout/harvested_rank_seconds", "Harvested", "rank-seconds"),
    "drafter": Column("drafter/version", "Drafter updates", "updates", ".0f"),
    "rollout": Column("rollout/seconds", "Rollout", "seconds"),
    "step": Column("timing_s/step", "Step", "seconds"),
}
LEARNING = (SCORE, "reward", "length", "entropy", "update_kl", "reference_kl", "mismatch_k3", "grad_norm")
"""Columns that show whether the policy learns."""
COMPARED = (SCORE, "length", "accept_length", "rollout", "step", "idle", "harvested")
"""Columns in which runs are compared."""
STEP_TABLE = {
    "reward": SCORE, "length": "length", "max": "longest", "accept": "accept_length", "idle s": "idle",
    "harvested s": "harvested", "drafter": "drafter", "rollout s": "rollout", "step s": "step",
}  # fmt: skip
"""Heading -> column of the progress table, which begins with the step."""


def step_cells(line: Mapping[str, Any]) -> tuple[str, ...]:
    """A step's row of the progress table, empty where a value is missing."""
    columns = [COLUMNS[name] for name in STEP_TABLE.values()]
    cells = [_format_number(line[one.metric], one.form) if one.metric in line else "" for one in columns]
    return (f"{int(line['training/global_step'])}", *cells)


def _format_number(value: float, form: str) -> str:
    """A formatted number; very large ones in scientific notation."""
    return f"{value:{form}}" if abs(value) < _MANY_DIGITS else f"{value:.1g}"
