"""Renders a report as one self-contained HTML file."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jinja2
import markupsafe
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from tlt_hpc import __version__
from tlt_hpc.common.files import read_text, told
from tlt_hpc.common.printable import printable
from tlt_hpc.look.analysis.base import Analysis
from tlt_hpc.look.environment import environments_in_words, host_in_words
from tlt_hpc.look.figures.steps import draw_acceptance, draw_comparison, draw_learning, draw_lengths, draw_throughput
from tlt_hpc.look.figures.style import THEMES, inline_svg, themed
from tlt_hpc.look.figures.timeline import MAX_LANES, draw_timeline
from tlt_hpc.look.report.advice import advise
from tlt_hpc.look.report.findings import RunFindings
from tlt_hpc.look.report.gain import RunGain
from tlt_hpc.look.report.verdict import answers, cards
from tlt_hpc.look.words import span_of
from tlt_hpc.storage.environment_lines import Environment

_MAX_ROWS = 60
"""Rows of the table of steps; with more steps, a row is the mean of neighbours."""
_MAX_HOSTS, _MAX_STARTS = 64, 20
_OPTION = re.compile(r"(--[a-z][a-z-]*)")
_MODES = {"plain": "no speculation", "ngram": "n-gram speculation", "full": "full speculation"}


@dataclass(frozen=True)
class PageSection:
    """A heading, a figure with text above and below it, and the rows of a table, headings first."""

    heading: str
    words: str
    svg: str
    caption: str
    table: list[list[str]]


def render(found: RunFindings, gain: RunGain | None, why_no_gain: str, made_at: float, is_typical: bool = True) -> str:
    """The page; ``made_at`` in seconds since the epoch; ``is_typical``: the drawn step was not chosen by the user."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tlt_hpc.look.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        lstrip_blocks=True,
    )
    environment.filters["options"] = _with_options
    starts = found.log.starts
    page = environment.get_template("page.html.jinja").render(
        found=found,
        subtitle=_subtitle(found),
        themes=THEMES,
        cards=cards(found, gain),
        answers=answers(found, gain, why_no_gain),
        advice=advise(found, gain),
        sections=_sections(found, is_typical),
        environment_words=environments_in_words(starts),
        starts=[(number, _rows_of(start)) for number, start in enumerate(starts, 1)][: -_MAX_STARTS - 1 : -1],
        config=_config(found),
        run=shlex.quote(str(found.log.folder.path)),
        against="" if found.other is None else str(found.other.folder.path.resolve()),
        made_at=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(made_at)),
        version=__version__,
    )
    return printable(page)


def _with_options(words: str) -> markupsafe.Markup:
    """Keep ``--an-option`` on one line."""
    return markupsafe.Markup(_OPTION.sub(r'<span class="option">\1</span>', str(markupsafe.escape(words))))


def _sections(found: RunFindings, is_typical: bool) -> list[PageSection]:
    sections: list[PageSection] = []

    def draw(
        heading: str, part: Analysis | None, draw_figure: Callable[[Any], Figure], words: str = "", caption: str = "",
        table: list[list[str]] | None = None,
    ) -> None:  # fmt: skip
        if part is not None and part.has_data:
            with themed("light"):
                svg = inline_svg(draw_figure(part), f"figure-{len(sections)}", part.verdict)
            sections.append(PageSection(heading, words, svg, caption, table or []))

    step, both = found.timeline, found.comparison.on_common_steps() if found.comparison else None
    if step is not None:
        caption = "Shaded: the tail, from the first rank's last token to the release of all."
        caption += " This step is a typical one: its share of waiting is the nearest to the run's." * is_typical
        if len(step.lanes) > MAX_LANES:
            caption += f" {MAX_LANES} of {len(step.lanes)} ranks are drawn, evenly by the order in which they finished."
        heading = f"One step, as each rank spent it: step {step.step}"
        draw(heading, step, draw_timeline, step.verdict, caption)
    draw("Where the seconds go", found.throughput, draw_throughput, table=_steps_table(found))
    if both is not None:
        draw(f"Against {both.runs[0].name}", both, draw_comparison, both.verdict)
    draw("How long the responses are", found.lengths, draw_lengths, found.lengths.verdict)
    draw("What speculation gives", found.acceptance, draw_acceptance, found.acceptance.verdict)
    smoothed = "Bold: mean of neighbouring steps; faint: single steps." if len(found.learning.steps) >= 20 else ""
    draw("How the policy learns", found.learning, draw_learning, caption=smoothed)
    return sections


