"""Pictures of a rollout bench, from its JSON: rates by batch, accept lengths, where the milliseconds go.

The one place that knows matplotlib. Knows nothing of how the figures came about.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed, none is opened

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_COLOURS = {
    "adaptive": "#1b6ca8",
    "plain": "#7fb2d9",
    "generate": "#c9803a",
    "prompt_lookup": "#a4a4a4",
    "assisted": "#d8b98f",
}
_NAMES = {
    "adaptive": "adaptive",
    "plain": "plain",
    "generate": "transformers generate",
    "prompt_lookup": "generate, prompt lookup",
    "assisted": "generate, assisted",
}
_PHASES = {"verify": "#7fb2d9", "draft": "#1b6ca8", "sample": "#c9803a", "overhead": "#c4c4c4"}
_SUFFIX = "_tokens_per_second"


def plot_rollout(tree: dict[str, Any], folder: Path) -> list[Path]:
    """Write the pictures that the figures allow into ``folder``, which is made; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    batches = tree["batch"]
    pictures = {
        "tokens_per_second": plot_rates(batches, tree["model"]["path"]),
        "milliseconds": plot_phases(batches),
    }
    if any(batch["strategies"] for batch in batches.values()):
        pictures["accept_length"] = plot_accept(batches)
    return [_save(figure, folder / f"{name}.png") for name, figure in pictures.items()]


def plot_rates(batches: dict[str, Any], model: str) -> Figure:
    """Tokens per second of every way, by batch size."""
    figure, axes = _figure(f"Tokens per second, {Path(model).name}")
    ways = [way for way in _COLOURS if any(way + _SUFFIX in batch for batch in batches.values())]
    rows = {way: [batch.get(way + _SUFFIX) for batch in batches.values()] for way in ways}
    _grouped(axes, list(batches), {_NAMES[way]: (rows[way], _COLOURS[way]) for way in ways}, "{:,.0f}")
    axes.set_ylabel("tokens per second")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    return figure


def plot_accept(batches: dict[str, Any]) -> Figure:
    """Accept length of every strategy alone, and of adaptive decoding, by batch size."""
    figure, axes = _figure("Accept length by strategy")
    names = list(dict.fromkeys(name for batch in batches.values() for name in batch["strategies"]))
    colours = plt.get_cmap("viridis")
    rows: dict[str, tuple[list[float | None], Any]] = {}
    for i, name in enumerate(names):
        values = [batch["strategies"].get(name, {}).get("accept_length") for batch in batches.values()]
        rows[name] = (values, colours(0.1 + 0.8 * i / max(1, len(names) - 1)))
    rows["adaptive"] = ([batch["accept_length"] for batch in batches.values()], "#b03a2e")
    _grouped(axes, list(batches), rows, "{:.2f}" if len(rows) <= 8 else None)
    axes.set_ylabel("tokens per target pass and sequence")
    return figure


def plot_phases(batches: dict[str, Any]) -> Figure:
    """Milliseconds of a round, stacked, plain and adaptive by batch size."""
    figure, axes = _figure("Milliseconds of a round")
    bars = [
        (f"{name}\n{size}", phases) for size, batch in batches.items() for name, phases in batch["milliseconds"].items()
    ]
    bottom = [0.0] * len(bars)
    for phase, colour in _PHASES.items():
        heights = [max(0.0, phases[phase]) for _, phases in bars]
        axes.bar(range(len(bars)), heights, 0.65, bottom=bottom, label=phase, color=colour)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for i, total in enumerate(bottom):
        axes.text(i, total, f"{total:.2f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(bars)), [label for label, _ in bars])
    axes.set_xlabel("way and sequences at a time")
    axes.set_ylabel("milliseconds")
    _legend(axes)
    return figure


def _figure(title: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(8.5, 4.8), layout="constrained")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _grouped(
    axes: Axes, groups: Sequence[str], rows: dict[str, tuple[list[float | None], Any]], form: str | None
) -> None:
    """Bars of every row side by side in each group; a value that is missing leaves no bar."""
    width = 0.84 / len(rows)
    for i, (name, (values, colour)) in enumerate(rows.items()):
        places = [g - 0.42 + (i + 0.5) * width for g, value in enumerate(values) if value is not None]
        heights = [value for value in values if value is not None]
        bars = axes.bar(places, heights, width * 0.94, label=name, color=colour)
        if form is not None:
            axes.bar_label(bars, [form.format(height) for height in heights], fontsize=7, padding=1)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlabel("sequences at a time")
    _legend(axes)


def _legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
