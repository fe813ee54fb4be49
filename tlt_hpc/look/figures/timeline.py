"""The picture of a step: a lane a rank, and how many sequences are left; idle, harvested and tail at a glance."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from tlt_hpc.look.analysis.kinds import KINDS, Kind
from tlt_hpc.look.analysis.result import count, seconds, share
from tlt_hpc.look.analysis.timeline import Lane, Timeline
from tlt_hpc.look.figures.style import (
    HATCHES,
    label_of,
    layout,
    legend_below,
    new_figure,
    panel,
    rectangles,
    theme,
    title,
)

_MOST_TOLD = 24
"""Ranks that have room for their own figures beside their lane."""
_VISIBLE = 1 / 1500
"""Of the time shown: a kind with less of it on all ranks together is not in the legend."""
_ENLARGED = 0.7
"""Of the time shown: a rollout that is less of it is shown enlarged, too."""
_BEFORE = 0.15
"""Of the time shown, what the save and evaluation before the rollout may take."""


def draw_timeline(found: Timeline) -> Figure:
    """Lanes over the sequences that are left, on one axis of time.

    Where a step is much more than its rollout, the whole of it comes first, and then its rollout alone, enlarged.
    """
    lanes = max(0.8, min(0.42, max(0.04, 6.0 / len(found.lanes))) * len(found.lanes))
    has_live = len(found.live) > 0
    left, right, released = _left_edge(found), _right_edge(found), _released(found)
    is_enlarged = released < _ENLARGED * (right - left)
    heights = [*([max(0.6, min(2.4, 0.6 * lanes))] if is_enlarged else []), lanes, *([1.1] if has_live else [])]
    figure = new_figure(1.45 + sum(heights) + 0.5 * (len(heights) - 1))
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    main = figure.add_subplot(grid[int(is_enlarged)])
    if is_enlarged:
        whole = figure.add_subplot(grid[0])
        _draw_lanes(whole, found, tells=False)
        whole.set_xlim(left, right)
        panel(whole, "The whole step", x="seconds since the rollout began")
        _shade(whole, found)
        left, right = -0.01 * released, 1.01 * released
        panel(main, "Its rollout, enlarged")
    _draw_lanes(main, found, tells=True)
    main.set_xlim(left, right)
    _shade(main, found)
    _name_tails(main, found)
    last = main
    if has_live:
        last = figure.add_subplot(grid[-1], sharex=main)
        main.tick_params(axis="x", labelbottom=False)
        _draw_live(last, found)
        _shade(last, found)
    last.set_xlabel("seconds since the rollout began")
    title(figure, f"Step {found.step}: what each rank did when", _below(found))
    blank = Patch(facecolor="none", edgecolor=theme().faint, linewidth=0.5, label="blank: between passes")
    legend_below(figure, [*(_patch(kind) for kind in _kinds_shown(found)), blank], 5)
    return figure


def _below(found: Timeline) -> str:
    idle = sum(lane.idle_seconds for lane in found.lanes)
    harvested = sum(lane.harvested_seconds for lane in found.lanes)
    told = f"{found.run}, {count(found.num_ranks, 'rank')}; rollout {seconds(found.rollout_seconds)}"
    if _first(found) < _left_edge(found):
        told = f"{told} (its axis leaves out what was before, from {_first(found):,.0f} s on)"
    if len(found.lanes) == 1:
        return told + "; one rank waits for nobody"
    told += f", in which ranks waited for {seconds(idle)} together"
    return told + (f"; {share(harvested, idle)} of that harvested for the drafter" if harvested else "; none harvested")


def _draw_lanes(axes: Axes, found: Timeline, tells: bool) -> None:
    for place, lane in enumerate(found.lanes):
        for index in np.unique(lane.pieces.kinds):
            kind = KINDS[index]
            own = lane.pieces.kinds == index
            starts, ends = lane.pieces.starts[own], lane.pieces.ends[own]
            rectangles(
                axes,
                starts,
                place - 0.4,
                ends - starts,
                0.8,
                theme().kinds[kind],
                HATCHES.get(kind),
                theme().faint,
                0.0,
            )
        if tells and len(found.lanes) <= _MOST_TOLD and not layout().is_narrow:
            axes.text(1.008, place, _told(lane), transform=axes.get_yaxis_transform(), va="center", fontsize=7.5)
    axes.set_ylim(len(found.lanes) - 0.45, -0.55)
    axes.grid(visible=False)
    if len(found.lanes) <= _MOST_TOLD:
        axes.set_yticks(range(len(found.lanes)), [f"rank {lane.rank}" for lane in found.lanes])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("rank")
    axes.tick_params(axis="y", length=0)


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
    return max(min(_first(found), 0.0), -_BEFORE * _right_edge(found))


def _first(found: Timeline) -> float:
    return min((float(lane.pieces.starts[0]) for lane in found.lanes if len(lane.pieces)), default=0.0)


def _released(found: Timeline) -> float:
    """When the last rank left the step's last rollout."""
    return max(timing.release_seconds for lane in found.lanes for timing in lane.rollouts)


def _right_edge(found: Timeline) -> float:
    return max((float(lane.pieces.ends[-1]) for lane in found.lanes if len(lane.pieces)), default=1.0)


def _patch(kind: Kind) -> Patch:
    edge = theme().faint if kind in HATCHES else theme().kinds[kind]
    return Patch(
        facecolor=theme().kinds[kind], hatch=HATCHES.get(kind), edgecolor=edge, linewidth=0.5, label=label_of(kind)
    )
