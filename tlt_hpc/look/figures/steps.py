"""Pictures with the steps of a run along the axis: lengths, acceptance, learning, throughput, several runs.

A run of very many steps is thinned to means of neighbouring steps, so that a picture stays small.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, PercentFormatter
from numpy.typing import NDArray

from tlt_hpc.look.analysis.acceptance import Acceptance
from tlt_hpc.look.analysis.comparison import HARVESTED, IDLE, SHOWN, Comparison
from tlt_hpc.look.analysis.kinds import Kind
from tlt_hpc.look.analysis.learning import Learning, moving_mean, window_of
from tlt_hpc.look.analysis.lengths import Lengths
from tlt_hpc.look.analysis.result import count, span_of
from tlt_hpc.look.analysis.throughput import Throughput
from tlt_hpc.look.figures.style import (
    HATCHES,
    below_each_other,
    colour,
    label_of,
    layout,
    legend_above,
    legend_below,
    line,
    new_figure,
    panel,
    rectangles,
    theme,
    title,
    whole_steps,
)

_MOST_BARS = 120


def draw_lengths(found: Lengths) -> Figure:
    """Lengths and cut responses over the steps, and the distribution over all of them."""
    if layout().is_narrow:
        figure, (over, cut, whole) = below_each_other((2.0, 0.8, 1.7))
    else:
        figure = new_figure(4.9)
        grid = figure.add_gridspec(2, 2, width_ratios=(1.5, 1), height_ratios=(2.6, 1))
        over, cut = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0])
        whole = figure.add_subplot(grid[:, 1])
    series = {"longest": found.longest, "p99": found.p99, "p90": found.p90, "median": found.p50}
    for index, (name, values) in enumerate(series.items()):
        line(over, found.steps, values, index, name)
    line(over, found.steps, found.mean, 4, "mean")
    top = float(found.longest.max()) if len(found.steps) else 1.0
    if found.cap and top > 0.6 * found.cap:
        over.axhline(found.cap, color=theme().faint, linewidth=1, linestyle=(0, (4, 3)), label="cap")
        top = max(top, found.cap)
    over.set_ylim(0, top * 1.05)
    panel(over, "By step", y="tokens")
    legend_above(over, 6, narrow=3)
    _bars(cut, found.steps, [(100 * found.num_cut / np.maximum(found.num_responses, 1), colour(1), None)])
    panel(cut, "Ended at the cap", x="step", y="% of responses")
    cut.set_ylim(0, max(1.0, cut.get_ylim()[1]))
    if len(found.edges):
        shares = 100 * found.histogram / found.histogram.sum()
        whole.stairs(shares, found.edges, fill=True, color=colour(0), alpha=0.75)
        whole.set_xscale("log")
        whole.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        whole.xaxis.set_minor_formatter("")
        whole.set_ylim(0, shares.max() * 1.05)
    panel(whole, "All responses, by length", x="tokens (logarithmic)", y="% of responses")
    title(figure, "How long responses are", _of(found.run, found.steps, int(found.num_responses.sum()), "response"))
    return figure


def draw_acceptance(found: Acceptance) -> Figure:
    """Accept length over steps and by live sequences, and which strategies gave the tokens."""
    if layout().is_narrow:
        figure, (by_step, by_live, step_shares, live_shares) = below_each_other((1.7, 1.7, 1.5, 1.5))
    else:
        figure = new_figure(6.4)
        (by_step, by_live), (step_shares, live_shares) = figure.subplots(2, 2)
    line(
        by_step, found.steps, found.accept_length, 0, "all responses", color=theme().ink
    )  # colours are strategies' here
    if np.isfinite(found.own_accept_length).any():
        line(by_step, found.steps, found.own_accept_length, 1, "drafter's own drafts, chain of 4", color=theme().faint)
    _from_one(by_step, found.accept_length, found.own_accept_length)
    panel(by_step, "Accept length by step", y="tokens per pass")
    legend_above(by_step, 2, narrow=2)
    _updates(by_step, found)
    names = found.bucket_names()
    table = found.by_bucket
    for index in range(len(found.strategies)):
        told = np.flatnonzero(np.isfinite(table[index]))
        if len(told):
            line(by_live, told, table[index][told], index, found.strategies[index])
    _from_one(by_live, table)
    panel(by_live, "Accept length by live sequences", y="tokens per pass")
    legend_above(by_live, 4, narrow=3)
    by_live.set_xticks(range(len(names)), names)
    by_live.set_xlim(-0.5, max(1, len(names)) - 0.5)
    _stacked_shares(step_shares, found.steps, found.step_tokens.T.astype(float))
    panel(step_shares, "Tokens by strategy and step", x="step", y="% of tokens")
    _stacked_shares(live_shares, np.arange(len(names)), found.tokens.astype(float))
    live_shares.set_xticks(range(len(names)), names)
    panel(live_shares, "Tokens by strategy and live sequences", x="live sequences", y="% of tokens")
    legend_below(figure, [Patch(color=colour(i), label=name) for i, name in enumerate(found.strategies)], 8, 3)
    title(figure, "What speculation gives", f"{found.run}, {_steps(found.steps)}")
    return figure


def draw_learning(found: Learning) -> Figure:
    """A panel a figure; those of which nothing is told are left out."""
    panels = [(name, *_LEARNING[name]) for name in _LEARNING if found.has(name)]
    panels = [each for each in panels if each[0] != "reward" or not _alike(found, "reward", "score")]
    evaluated = {name: v for name, v in found.evaluations.items() if np.isfinite(v).any() and "/acc/" in name}
    num_panels = max(1, len(panels) + bool(evaluated))
    num_columns = 1 if layout().is_narrow else min(3, num_panels)
    num_rows = -(-num_panels // num_columns)
    figure = new_figure(0.9 + 2.25 * num_rows + 0.3 * bool(evaluated))
    places = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    window = window_of(len(found.steps))
    for axes, (name, heading, unit) in zip(places, panels, strict=False):
        _smoothed(axes, found.steps, found.series[name], window)
        panel(axes, heading, x="step", y=unit)
    if evaluated:
        axes = places[len(panels)]
        for index, (name, values) in enumerate(evaluated.items()):
            told = np.isfinite(values)
            line(axes, found.steps[told], values[told], index, name.replace("/acc/", " "), marker="o")
        panel(axes, "Evaluations", x="step", y="share right")
        legend_above(axes, 1)
        whole_steps(axes)
    for axes in places[num_panels if panels or evaluated else 0 :]:
        axes.set_visible(False)
    below = f"{found.run}, {_steps(found.steps)}"
    if window > 1:
        below += f"; bold: mean of {window} neighbouring steps, faint: single steps"
    title(figure, "How the policy learns", below)
    return figure


_LEARNING = {
    "score": ("Score of the step's responses", "mean score"),
    "reward": ("Reward that the update saw", "mean reward"),
    "length": ("Mean response", "tokens"),
    "entropy": ("Entropy of the policy", "nats per token"),
    "update_kl": ("KL of the update (old to new policy)", "nats per token"),
    "reference_kl": ("KL to the reference", "nats per token"),
    "mismatch_k3": ("Rollout against trainer (k3)", "nats per token"),
    "grad_norm": ("Gradient norm", "before clipping"),
}


def draw_throughput(found: Throughput) -> Figure:
    """Seconds of a step by kind, what waiting there was and what was harvested of it, and tokens a second."""
    if layout().is_narrow:
        figure, (shares, waiting, rates) = below_each_other((2.6, 1.7, 1.5))
    else:
        figure = new_figure(6.2)
        grid = figure.add_gridspec(2, 2, height_ratios=(1.35, 1), width_ratios=(1.25, 1))
        shares, waiting = figure.add_subplot(grid[0, :]), figure.add_subplot(grid[1, 0])
        rates = figure.add_subplot(grid[1, 1])
    colours = theme().kinds
    _bars(shares, found.steps, [(found.seconds[:, i], colours[k], HATCHES.get(k)) for i, k in enumerate(found.kinds)])
    panel(shares, "Seconds of a step, mean of the ranks", x="step", y="seconds")
    rest = np.maximum(found.idle_rank_seconds - found.harvested_rank_seconds, 0)
    kept = found.harvested_rank_seconds
    _bars(waiting, found.steps, [(kept, colours[Kind.TRAIN], None), (rest, colours[Kind.IDLE], HATCHES[Kind.IDLE])])
    panel(waiting, "Waiting: harvested, and not", x="step", y="rank-seconds")
    _rates(rates, found.rates)
    legend_below(figure, [_patch(kind) for kind in found.kinds], 4)
    title(figure, "Where the seconds go", f"{found.run}, {_steps(found.steps)}, {_ranks(found)}")
    return figure


def draw_comparison(found: Comparison) -> Figure:
    """A panel a figure, a line a run."""
    shown = [name for name in SHOWN if any(np.isfinite(run.series[name]).any() for run in found.runs)]
    num_panels = max(1, len(shown))
    num_columns = 1 if layout().is_narrow else min(3, num_panels)
    num_rows = -(-num_panels // num_columns)
    figure = new_figure(1.2 + 2.3 * num_rows)
    places = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    window = min((window_of(len(run.steps)) for run in found.runs), default=1)  # alike, so that like curves look alike
    for axes, name in zip(places, shown, strict=False):
        for index, run in enumerate(found.runs):
            if window > 1:
                axes.plot(run.steps, run.series[name], color=colour(index), linewidth=0.8, alpha=0.35)
            bare = {"marker": ""} if window > 1 else {}
            line(axes, run.steps, moving_mean(run.series[name], window), index, run.name, **bare)
            if name == IDLE:
                harvested = moving_mean(run.series[HARVESTED], window)
                axes.fill_between(run.steps, harvested, color=colour(index), alpha=0.25, linewidth=0)
        heading, unit, from_zero = SHOWN[name]
        panel(axes, heading, x="step", y=unit)
        whole_steps(axes)
        if from_zero:
            axes.set_ylim(bottom=0)
    for axes in places[len(shown) :]:
        axes.set_visible(False)
    if shown:
        legend_below(figure, [h for h in places[0].get_lines() if not str(h.get_label()).startswith("_")], 4)
    title(figure, "Runs side by side", found.tokens_in_words)
    return figure


# -- what they share ------------------------------------------------------------------------------------------------


def _bars(axes: Axes, steps: NDArray[np.int64], rows: list[tuple[NDArray[np.float64], str, str | None]]) -> None:
    """Bars on top of each other, one a step; of very many steps, means of neighbours."""
    if len(steps) == 0:
        return
    size = -(-len(steps) // _MOST_BARS)
    edges = np.arange(0, len(steps), size)
    counts = np.diff(np.append(edges, len(steps)))
    places = np.add.reduceat(steps, edges) / counts
    width = (0.8 if len(places) <= 40 else 1.0) * (float(np.median(np.diff(places))) if len(places) > 1 else 1.0)
    bottom = np.zeros(len(places))
    for values, face, hatch in rows:
        heights = np.add.reduceat(np.nan_to_num(values), edges) / counts
        thin = 0.4 if len(places) <= 40 else 0.0  # parts its neighbours where colours are alike in grey
        edge = theme().faint if hatch else theme().background
        rectangles(axes, places - width / 2, bottom, width, heights, face, hatch, edge, thin)
        bottom += heights
    axes.set_ylim(0, max(float(bottom.max()) * 1.05, 1e-9))
    axes.set_xlim(places[0] - 0.6 * width - 0.1, places[-1] + 0.6 * width + 0.1)
    whole_steps(axes)


def _stacked_shares(axes: Axes, places: NDArray[np.int64], rows: NDArray[np.float64]) -> None:
    whole = rows.sum(0) if len(rows) else np.empty(0)
    _bars(axes, places, [(100 * row / np.maximum(whole, 1), colour(i), None) for i, row in enumerate(rows)])
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_formatter(PercentFormatter(decimals=0, symbol=""))


def _smoothed(axes: Axes, steps: NDArray[np.int64], values: NDArray[np.float64], window: int) -> None:
    if window > 1:
        axes.plot(steps, values, color=colour(0), linewidth=0.8, alpha=0.35)
    line(axes, steps, moving_mean(values, window), 0, **({"marker": ""} if window > 1 else {}))
    whole_steps(axes)


def _rates(axes: Axes, rates: dict[str, float]) -> None:
    names = list(rates)
    faces = [theme().kinds[kind] if (kind := _kind(name)) else colour(4) for name in names]
    axes.barh(range(len(names)), list(rates.values()), 0.65, color=faces)
    for place, value in enumerate(rates.values()):
        axes.annotate(f"{value:,.0f}", (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, max(rates.values(), default=1.0) * 1.22)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.locator_params(axis="x", nbins=4)
    panel(axes, "Tokens a second, all steps", x="tokens a second")


_SHORT = {
    str(Kind.PREFILL): "prefill, a rank",
    str(Kind.DECODE): "plain, a rank",
    str(Kind.SPECULATE): "speculative, a rank",
}


def _short(name: str) -> str:
    text = _SHORT.get(name, name)
    return text.partition(",")[0] if layout().is_narrow else text


def _kind(name: str) -> Kind | None:
    return next((kind for kind in Kind if str(kind) == name), None)


def _from_one(axes: Axes, *values: NDArray[np.float64]) -> None:
    """An accept length cannot be below one token a pass."""
    told = np.concatenate([each[np.isfinite(each)] for each in values]) if values else np.empty(0)
    axes.set_ylim(min(1.0, float(told.min(initial=1.0))) - 0.05, max(1.5, float(told.max(initial=1.0)) * 1.06))
    whole_steps(axes)


def _updates(axes: Axes, found: Acceptance) -> None:
    """The drafter's updates so far, in place of the steps' label."""
    told = found.drafter_version[np.isfinite(found.drafter_version)]
    axes.set_xlabel(f"step ({told[-1]:,.0f} drafter updates by the last)" if len(told) else "step")


def _alike(found: Learning, a: str, b: str) -> bool:
    return bool(np.allclose(found.series[a], found.series[b], equal_nan=True))


def _patch(kind: Kind) -> Patch:
    edge = theme().faint if kind in HATCHES else theme().kinds[kind]
    return Patch(
        facecolor=theme().kinds[kind], hatch=HATCHES.get(kind), edgecolor=edge, linewidth=0.5, label=label_of(kind)
    )


def _steps(steps: NDArray[np.int64]) -> str:
    return span_of(steps) if len(steps) else "no step yet"


def _of(run: str, steps: NDArray[np.int64], number: int, noun: str) -> str:
    return f"{run}, {_steps(steps)}, {count(number, noun)}"


def _ranks(found: Throughput) -> str:
    numbers = sorted(set(found.num_ranks.tolist()))
    if len(numbers) > 1:
        return f"{numbers[0]} to {numbers[-1]} ranks"
    return count(numbers[0], "rank") if numbers else "no rank"
