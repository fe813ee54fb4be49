"""The picture of an ablation, from its JSON: accept length and rollout seconds over the steps, by arm."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed, none is opened

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

_STYLES: dict[str, tuple[str, str]] = {
    "plain": ("#9a9a9a", "-"),
    "ngram": ("#c9803a", "-"),
    "frozen": ("#1b6ca8", "-"),
    "tail": ("#b03a2e", "-"),
    "tail-random": ("#3a8f5c", "-"),
}
_MAX_SMOOTHED = 5
"""Steps of a rolling median, where there are enough of them."""


def plot(tree: dict[str, Any], path: Path) -> list[Path]:
    """Write the picture as PNG to ``path`` and as SVG beside it; returns both paths."""
    span = min(_MAX_SMOOTHED, 1 + 2 * (tree["num_steps"] // 6))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.0, 4.4), layout="constrained", sharex=True)
    _draw(left, tree, "own_accept_length", span)
    _draw(right, tree, "rollout_seconds", span)
    depth = tree["own_depth"]
    left.set_title(f"Accept length of the drafter's own rounds (chain of {depth})", loc="left", fontsize=10)
    left.set_ylabel("tokens per target pass and sequence")
    right.set_title("Rollout seconds", loc="left", fontsize=10)
    right.set_ylabel("seconds a step")
    right.set_ylim(bottom=0)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    note = f"rolling median of {span} steps, single steps faint" if span > 1 else "single steps"
    figure.supxlabel(f"step of reinforcement learning ({note})", fontsize=9)
    paths = [path, path.with_suffix(".svg")]
    for each in paths:
        figure.savefig(each, dpi=150)
    plt.close(figure)
    return paths


def _draw(axes: Axes, tree: dict[str, Any], name: str, span: int) -> None:
    """A line an arm; steps without the figure are left out."""
    for arm, figures in tree["arms"].items():
        colour, dashes = _STYLES[arm]
        points = [(i + 1, step[name]) for i, step in enumerate(figures["steps"]) if step[name] is not None]
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        if span > 1:
            axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.25)
        axes.plot(steps, rolling_median(values, span), color=colour, linestyle=dashes, linewidth=1.8, label=arm)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def rolling_median(values: Sequence[float], span: int) -> list[float]:
    """The median of each value and its neighbours, ``span`` of them where there are as many."""
    half = span // 2
    return [statistics.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