def _steps_table(found: RunFindings) -> list[list[str]]:
    steps, series, throughput = found.learning.steps, found.learning.series, found.throughput
    _, here, there = np.intersect1d(steps, throughput.steps, return_indices=True)

    def logged(values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Values of the logged steps, on the committed steps; NaN on those without a log."""
        aligned = np.full(len(steps), np.nan)
        aligned[here] = values[there]
        return aligned

    def of_all_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return logged(np.where(throughput.is_whole, values, np.nan))

    columns = (
        ("score", series["score"], ".3f"),
        ("tokens, mean", series["length"], ",.0f"),
        ("longest", series["longest"], ",.0f"),
        ("accept length", logged(found.acceptance.accept_length), ".2f"),
        ("rollout s", logged(throughput.rollout_seconds), ".2f"),
        ("step s", logged(throughput.step_seconds), ".2f"),
        ("idle rank-s", of_all_ranks(throughput.idle_rank_seconds), ".2f"),
        ("harvested rank-s", of_all_ranks(throughput.harvested_rank_seconds), ".2f"),
        ("drafter updates", logged(found.acceptance.drafter_version), ",.0f"),
    )
    size = max(1, -(-len(steps) // _MAX_ROWS))
    rows = [["step" if size == 1 else f"means of {size} steps", *(head for head, _, _ in columns)]]
    for start in range(0, len(steps), size):
        some = slice(start, start + size)
        first, last = steps[some][[0, -1]]
        cells = [_cell(values[some], form) for _, values, form in columns]
        rows.append([str(first) if first == last else f"{first}\u2013{last}", *cells])
    return rows


def _cell(values: NDArray[np.float64], form: str) -> str:
    """The mean of the values that are known."""
    known = values[np.isfinite(values)]
    return f"{known.mean():{form}}" if len(known) else "\u2013"


def _rows_of(start: Environment) -> list[tuple[str, str]]:
    rows = [
        ("started", start.time),
        ("command", shlex.join(start.command)),
        ("tlt_hpc", f"{start.version} {start.commit}"),
        ("Python", start.python),
        *start.packages.items(),
        ("CUDA", start.cuda or "none: torch is a build for CPUs"),
        ("MPI", " ".join(start.mpi.split())),
        *((host.name, host_in_words(host)) for host in start.hosts[:_MAX_HOSTS]),
        ("threads a rank", start.threads or "not set"),
        ("started by", start.launcher),
        *((f"Slurm {name}", value) for name, value in start.slurm.items()),
    ]
    more = len(start.hosts) - _MAX_HOSTS
    return [*rows, ("", f"and {more} more nodes")] if more > 0 else rows


def _subtitle(found: RunFindings) -> str:
    if not found.is_begun:
        return "no step is committed yet"
    parts = [f"{span_of(found.learning.steps)} (counted from 0)", found.throughput.ranks_in_words]
    parts.append(_MODES.get(found.mode, found.mode))
    if found.timeline is not None:
        parts.append(time.strftime("%Y-%m-%d", time.gmtime(found.timeline.start_seconds)))
    return ", ".join(filter(None, parts))


def _config(found: RunFindings) -> str:
    try:
        return read_text(found.log.folder.config)
    except OSError as error:
        return f"not here: {told(error)}"
