"""The style of all figures: colours, matplotlib's settings in two themes, and how figures are saved.

The colours are Okabe and Ito's, changed so that neighbouring areas differ in grey, too, and all are visible on light
and dark backgrounds. SVG keeps text as text, and the same figure gives the same bytes each time.
"""

from __future__ import annotations

import html
import io
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from tlt_hpc.common.printable import escape_control_characters
from tlt_hpc.extras.report.analysis.time_kinds import Kind

THEMES = {
    "light": {"ink": "#1f2328", "faint": "#59636e", "grid": "#d1d9e0", "background": "#ffffff"},
    "dark": {"ink": "#e6edf3", "faint": "#9da7b3", "grid": "#30363d", "background": "#0d1117"},
}
"""Theme -> its colours. All other colours are the same in both."""
SERIES = ("#1f7fc4", "#d9661f", "#0f9d70", "#cc79a7", "#768390", "#56b4e9", "#e69f00", "#96751a")
MARKERS = "os^DvPX<"
DASHES = ("-", "--", "-.", ":")
KIND_COLOURS = {
    Kind.PREFILL: "#f0e442",
    Kind.DECODE: "#9ad1f0",
    Kind.SPECULATE: "#1f6fa8",
    Kind.TRAIN: "#e8800c",
    Kind.AHEAD: "#b5651d",
    Kind.REWARD: "#cc79a7",
    Kind.UPDATE: "#0b8f68",
    Kind.REFRESH: "#8a5aa5",
    Kind.SAVE: "#8c959f",
    Kind.EVALUATE: "#5b6b80",
}
"""Kind -> its colour; idle time has the background's."""
TAIL = "#e69f00"
WIDTH = 9.0
"""Inches."""
_FONT = "'DejaVu Sans', Verdana, sans-serif"
"""Fonts as wide as the one that the figure was laid out with, or narrower."""


def themed(theme: str) -> AbstractContextManager[None]:
    """matplotlib's settings of a theme, in force in a block: while drawing and while saving."""
    colours = THEMES[theme]
    ink, faint, background = colours["ink"], colours["faint"], colours["background"]
    given: dict[Any, Any] = {
        **dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), background),
        **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "text.color"), ink),
        **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), ink),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), faint),
        "grid.color": colours["grid"],
        "grid.linewidth": 0.6,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 9.5,
        "axes.labelsize": 8.5,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "legend.fontsize": 8,
        "legend.framealpha": 0.6,
        "legend.edgecolor": background,
        "lines.linewidth": 1.6,
        "lines.markersize": 4,
        "hatch.linewidth": 0.6,
        "font.family": ["DejaVu Sans"],
        "font.size": 9,
        "text.parse_math": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "tlt_hpc",
    }
    return mpl.rc_context(given)


def new_figure(height: float) -> Figure:
    """An empty figure of ``height`` inches, whose panels do not overlap."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panel_grid(count: int, row_height: float) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels, two in a row, rows ``row_height`` inches high."""
    rows = max(1, -(-count // 2))
    figure = new_figure(row_height * rows)
    panels = list(figure.subplots(rows, 2, squeeze=False).flat)
    for spare in panels[count:]:
        spare.set_visible(False)
    return figure, panels[:count]


def label_panel(axes: Axes, heading: str, x: str = "", y: str = "") -> None:
    """Set a panel's heading and axis labels."""
    axes.set(title=heading, xlabel=x, ylabel=y)


def set_whole_number_ticks(axes: Axes) -> None:
    """Put ticks on whole numbers only."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))


def plot_series(axes: Axes, x: Any, y: Any, index: int, label: str = "", **more: Any) -> None:
    """Plot the ``index``-th series in its colour and dashes, with markers if there are few points."""
    marker = MARKERS[index % len(MARKERS)] if len(x) <= 30 else ""
    given: dict[str, Any] = {"color": colour(index), "linestyle": DASHES[index % len(DASHES)], "marker": marker}
    axes.plot(x, y, label=label or None, **(given | more))


def colour(index: int) -> str:
    """The colour of the ``index``-th series."""
    return SERIES[index % len(SERIES)]


def kind_style(kind: Kind) -> dict[str, Any]:
    """The arguments with which matplotlib fills areas of a kind."""
    face = KIND_COLOURS.get(kind, mpl.rcParams["axes.facecolor"])
    hatch = "////" if kind is Kind.IDLE else None
    return {"facecolor": face, "hatch": hatch, "edgecolor": mpl.rcParams["xtick.color"], "linewidth": 0.0}


def kind_patch(kind: Kind) -> Patch:
    """The legend entry of a kind."""
    label = "idle, not harvested" if kind is Kind.IDLE else str(kind)
    return Patch(**(kind_style(kind) | {"linewidth": 0.5, "label": label}))


def save_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``NAME.png`` and ``NAME.svg`` into a folder, which is created; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{ending}" for ending in ("png", "svg")]
    figure.savefig(paths[0], dpi=160, metadata={"Software": None})
    paths[1].write_text(_svg(figure), encoding="utf-8")
    return paths


def inline_svg(figure: Figure, name: str, words: str) -> str:
    """The figure as an element of an HTML page, whose CSS variables give it the colours of either theme.

    Args:
        name: makes the ids unique in the page.
        words: the text for screen readers.
    """
    with mpl.rc_context({"svg.hashsalt": name}):
        text = _svg(figure)
    box = re.search(r'viewBox="[^"]+"', text)
    assert box is not None
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r'(fill|stroke)="(#[0-9a-f]{6})"', r'style="\1: \2"', body)
    body = re.sub(r'style="[^"]*"', lambda style: _with_variables(style[0]), body)
    body = body.replace("'DejaVu Sans'", _FONT)
    return (
        f'<svg {box[0]} role="img" aria-label="{html.escape(words)}" xmlns:xlink="http://www.w3.org/1999/xlink">{body}'
    )


def _with_variables(style: str) -> str:
    for variable, code in THEMES["light"].items():
        style = style.replace(code, f"var(--{variable})")
    return style


def _svg(figure: Figure) -> str:
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None})
    return escape_control_characters(written.getvalue())
