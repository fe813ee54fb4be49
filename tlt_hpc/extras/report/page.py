"""Renders a report as one self-contained HTML file."""

from __future__ import annotations

import json
import shlex
import time
from typing import Any

import jinja2

from tlt_hpc import __version__
from tlt_hpc.common.files import os_error_text, read_text
from tlt_hpc.common.formatting import format_count
from tlt_hpc.common.printable import escape_control_characters
from tlt_hpc.extras.report.figures.steps import (
    draw_acceptance,
    draw_comparison,
    draw_learning,
    draw_lengths,
    draw_throughput,
)
from tlt_hpc.extras.report.figures.style import THEMES, inline_svg, themed
from tlt_hpc.extras.report.figures.timeline import MAX_LANES, draw_timeline
from tlt_hpc.extras.report.findings import RunFindings
from tlt_hpc.extras.report.verdict import RunGain, key_figures
from tlt_hpc.look.series import to_json_types
from tlt_hpc.look.text_format import format_percent, format_seconds, format_step_range

_MAX_STARTS = 20


def render(found: RunFindings, gain: RunGain | None, made_at: float) -> str:
    """The page; ``made_at`` in seconds since the epoch."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tlt_hpc.extras.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "seconds": format_seconds,
        "count": format_count,
        "span": format_step_range,
        "share": format_percent,
    }
    starts = found.log.environments_of_starts
    page = environment.get_template("page.html.jinja").render(
        found=found,
        gain=gain,
        themes=THEMES,
        cards=key_figures(found, gain),
        sections=_sections(found),
        max_lanes=MAX_LANES,
        starts=[(start, json.dumps(to_json_types(start), indent=1)) for start in starts[: -_MAX_STARTS - 1 : -1]],
        config=_read_config_text(found),
        run=shlex.quote(str(found.log.folder.path)),
        made_at=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(made_at)),
        version=__version__,
    )
    return escape_control_characters(page)


def _sections(found: RunFindings) -> list[tuple[str, Any, str]]:
    """Heading, analysis and figure of each section."""
    parts: dict[str, tuple[Any, Any]] = {
        "One step, as each rank spent it": (found.timeline, draw_timeline),
        "Where the seconds go": (found.throughput, draw_throughput),
        "Against another run": (found.comparison, draw_comparison),
        "How long the responses are": (found.lengths, draw_lengths),
        "What speculation gives": (found.acceptance, draw_acceptance),
        "How the policy learns": (found.learning, draw_learning),
    }
    sections = list[tuple[str, Any, str]]()
    with themed("light"):
        for heading, (part, draw) in parts.items():
            if part is not None and part.has_data:
                svg = inline_svg(draw(part), f"figure-{len(sections)}", part.verdict)
                sections.append((heading, part, svg))
    return sections


def _read_config_text(found: RunFindings) -> str:
    try:
        return read_text(found.log.folder.config)
    except OSError as error:
        return f"not here: {os_error_text(error)}"
