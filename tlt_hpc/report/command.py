"""``tlt report``: a run's files in, one page out."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from tlt_hpc.analysis.result import plain
from tlt_hpc.errors import UserError
from tlt_hpc.report.findings import Findings, find
from tlt_hpc.report.gain import Gain, measured_gain
from tlt_hpc.report.page import render
from tlt_hpc.report.verdict import cards
from tlt_hpc.storage.folder import writing_beside


def run(options: argparse.Namespace) -> int:
    """Write the page, and say in a few lines what it says first; returns the exit status.

    Raises:
        UserError: there is no such run or step, or an option that cannot be.
        WriteError: the page cannot be written.
    """
    if options.last is not None and options.last < 1:
        raise UserError(f"--last {options.last}: give 1 or more")
    out: Path = options.out or options.run / "report.html"
    for name, path in (("--out", out), ("--json", options.json)):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{name} {path}: its folder does not exist; make it first")
    found = find(options.run, options.against, options.step, options.last)
    gain, why_none = gain_of(found)
    page = render(found, gain, why_none, time.time())
    with writing_beside(out) as part:
        part.write_text(page, encoding="utf-8")
    for card in cards(found, gain):
        print(f"{card.label.lower():<10} {card.value:<14} {card.words}")
    if options.json is not None:
        with writing_beside(options.json) as part:
            tree = {"gain": plain(gain), **found.to_json()}
            part.write_text(json.dumps(tree, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(f"report     {out}")
    return 0


def gain_of(found: Findings) -> tuple[Gain | None, str]:
    """What speculation gained, or why that is not known."""
    if found.mode == "plain":
        return None, ""
    gain = measured_gain(found)
    if gain is not None:
        return gain, ""
    if found.other is not None:
        return None, "Nothing was measured: the two runs have no step in common that both have timed."
    return None, "Not measured: give a run of the same seed without speculation (tlt report RUN --against PLAIN_RUN)."
