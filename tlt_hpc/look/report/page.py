"""Renders a report as one self-contained HTML file."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jinja2
from matplotlib.figure import Figure

from tlt_hpc import __version__
from tlt_hpc.common.files import read_text, told
from tlt_hpc.common.printable import printable
from tlt_hpc.look.analysis.base import Analysis, plain
from tlt_hpc.look.environment import environments_in_words
from tlt_hpc.look.figures.steps import draw_acceptance, draw_comparison, draw_learning, draw_lengths, draw_throughput
from tlt_hpc.look.figures.style import THEMES, inline_svg, themed
from tlt_hpc.look.figures.timeline import MAX_LANES, draw_timeline
from tlt_hpc.look.report.advice import advise
from tlt_hpc.look.report.findings import RunFindings
from tlt_hpc.look.report.gain import RunGain
from tlt_hpc.look.report.verdict import answers, cards
from tlt_hpc.look.words import span_of

_MAX_STARTS = 20
_MODES = {"plain": "no speculation", "ngram": "n-gram speculation", "full": "full speculation"}


@dataclass(frozen=True)
class PageSection:
    """A heading, and a figure with text above and below it."""

    heading: str
    words: str
    svg: str
    caption: str


def render(found: RunFindings, gain: RunGain | None, why_no_gain: str, made_at: float, is_typical: bool = True) -> str:
    """The page; ``made_at`` in seconds since the epoch; ``is_typical``: the drawn step was not chosen by the user."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tlt_hpc.look.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        lstrip_blocks=True,
    )
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
        starts=[json.dumps(plain(start), indent=1) for start in starts[: -_MAX_STARTS - 1 : -1]],
        config=_config(found),
        run=shlex.quote(str(found.log.folder.path)),
        made_at=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(made_at)),
        version=__version__,
    )
    return printable(page)


def _sections(found: RunFindings, is_typical: bool) -> list[PageSection]:
    sections: list[PageSection] = []

    def draw(
        heading: str, part: Analysis, draw_figure: Callable[[Any], Figure], words: str = "", caption: str = ""
    ) -> None:
        if part.has_data:
            with themed("light"):
                svg = inline_svg(draw_figure(part), f"figure-{len(sections)}", part.verdict)
            sections.append(PageSection(heading, words, svg, caption))

    step, both = found.timeline, found.comparison
    if step is not None:
        caption = "Shaded: the tail, from the first rank's last token to the release of all."
        caption += " This step is a typical one: its share of waiting is the nearest to the run's." * is_typical
        if len(step.lanes) > MAX_LANES:
            caption += f" {MAX_LANES} of {len(step.lanes)} ranks are drawn, evenly by the order in which they finished."
        heading = f"One step, as each rank spent it: step {step.step}"
        draw(heading, step, draw_timeline, step.verdict, caption)
    draw("Where the seconds go", found.throughput, draw_throughput)
    if both is not None:
        draw(f"Against {both.runs[0].name}", both, draw_comparison, both.verdict)
    draw("How long the responses are", found.lengths, draw_lengths, found.lengths.verdict)
    draw("What speculation gives", found.acceptance, draw_acceptance, found.acceptance.verdict)
    smoothed = "Bold: mean of neighbouring steps; faint: single steps." if len(found.learning.steps) >= 20 else ""
    draw("How the policy learns", found.learning, draw_learning, caption=smoothed)
    return sections


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
