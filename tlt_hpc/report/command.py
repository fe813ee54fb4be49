"""``tlt report``: a run's files in, one page out."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from tlt_hpc.analysis.result import plain
from tlt_hpc.errors import UserError
from tlt_hpc.report.findings import Findings, find
from tlt_hpc.report.gain import Gain, estimated_gain, measured_gain
from tlt_hpc.report.page import render
from tlt_hpc.report.verdict import cards
from tlt_hpc.storage.folder import WriteError, writing_beside


def run(options: argparse.Namespace) -> int:
    """Write the page, and say in a few lines what it says first; returns the exit status.

    Raises:
        UserError: there is no such run or step, an option that cannot be, or the page cannot be written.
    """
    if options.last is not None and options.last < 1:
        raise UserError(f"--last {options.last}: give 1 or more")
    out: Path = options.out or options.run / "report.html"
    for name, path in (("--out", options.out), ("--json", options.json)):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{name} {path}: its folder does not exist; make it first")
        if path is not None and path.is_dir():
            raise UserError(f"{name} {path} is a folder; give a file")
    found = find(options.run, options.against, options.step, options.last)
    gain, why_none = gain_of(found)
    page = render(found, gain, why_none, time.time())
    _write(out, page)
    for card in cards(found, gain):
        print(f"{card.label.lower():<10} {card.value:<14} {card.words}")
    if options.json is not None:
        tree = {"gain": plain(gain), **found.to_json()}
        _write(options.json, json.dumps(tree, indent=1, allow_nan=False) + "\n")
    print(f"report     {out}")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        with writing_beside(path) as part:
            part.write_text(text, encoding="utf-8")
    except WriteError as error:
        raise UserError(f"{error.fact}; give another place, such as --out report.html") from None


def gain_of(found: Findings) -> tuple[Gain | None, str]:
    """What speculation gained, or why that is not known."""
    if found.mode in ("plain", ""):  # nothing to gain, or nothing known
        return None, ""
    gain = measured_gain(found)
    if gain is not None:
        return gain, ""
    if found.other is not None:
        return None, "Nothing was measured: the two runs have no step in common that both have timed."
    return estimated_gain(found) if found.is_begun else (None, "")
