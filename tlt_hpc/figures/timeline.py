"""The picture of a step: a lane a rank, and how many sequences are left; idle, harvested and tail at a glance."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from tlt_hpc.analysis.kinds import KINDS, Kind
from tlt_hpc.analysis.result import count, seconds, share
from tlt_hpc.analysis.timeline import Lane, Timeline
from tlt_hpc.figures.style import HATCHES, legend_below, new_figure, panel, theme, title

_MOST_TOLD = 24
"""Ranks that have room for their own figures beside their lane."""
_VISIBLE = 1 / 1500
"""Of the time shown: a kind with less of it on all ranks together is not in the legend."""
_BEFORE = 0.15
"""Of the time shown, what the save and evaluation before the rollout may take."""


def draw_timeline(found: Timeline) -> Figure:
    """Lanes over the sequences that are left; both on one axis of time."""
    num_lanes = len(found.lanes)
    lane_inches = min(0.42, max(0.06, 9.0 / num_lanes))
    has_live = len(found.live) > 0
    figure = new_figure(1.75 + max(0.8, lane_inches * num_lanes) + (1.25 if has_live else 0.0))
    heights = [max(0.8, lane_inches * num_lanes), *([1.1] if has_live else [])]
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    left = _left_edge(found)
    _draw_lanes(panels[0], found, left)
    if has_live:
        _draw_live(panels[1], found)
    panels[-1].set_xlabel("seconds since the rollout began")
    for axes in panels:
        _shade(axes, found)
    panels[0].set_xlim(left, _right_edge(found))
    _name_tails(panels[0], found)
    title(figure, f"Step {found.step}: what each rank did when", _below(found))
    shown = _kinds_shown(found)
    legend_below(figure, [_patch(kind) for kind in shown], 5)
    return figure


def _below(found: Timeline) -> str:
    idle = sum(lane.idle_seconds for lane in found.lanes)
    harvested = sum(lane.harvested_seconds for lane in found.lanes)
    told = f"{found.run}, {count(found.num_ranks, 'rank')}; rollout {seconds(found.rollout_seconds)}"
    if len(found.lanes) == 1:
        return told + "; one rank waits for nobody"
    told += f", in which ranks waited for {seconds(idle)} together"
    return told + (f"; {share(harvested, idle)} of that harvested for the drafter" if harvested else "; none harvested")


def _draw_lanes(axes: Axes, found: Timeline, left: float) -> None:
    colours = theme().kinds
    for place, lane in enumerate(found.lanes):
        for index in np.unique(lane.pieces.kinds):
            kind = KINDS[index]
            own = lane.pieces.kinds == index
            starts, ends = lane.pieces.starts[own], lane.pieces.ends[own]
            bars = list(zip(starts.tolist(), (ends - starts).tolist(), strict=True))
            edges: dict[str, Any] = (
                {"hatch": HATCHES[kind], "edgecolor": theme().faint} if kind in HATCHES else {"edgecolor": "none"}
            )
            axes.broken_barh(bars, (place - 0.4, 0.8), linewidth=0, zorder=2, **look)
        if len(found.lanes) <= _MOST_TOLD:
            axes.text(1.008, place, _told(lane), transform=axes.get_yaxis_transform(), va="center", fontsize=7.5)
    axes.set_ylim(len(found.lanes) - 0.45, -0.55)
    axes.grid(visible=False)
    if len(found.lanes) <= _MOST_TOLD:
        axes.set_yticks(range(len(found.lanes)), [f"rank {lane.rank}" for lane in found.lanes])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("rank")
    axes.tick_params(axis="y", length=0)
    first = min((float(lane.pieces.starts[0]) for lane in found.lanes if len(lane.pieces)), default=0.0)
    if first < left:
        axes.text(
            0.002, 1.01, f"\u2190 from {first:,.0f} s", transform=axes.transAxes, fontsize=7.5, color=theme().faint
        )


def _told(lane: Lane) -> str:
    if lane.harvested_seconds:
        return f"idle {seconds(lane.idle_seconds)}\nharvested {seconds(lane.harvested_seconds)}"
    return f"idle {seconds(lane.idle_seconds)}"


def _draw_live(axes: Axes, found: Timeline) -> None:
    axes.fill_between(found.live_seconds, found.live, step="post", color=theme().kinds[Kind.DECODE], alpha=0.55, lw=0)
    axes.plot(found.live_seconds, found.live, drawstyle="steps-post", color=theme().ink, linewidth=1.1)
    axes.set_ylim(0, max(1, found.live.max()) * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    panel(axes, "Sequences still being generated, all ranks", y="sequences")


def _shade(axes: Axes, found: Timeline) -> None:
    """The tail behind the data, and the release at its end."""
    for start, end in found.tails:
        axes.axvspan(start, end, color=theme().tail, linewidth=0, zorder=0)
        axes.axvline(end, color=theme().faint, linewidth=0.9, linestyle=(0, (3, 2)), zorder=3)


def _name_tails(axes: Axes, found: Timeline) -> None:
    low, high = axes.get_xlim()
    for number, (start, end) in enumerate(found.tails):
        middle = min(max((start + end) / 2, low + 0.07 * (high - low)), high - 0.07 * (high - low))
        name = f"tail {seconds(end - start)}" if len(found.tails) < 4 else "tail" if number == 0 else ""
        place = axes.get_xaxis_transform()
        axes.text(middle, 1.02, name, transform=place, ha="center", va="bottom", fontsize=8, fontweight="bold")


def _kinds_shown(found: Timeline) -> list[Kind]:
    extent = _right_edge(found) - _left_edge(found)
    sums = {kind: max((lane.seconds.get(kind, 0.0) for lane in found.lanes), default=0.0) for kind in KINDS}
    return [kind for kind in KINDS if sums[kind] > extent * _VISIBLE]


def _left_edge(found: Timeline) -> float:
    first = min((float(lane.pieces.starts[0]) for lane in found.lanes if len(lane.pieces)), default=0.0)
    return max(min(first, 0.0), -_BEFORE * _right_edge(found))


def _right_edge(found: Timeline) -> float:
    return max((float(lane.pieces.ends[-1]) for lane in found.lanes if len(lane.pieces)), default=1.0)


def _patch(kind: Kind) -> Patch:
    edge = theme().faint if kind in HATCHES else theme().kinds[kind]
    return Patch(facecolor=theme().kinds[kind], hatch=HATCHES.get(kind), edgecolor=edge, linewidth=0.5, label=str(kind))
