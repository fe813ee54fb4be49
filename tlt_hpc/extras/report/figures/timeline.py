"""The figure of one step: a lane for each rank, and the sequences still being generated."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from tlt_hpc.extras.report.analysis.time_kinds import KINDS, Kind, Pieces, join_close_pieces
from tlt_hpc.extras.report.analysis.timeline import Lane, Timeline
from tlt_hpc.extras.report.figures.style import KIND_COLOURS, TAIL, kind_patch, kind_style, label_panel, new_figure
from tlt_hpc.look.text_format import format_seconds

MAX_LANES = 32
"""Ranks that are drawn, chosen evenly by the order in which they finished."""
_MAX_TOLD = 24
"""Number of ranks up to which idle and harvested seconds are written beside the lanes."""
_FINEST, _VISIBLE = 1 / 2000, 1 / 1500
"""Shares of the shown time: shorter gaps are closed; a kind needs more on some rank to be in the legend."""
_ENLARGED = 0.7
"""Share of the shown time below which the rollout is also drawn enlarged."""
_BEFORE = 0.15
"""Largest share of the axis for the save and the evaluation before the rollout."""


def draw_timeline(found: Timeline) -> Figure:
    """Lanes of the ranks, and live sequences below them, on one time axis.

    If a step is much longer than its rollout, the whole step is drawn first, and then the rollout, enlarged.
    """
    lanes = _select_lanes(found.lanes)
    right = max((lane.pieces.ends[-1] for lane in lanes if len(lane.pieces)), default=1.0)
    left = min((lane.pieces.starts[0] for lane in lanes if len(lane.pieces)), default=0.0)
    left, released = max(min(left, 0.0), -_BEFORE * right), max(lane.rollouts[-1, 2] for lane in lanes)
    drawn = [(lane, join_close_pieces(lane.pieces, _FINEST * (right - left))) for lane in lanes]
    is_enlarged = released < _ENLARGED * (right - left)
    height = max(0.8, min(0.42 * len(lanes), 6.0))
    heights = [*([max(0.6, 0.6 * height)] if is_enlarged else []), height, *([1.1] if len(found.live) else [])]
    figure = new_figure(1.2 + sum(heights) + 0.5 * (len(heights) - 1))
    panels = list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    if is_enlarged:
        _draw_lanes(panels[0], found, drawn, (left, right))
        label_panel(panels[0], "The whole step", x="seconds since the rollout began")
        left, right = -0.01 * released, 1.01 * released
    main = panels[int(is_enlarged)]
    _draw_lanes(main, found, drawn, (left, right))
    tails = ", ".join(format_seconds(end - start) for start, end in found.tails)
    label_panel(main, ("Its rollout, enlarged" if is_enlarged else "The step") + (f"; tail {tails}" if tails else ""))
    if len(lanes) <= _MAX_TOLD:
        for place, lane in enumerate(lanes):
            words = f"idle {format_seconds(lane.idle_seconds)}"
            words += f"\nharvested {format_seconds(lane.harvested_seconds)}" if lane.harvested_seconds else ""
            main.text(1.008, place, words, transform=main.get_yaxis_transform(), va="center", fontsize=7.5)
    if len(found.live):
        main.tick_params(axis="x", labelbottom=False)
        _draw_live(panels[-1], found, (left, right))
    panels[-1].set_xlabel("seconds since the rollout began")
    shown = [kind for kind in KINDS if max(lane.pieces.seconds().get(kind, 0.0) for lane in lanes) > right * _VISIBLE]
    figure.legend(handles=[kind_patch(kind) for kind in shown], loc="outside lower left", ncols=5)
    return figure


def _select_lanes(lanes: tuple[Lane, ...]) -> list[Lane]:
    if len(lanes) <= MAX_LANES:
        return list(lanes)
    order = sorted(lanes, key=lambda lane: lane.finish_seconds)
    return [order[place] for place in np.linspace(0, len(order) - 1, MAX_LANES).round().astype(int)]


def _draw_lanes(axes: Axes, found: Timeline, drawn: list[tuple[Lane, Pieces]], limits: tuple[float, float]) -> None:
    for place, (_, pieces) in enumerate(drawn):
        for index in np.unique(pieces.kinds):
            own = pieces.kinds == index
            axes.add_patch(_rectangles(pieces.starts[own], pieces.ends[own], place, kind_style(KINDS[index])))
    axes.set_xlim(limits)
    axes.set_ylim(len(drawn) - 0.45, -0.55)
    axes.grid(visible=False)
    if len(drawn) <= _MAX_TOLD:
        axes.set_yticks(range(len(drawn)), [f"rank {lane.rank}" for lane, _ in drawn])
    else:
        axes.set_yticks([])
        axes.set_ylabel("ranks, as they finished")
    axes.tick_params(axis="y", length=0)
    _shade(axes, found)


def _rectangles(starts: NDArray[np.float64], ends: NDArray[np.float64], place: int, style: dict[str, Any]) -> PathPatch:
    """Pieces of one kind as a single path: thousands stay a small file."""
    low, high = np.full(len(starts), place - 0.4), np.full(len(starts), place + 0.4)
    corners = [starts, low, starts, high, ends, high, ends, low, starts, low]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    path = Path(np.stack(corners, 1).reshape(-1, 2), np.tile(codes, len(starts)).astype(np.uint8))
    return PathPatch(path, zorder=2, snap=False, **style)


def _draw_live(axes: Axes, found: Timeline, limits: tuple[float, float]) -> None:
    fill = KIND_COLOURS[Kind.DECODE]
    axes.fill_between(found.live_seconds, found.live, step="post", color=fill, alpha=0.55, linewidth=0)
    axes.plot(found.live_seconds, found.live, drawstyle="steps-post", color=mpl.rcParams["text.color"], linewidth=1.1)
    axes.set_xlim(limits)
    axes.set_ylim(0, max(1, found.live.max()) * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    label_panel(axes, "Sequences still being generated, all ranks", y="sequences")
    _shade(axes, found)


def _shade(axes: Axes, found: Timeline) -> None:
    """Shade the tails behind the data, and mark the releases."""
    for start, end in found.tails:
        axes.axvspan(start, end, color=TAIL, alpha=0.18, linewidth=0, zorder=0)
        axes.axvline(end, color=mpl.rcParams["xtick.color"], linewidth=0.9, linestyle="--", zorder=3)
