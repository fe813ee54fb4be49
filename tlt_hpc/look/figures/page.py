"""Figures as pieces of an HTML page: their colours are the page's variables, so one drawing serves light and dark.

Each is drawn twice, wide and for a telephone; the page shows the one that fits. Knows nothing else of the page.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from matplotlib.figure import Figure

from tlt_hpc.look.analysis.kinds import Kind
from tlt_hpc.look.figures.style import DARK, LIGHT, PAGE, PHONE, THEMES, Theme, themed

Found = TypeVar("Found")
Draw = Callable[[Found], Figure]

_MARK = 0xF1E000
"""The first of the colours that stand for a variable while a figure is drawn."""
_PLAIN = ("background", "ink", "faint", "grid", "tail")
NAMES = (*_PLAIN, *(f"kind-{kind.name.lower()}" for kind in Kind), *(f"series-{i}" for i in range(len(LIGHT.series))))
"""Of the variables, without ``--``."""
FONT = "'DejaVu Sans', Verdana, sans-serif"
"""Letters as wide as those that the figure was laid out with; where there are none, narrower ones."""

_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_PLACE = re.compile(r'(?<= )(?:d|x|y|transform)="[^"]*"')
"""Where numbers are places, which a hundredth of a point is fine enough for; in text they are figures."""
_HEX = re.compile(r"#f1e0[0-9a-f]{2}")
_ATTRIBUTE = re.compile(r'(fill|stroke)="(#f1e0[0-9a-f]{2})"')
_STYLE = re.compile(r'style="[^"]*"')
_ID = re.compile(r' id="([^"]+)"')
_LINK = re.compile(r'xlink:href="#([^"]+)"|url\(#([^)]+)\)')


@dataclass(frozen=True)
class PageFigure:
    """The same picture as two elements of SVG."""

    wide: str
    phone: str


def draw_for_page(name: str, told: str, draw: Draw[Found], found: Found) -> PageFigure:
    """Draw what was found; ``name`` keeps its ids apart from other figures', ``told`` is for who cannot see it."""
    pictures = []
    for layout in (PAGE, PHONE):
        with themed(_MARKED, layout):
            written = io.StringIO()
            draw(found).savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None})
        pictures.append(as_element(written.getvalue(), f"{name}-{layout.name}", told))
    return PageFigure(*pictures)


def variables(theme: str) -> dict[str, str]:
    """The colours of a theme by the names of the page's variables."""
    return dict(zip(NAMES, _colours(THEMES[theme]), strict=True))


def as_element(svg: str, name: str, told: str) -> str:
    """A whole SVG file as an element within a page: no size of its own, ids of its own, the page's colours."""
    start = svg.index("<svg")
    box = re.search(r'viewBox="([^"]+)"', svg)
    assert box is not None
    body = svg[svg.index(">", start) + 1 : svg.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    linked = {a or b for a, b in _LINK.findall(body)}
    body = _ID.sub(lambda at: f' id="{name}-{at[1]}"' if at[1] in linked else "", body)
    body = _LINK.sub(lambda at: at[0].replace("#", f"#{name}-"), body)
    body = _ATTRIBUTE.sub(r'style="\1: \2"', body)
    body = _STYLE.sub(lambda style: _HEX.sub(_variable, style[0]), body)
    body = _PLACE.sub(lambda place: " ".join(_NUMBER.sub(_shortened, place[0]).split()), body)
    body = body.replace("'DejaVu Sans'", FONT)
    body = re.sub(r"\n\s*", "\n", body).strip()
    head = f'<svg viewBox="{box[1]}" role="img" aria-label="{html.escape(told, quote=True)}"'
    return f'{head} xmlns:xlink="http://www.w3.org/1999/xlink">\n{body}\n</svg>'


def _variable(colour: re.Match[str]) -> str:
    place = int(colour[0][1:], 16) - _MARK
    return f"var(--{NAMES[place]})" if place < len(NAMES) else colour[0]


def _shortened(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _colours(theme: Theme) -> tuple[str, ...]:
    plain = tuple(getattr(theme, name) for name in _PLAIN)
    return (*plain, *(theme.kinds[kind] for kind in Kind), *theme.series)


def _marked() -> Theme:
    """A theme whose colours are told apart in what was written, and stand for the variables."""
    marks = [f"#{_MARK + i:06x}" for i in range(len(NAMES))]
    plain, rest = marks[: len(_PLAIN)], marks[len(_PLAIN) :]
    colours = dict(zip(_PLAIN, plain, strict=True))
    return Theme(name="page", kinds=dict(zip(Kind, rest, strict=False)), series=tuple(rest[len(Kind) :]), **colours)


_MARKED = _marked()
assert len(DARK.series) == len(LIGHT.series)
