"""How all figures look: one palette, two themes, two layouts, and how they are saved. Knows no figure.

The colours are Okabe and Ito's, with the lightness moved so that what lies side by side differs in grey too; some
kinds of a timeline have hatches. SVG keeps text as text, and the same figure is the same bytes each time.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from tlt_hpc.common.printable import printable
from tlt_hpc.look.analysis.kinds import Kind


@dataclass(frozen=True)
class Layout:
    """How wide figures are, in inches, so that their letters are as large side by side, and what they leave out."""

    name: str
    width: float
    is_narrow: bool
    """Panels one below the other: for a telephone."""
    has_title: bool
    """False where a page has its own headings."""


WIDE = Layout("wide", 9.0, is_narrow=False, has_title=True)
PAGE = Layout("page", 9.0, is_narrow=False, has_title=False)
PHONE = Layout("phone", 3.9, is_narrow=True, has_title=False)


@dataclass(frozen=True)
class Theme:
    """Colours of one theme; ``series`` are told apart by ``MARKERS`` and ``DASHES`` as well."""

    name: str
    background: str
    ink: str
    faint: str
    grid: str
    tail: str
    kinds: dict[Kind, str]
    series: tuple[str, ...]


LIGHT = Theme(
    name="light",
    background="#ffffff",
    ink="#1f2328",
    faint="#59636e",
    grid="#d1d9e0",
    tail="#fff1d6",
    kinds={
        Kind.PREFILL: "#f0e442",
        Kind.DECODE: "#9ad1f0",
        Kind.SPECULATE: "#00527f",
        Kind.GENERATE: "#9ad1f0",
        Kind.TRAIN: "#e8800c",
        Kind.SERIAL: "#b35c00",
        Kind.IDLE: "#ffffff",
        Kind.REWARD: "#cc79a7",
        Kind.UPDATE: "#00805d",
        Kind.REFRESH: "#7d4a94",
        Kind.SAVE: "#8c959f",
        Kind.EVALUATE: "#3d444d",
    },
    series=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#3d444d", "#56b4e9", "#e69f00", "#8c6d00"),
)
DARK = Theme(
    name="dark",
    background="#0d1117",
    ink="#e6edf3",
    faint="#9da7b3",
    grid="#30363d",
    tail="#3a2c12",
    kinds={
        Kind.PREFILL: "#f5ec6b",
        Kind.DECODE: "#a9daf5",
        Kind.SPECULATE: "#1f7ab8",
        Kind.GENERATE: "#a9daf5",
        Kind.TRAIN: "#f5931e",
        Kind.SERIAL: "#c06a0a",
        Kind.IDLE: "#0d1117",
        Kind.REWARD: "#dc93bb",
        Kind.UPDATE: "#12a37a",
        Kind.REFRESH: "#9c6bb5",
        Kind.SAVE: "#768390",
        Kind.EVALUATE: "#cdd9e5",
    },
    series=("#3d9fe0", "#f27c2a", "#1fbf8f", "#dc93bb", "#cdd9e5", "#8fd0f5", "#f5b83d", "#bfa24a"),
)
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}
HATCHES = {Kind.IDLE: "////", Kind.SERIAL: "....", Kind.GENERATE: "xxx"}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)), (0, (3, 1)))

_MOST_LETTERS = 125
"""Of a line below a headline: what a wide figure has room for."""

_THEME: ContextVar[Theme] = ContextVar("theme", default=LIGHT)
_LAYOUT: ContextVar[Layout] = ContextVar("layout", default=WIDE)


def theme() -> Theme:
    """The theme in use."""
    return _THEME.get()


def layout() -> Layout:
    """The layout in use."""
    return _LAYOUT.get()


@contextmanager
def themed(name: str | Theme, arranged: Layout = WIDE) -> Iterator[Theme]:
    """Draw and save in a theme, ``light``, ``dark`` or one's own, and in a layout."""
    chosen = THEMES[name] if isinstance(name, str) else name
    tokens = _THEME.set(chosen), _LAYOUT.set(arranged)
    try:
        with mpl.rc_context(_settings(chosen)):  # type: ignore[arg-type]
            yield chosen
    finally:
        _THEME.reset(tokens[0])
        _LAYOUT.reset(tokens[1])


