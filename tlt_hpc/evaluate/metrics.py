"""Figures under verl's metric names, for the log of a run, and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlt_hpc.evaluate.figures import Estimate, Figures


def metrics_of(name: str, figures: Figures) -> dict[str, float]:
    """One data set's lines: accuracies under ``val-core/NAME/acc``, the rest under ``val-aux/NAME``.

    ``mean@N`` and ``maj@N/mean`` are verl's; ``pass@k`` is unbiased where verl's ``best@k`` draws with replacement.
    """
    n = figures.num_samples
    accuracies = {
        "greedy": figures.greedy,
        f"mean@{n}": figures.mean,
        **{f"pass@{k}": value for k, value in figures.pass_at.items()},
        f"maj@{n}/mean": figures.majority,
    }
    found = {name: value for name, value in accuracies.items() if value is not None}
    core = {f"val-core/{name}/acc/{what}": value.value for what, value in found.items()}
    errors = {f"val-aux/{name}/acc/{what}/stderr": v.error for what, v in found.items() if v.error is not None}
    rest = {
        "reward/mean": figures.reward.value,
        "response_length/mean": figures.mean_length,
        "response_length/clip_ratio": figures.cut_share,
    }
    if figures.unanswered_share is not None:
        rest["unanswered"] = figures.unanswered_share
    return {**core, **errors, **{f"val-aux/{name}/{what}": value for what, value in rest.items()}}


def to_json(figures: Figures) -> dict[str, Any]:
    """Plain types; estimates as ``{"value", "standard_error"}``."""
    tree: dict[str, Any] = {}
    for name, value in vars(figures).items():
        if isinstance(value, Mapping):
            tree[name] = {str(k): _estimate(each) for k, each in value.items()}
        else:
            tree[name] = _estimate(value) if isinstance(value, Estimate) else value
    return tree


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    return {"value": estimate.value, "standard_error": estimate.error}
