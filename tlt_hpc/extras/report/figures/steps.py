"""Figures with the steps of a run on the axis: lengths, accept lengths, learning, throughput, several runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from tlt_hpc.extras.report.analysis.acceptance import AcceptLengths
from tlt_hpc.extras.report.analysis.comparison import RunComparison
from tlt_hpc.extras.report.analysis.learning import Learning, moving_mean, window_of
from tlt_hpc.extras.report.analysis.lengths import ResponseLengths
from tlt_hpc.extras.report.analysis.throughput import Throughput
from tlt_hpc.extras.report.analysis.time_kinds import Kind
from tlt_hpc.extras.report.figures.style import (
    colour,
    kind_patch,
    kind_style,
    label_panel,
    new_figure,
    panel_grid,
    plot_series,
    set_whole_number_ticks,
)
from tlt_hpc.look.columns import COLUMNS, COMPARED, SCORE


def draw_lengths(found: ResponseLengths) -> Figure:
    """Lengths and cut responses by step."""
    figure = new_figure(4.6)
    over, cut = figure.subplots(2, 1, height_ratios=(2.6, 1))
    series = {"longest": found.longest, "p99": found.p99, "p90": found.p90, "median": found.p50, "mean": found.mean}
    for index, (name, values) in enumerate(series.items()):
        plot_series(over, found.steps, values, index, name)
    if found.cap and found.longest.max(initial=0) > 0.6 * found.cap:
        over.axhline(found.cap, color=mpl.rcParams["xtick.color"], linewidth=1, linestyle="--", label="cap")
    over.set_ylim(bottom=0)
    set_whole_number_ticks(over)
    label_panel(over, "By step", y="tokens")
    over.legend(ncols=2)
    share = 100 * found.num_cut / np.maximum(found.num_responses, 1)
    _stack(cut, found.steps, [share], [{"facecolor": colour(1)}])
    label_panel(cut, "Ended at the cap", x="step", y="% of responses")
    return figure


def draw_acceptance(found: AcceptLengths) -> Figure:
    """Accept length by step and by live sequences, and the strategies that produced the tokens."""
    figure, (by_step, by_live, shares) = panel_grid(3, 2.9)
    plot_series(by_step, found.steps, found.accept_length, 0, "all responses", color=mpl.rcParams["text.color"])
    if np.isfinite(found.own_accept_length).any():
        plot_series(by_step, found.steps, found.own_accept_length, 4, "drafter's own drafts, chain of 4")
    set_whole_number_ticks(by_step)
    by_step.legend()
    label_panel(by_step, "Accept length by step", x="step", y="tokens per pass")
    for index, row in enumerate(found.by_bucket):
        known = np.flatnonzero(np.isfinite(row))
        plot_series(by_live, known, row[known], index)  # the legend below the figure names the strategies
    label_panel(by_live, "Accept length by live sequences", x="live sequences", y="tokens per pass")
    faces = [{"facecolor": colour(index)} for index in range(len(found.strategies))]
    counts = found.step_tokens.T
    _stack(shares, found.steps, 100 * counts / np.maximum(counts.sum(0), 1) if len(counts) else [], faces)
    shares.set_ylim(0, 100)
    label_panel(shares, "Tokens by strategy and step", x="step", y="% of tokens")
    by_live.set_xticks(range(found.tokens.shape[1]), found.bucket_names)
    by_live.set_xlim(-0.5, max(1, found.tokens.shape[1]) - 0.5)
    _legend(figure, [Patch(color=colour(i), label=name) for i, name in enumerate(found.strategies)], 6)
    return figure


def draw_learning(found: Learning) -> Figure:
    """A panel for each metric that has data; bold: mean of neighbouring steps, faint: single steps."""
    shown = [name for name in found.series if found.has(name)]
    if np.allclose(found.series["reward"], found.series[SCORE], equal_nan=True) and "reward" in shown:
        shown.remove("reward")
    evaluated = {name: v for name, v in found.evaluations.items() if np.isfinite(v).any() and "/acc/" in name}
    figure, places = panel_grid(len(shown) + bool(evaluated), 2.25)
    window = window_of(len(found.steps))
    for axes, name in zip(places, shown, strict=False):
        _plot_smoothed(axes, found.steps, found.series[name], window, 0)
        label_panel(axes, COLUMNS[name].heading, x="step", y=COLUMNS[name].unit)
    for index, (name, values) in enumerate(evaluated.items()):
        known = np.isfinite(values)
        plot_series(places[-1], found.steps[known], values[known], index, name.replace("/acc/", " "), marker="o")
        label_panel(places[-1], "Evaluations", x="step", y="share right")
        set_whole_number_ticks(places[-1])
        places[-1].legend()
    return figure


def draw_throughput(found: Throughput) -> Figure:
    """Seconds of a step by kind, and idle and harvested time."""
    figure = new_figure(6.2)
    seconds, waiting = figure.subplots(2, 1, height_ratios=(1.35, 1))
    _stack(seconds, found.steps, found.seconds.T, [kind_style(kind) for kind in found.kinds])
    label_panel(seconds, "Seconds of a step, mean of the ranks", x="step", y="seconds")
    kept = found.harvested_rank_seconds
    rest = np.maximum(found.idle_rank_seconds - kept, 0)
    _stack(waiting, found.steps, [kept, rest], [kind_style(Kind.TRAIN), kind_style(Kind.IDLE)])
    label_panel(waiting, "Idle: harvested, and not", x="step", y="rank-seconds")
    _legend(figure, [kind_patch(kind) for kind in found.kinds], 4)
    return figure


def draw_comparison(found: RunComparison) -> Figure:
    """A panel for each metric, with a line for each run."""
    shown = [name for name in COMPARED if any(np.isfinite(run.series[name]).any() for run in found.runs)]
    figure, places = panel_grid(len(shown), 2.3)
    window = min((window_of(len(run.steps)) for run in found.runs), default=1)  # the same for all runs
    for axes, name in zip(places, shown, strict=True):
        for index, run in enumerate(found.runs):
            _plot_smoothed(axes, run.steps, run.series[name], window, index)
        label_panel(axes, COLUMNS[name].heading, x="step", y=COLUMNS[name].unit)
    handles = [Patch(color=colour(index), label=run.name) for index, run in enumerate(found.runs)]
    _legend(figure, handles, 2)
    return figure


def _legend(figure: Figure, handles: list[Patch], num_columns: int) -> None:
    """One legend below the whole figure."""
    figure.legend(handles=handles, loc="outside lower left", ncols=num_columns)


def _stack(
    axes: Axes, steps: NDArray[np.int64], rows: Sequence[Any] | NDArray[np.float64], styles: Sequence[dict[str, Any]]
) -> None:
    """Stacked bars, one for each step; each row is one path, so that thousands of steps stay a small file."""
    if len(steps) == 0:
        return
    edges, bottom = np.append(steps - 0.5, steps[-1] + 0.5), np.zeros(len(steps))
    for row, style in zip(rows, styles, strict=True):
        top = bottom + np.nan_to_num(row)
        axes.stairs(top, edges, baseline=bottom, fill=True, **style)
        bottom = top
    axes.set_ylim(0, float(bottom.max()) * 1.05 or 1.0)
    axes.set_xlim(edges[0], edges[-1])
    set_whole_number_ticks(axes)


def _plot_smoothed(axes: Axes, steps: NDArray[np.int64], values: NDArray[np.float64], window: int, index: int) -> None:
    if window > 1:
        axes.plot(steps, values, color=colour(index), linewidth=0.8, alpha=0.35)
    plot_series(axes, steps, moving_mean(values, window), index, **({"marker": ""} if window > 1 else {}))
    set_whole_number_ticks(axes)