def new_figure(height: float) -> Figure:
    """An empty figure of the layout's width that lays itself out; drawn without a screen."""
    figure = Figure(figsize=(layout().width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def below_each_other(heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """A narrow figure's panels, each ``heights`` inches high, and room for what is written around each."""
    figure = new_figure(sum(heights) + 0.75 * len(heights))
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    return figure, [figure.add_subplot(grid[row]) for row in range(len(heights))]


def save(figure: Figure, folder: FilePath, name: str) -> list[FilePath]:
    """Write ``NAME-THEME.png`` and ``.svg`` into a folder, which is made; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}-{theme().name}.{ending}" for ending in ("png", "svg")]
    figure.savefig(paths[0], dpi=160, metadata={"Software": None})
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None})
    paths[1].write_text(printable(written.getvalue()), encoding="utf-8")
    return paths


def title(figure: Figure, text: str, below: str = "") -> None:
    """The figure's headline, and a line below it in a fainter colour; the panels get what is left."""
    if not layout().has_title:
        return
    height = figure.get_figheight()
    top = 1 - 0.08 / height
    lines = textwrap.wrap(below, _MOST_LETTERS)
    words = [figure.text(0.008, top, text, ha="left", va="top", fontsize=12, fontweight="bold")]
    for number, each in enumerate(lines):
        place = top - (0.27 + 0.17 * number) / height
        words.append(figure.text(0.008, place, each, ha="left", va="top", fontsize=8.5, color=theme().faint))
    for word in words:
        word.set_in_layout(False)
    engine = figure.get_layout_engine()
    assert engine is not None
    taken = 0.3 + 0.17 * len(lines)
    engine.set(rect=(0, 0, 1, top - taken / height))  # type: ignore[call-arg]


def panel(axes: Axes, heading: str, x: str = "", y: str = "") -> None:
    """A panel's heading and labels, with units, on the house's axes."""
    axes.set_title(heading, loc="left", fontsize=9.5)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def whole_steps(axes: Axes) -> None:
    """Steps have no halves."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))


def line(axes: Axes, x: Any, y: Any, index: int, label: str = "", **more: Any) -> None:
    """A series: its colour, its dashes, and its marker where there are few points."""
    marker = MARKERS[index % len(MARKERS)] if len(x) <= 30 else ""
    settings: dict[str, Any] = {"color": colour(index), "linestyle": DASHES[index % len(DASHES)], "marker": marker}
    axes.plot(x, y, label=label or None, **(settings | more))


def label_of(kind: Kind) -> str:
    """How a legend names it: beside what was harvested, idle is the rest."""
    return "idle, not harvested" if kind is Kind.IDLE else str(kind)


def colour(index: int) -> str:
    """The colour of the ``index``-th series."""
    series = theme().series
    return series[index % len(series)]


def rectangles(
    axes: Axes,
    left: Any,
    bottom: Any,
    width: Any,
    height: Any,
    face: str,
    hatch: str | None,
    edge: str,
    linewidth: float,
) -> None:
    """Bars or bricks of one look as one path, [K] each or scalars: a picture of thousands stays small."""
    corners = np.broadcast_arrays(*(np.asarray(each, np.float64) for each in (left, bottom, width, height)))
    x, y, w, h = (each.ravel() for each in corners)
    points = np.stack([x, y, x, y + h, x + w, y + h, x + w, y, x, y], 1).reshape(-1, 2)
    codes = np.tile([Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY], len(x)).astype(np.uint8)
    patch = PathPatch(
        Path(points, codes), facecolor=face, hatch=hatch, edgecolor=edge, linewidth=linewidth, zorder=2, snap=False
    )
    axes.add_patch(patch)


def legend_above(axes: Axes, num_columns: int, handles: Sequence[Artist] | None = None, narrow: int = 1) -> None:
    """A legend between a panel's heading and its data, over neither; of ``narrow`` columns in a narrow layout."""
    num_columns = narrow if layout().is_narrow else num_columns
    known, labels = axes.get_legend_handles_labels()
    chosen = list(handles) if handles is not None else known
    names = [str(handle.get_label()) for handle in chosen] if handles is not None else labels
    if not chosen:
        return
    rows = -(-len(chosen) // num_columns)
    axes.set_title(axes.get_title(loc="left"), loc="left", fontsize=9.5, pad=8 + 13 * rows)
    axes.legend(
        chosen, names, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=num_columns, borderaxespad=0.25, **_TIGHT
    )


def legend_below(figure: Figure, handles: Iterable[Artist], num_columns: int, narrow: int = 1) -> None:
    """One legend for the whole figure, under it; of ``narrow`` columns in a narrow layout."""
    num_columns = narrow if layout().is_narrow else num_columns
    chosen = list(handles)
    figure.legend(
        chosen, [str(h.get_label()) for h in chosen], loc="outside lower left", ncols=num_columns, **(_TIGHT | _WIDE)
    )


_TIGHT = {"frameon": False, "fontsize": 8, "handlelength": 1.8, "columnspacing": 1.4, "handletextpad": 0.5}
_WIDE = {"handlelength": 1.6, "handleheight": 1.0}


def _settings(chosen: Theme) -> dict[str, Any]:
    return {
        "figure.facecolor": chosen.background,
        "savefig.facecolor": chosen.background,
        "axes.facecolor": chosen.background,
        "axes.edgecolor": chosen.faint,
        "axes.labelcolor": chosen.ink,
        "axes.titlecolor": chosen.ink,
        "text.color": chosen.ink,
        "xtick.color": chosen.faint,
        "ytick.color": chosen.faint,
        "xtick.labelcolor": chosen.ink,
        "ytick.labelcolor": chosen.ink,
        "grid.color": chosen.grid,
        "grid.linewidth": 0.6,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.labelsize": 8.5,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "lines.linewidth": 1.6,
        "lines.markersize": 4,
        "hatch.linewidth": 0.6,
        "font.family": ["DejaVu Sans"],
        "font.size": 9,
        "text.parse_math": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "tlt_hpc",
        "figure.constrained_layout.h_pad": 0.06,
        "figure.constrained_layout.w_pad": 0.06,
    }
