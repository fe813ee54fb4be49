"""``tlt report``: writes a run's report page."""

from __future__ import annotations

import argparse
import html
import json
import re
import time
from pathlib import Path

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import LINES_BYTES, read_text
from tlt_hpc.look.analysis.base import plain
from tlt_hpc.look.report.findings import Findings, find
from tlt_hpc.look.report.gain import RunGain, measured_gain
from tlt_hpc.look.report.page import render
from tlt_hpc.look.report.verdict import cards
from tlt_hpc.storage.folder import WriteError, writing_beside

_AGAINST = re.compile(r'<meta name="tlt-against" content="([^"]*)">')


def run(options: argparse.Namespace) -> int:
    """Write the page and print its key figures; returns the exit status.

    Raises:
        UserError: there is no such run or step, an option is invalid, or the page cannot be written.
    """
    if options.last is not None and options.last < 1:
        raise UserError(f"--last {options.last}: give 1 or more")
    out: Path = options.out or options.run / "report.html"
    for name, path in (("--out", options.out), ("--json", options.json)):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{name} {path}: its folder does not exist; make it first")
        if path is not None and path.is_dir():
            raise UserError(f"{name} {path} is a folder; give a file")
        ending = ".json" if name == "--json" else ".html"
        if path is not None and path.suffix != ending:  # no file of the run is overwritten
            raise UserError(f"{name} {path}: give a file that ends in {ending}")
    against = options.against or previous_comparison(out)
    found = find(options.run, against, options.step, options.last)
    gain, why_none = gain_of(found)
    page = render(found, gain, why_none, time.time(), is_typical=options.step is None)
    _write(out, page)
    for card in cards(found, gain):
        print(f"{card.label.lower():<10} {card.value:<14} {card.words}")
    if options.json is not None:
        tree = {"gain": plain(gain), **found.to_json()}
        _write(options.json, json.dumps(tree, indent=1, allow_nan=False) + "\n")
    if against is not None and options.against is None:
        print(f"against    {against}, as the page that stood there; remove that for one without")
    print(f"report     {out}")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        with writing_beside(path) as part:
            part.write_text(text, encoding="utf-8", errors="backslashreplace")  # file names need not be valid text
    except WriteError as error:
        raise UserError(f"{error.fact}; give another place, such as --out report.html") from None


def previous_comparison(page: Path) -> Path | None:
    """The run that an existing page was compared with, if it still exists: a new page repeats the comparison."""
    if not page.is_file():
        return None
    told = _AGAINST.search(read_text(page, LINES_BYTES))
    path = Path(html.unescape(told[1])) if told else None
    return path if path is not None and path.is_dir() else None


def gain_of(found: Findings) -> tuple[RunGain | None, str]:
    """The gain, or the reason why it is unknown."""
    if found.other is not None:
        gain, why = measured_gain(found)
        return gain, "" if gain is not None else f"Nothing was measured: {why}."
    if found.mode in ("plain", "") or not found.is_begun:  # nothing to gain, or nothing known
        return None, ""
    return None, (
        "Not measured. Compare with a run of the same seed without speculation (speculation.mode=plain, some steps are "
        "enough): tlt report RUN --against PLAIN_RUN."
    )
