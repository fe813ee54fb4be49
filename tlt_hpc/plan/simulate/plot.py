"""The picture of a simulation: where a step's seconds go, and the gain, by number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed, none is opened

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from tlt_hpc.plan.simulate.workload import NodesRow

_BUSY, _HARVESTED, _IDLE, _UPDATE, _GAIN = "#0072b2", "#009e73", "#cccccc", "#e69f00", "#222222"
"""Okabe and Ito's colours, which everyone can tell apart."""


def plot(name: str, rows: Sequence[NodesRow], path: Path) -> None:
    """Write the picture, as PNG or SVG by the file's suffix."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.0, 4.2), layout="constrained", width_ratios=(3, 2))
    _seconds(left, rows)
    _gain(right, rows)
    figure.suptitle(f"{name}: simulated, not run", x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _seconds(axes: Axes, rows: Sequence[NodesRow]) -> None:
    """Mean seconds of a rank in a step, stacked."""
    at = range(len(rows))
    idle = [row.idle_share * row.step_seconds for row in rows]
    parts = (
        ("decoding", _BUSY, "", [row.rollout_seconds - wait for row, wait in zip(rows, idle, strict=True)]),
        (
            "waiting, training the drafter",
            _HARVESTED,
            "//",
            [row.harvested_share * w for row, w in zip(rows, idle, strict=True)],
        ),
        ("waiting, idle", _IDLE, "", [(1 - row.harvested_share) * w for row, w in zip(rows, idle, strict=True)]),
        ("reward, update, save", _UPDATE, "..", [row.step_seconds - row.rollout_seconds for row in rows]),
    )
    bottom = [0.0] * len(rows)
    for label, colour, hatch, values in parts:
        axes.bar(at, values, 0.68, bottom, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5, label=label)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    for place, row in enumerate(rows):
        axes.annotate(
            _short(row.step_seconds),
            (place, bottom[place]),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axes.set_title("A step, mean over the ranks", loc="left", fontsize=10)
    axes.set_ylabel("seconds")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, fontsize=9)
    _nodes(axes, rows)


def _gain(axes: Axes, rows: Sequence[NodesRow]) -> None:
    at = range(len(rows))
    axes.plot(at, [row.gain for row in rows], color=_GAIN, marker="o", linewidth=1.8)
    for place, row in enumerate(rows):
        axes.annotate(f"{row.gain:.2f}", (place, row.gain), (0, 7), textcoords="offset points", ha="center", fontsize=9)
    axes.axhline(1.0, color=_IDLE, linewidth=1.0, zorder=0)
    axes.set_title("Gain: plain step over this one", loc="left", fontsize=10)
    axes.set_ylabel("times as fast")
    axes.set_ylim(bottom=min(0.9, min(row.gain for row in rows) - 0.1), top=max(row.gain for row in rows) * 1.1)
    _nodes(axes, rows)


def _nodes(axes: Axes, rows: Sequence[NodesRow]) -> None:
    axes.set_xticks(range(len(rows)), [str(row.nodes) for row in rows])
    axes.set_xlabel(f"nodes of {rows[0].ranks // rows[0].nodes} ranks")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.08, y=0.12)


def _short(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
