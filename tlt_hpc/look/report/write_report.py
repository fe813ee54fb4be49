"""``tlt report``: writes a run's report page. Heavy imports follow the first line of output."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from tlt_hpc.common.errors import UserError
from tlt_hpc.storage.folder import WriteError, writing_beside


def run(options: argparse.Namespace) -> int:
    """Write the page and print its key figures; returns the exit status.

    Raises:
        UserError: there is no such run or step, an option is invalid, or the page cannot be written.
    """
    _check(options)
    out: Path = options.output or options.run / "report.html"
    print(f"reading    {options.run}", flush=True)
    from tlt_hpc.look.analysis.base import plain
    from tlt_hpc.look.report.findings import find
    from tlt_hpc.look.report.gain import gain_of
    from tlt_hpc.look.report.verdict import cards

    found = find(options.run, options.against, options.step, options.last)
    gain, why_none = gain_of(found)
    for card in cards(found, gain):
        print(f"{card.label.lower():<10} {card.value:<14} {card.words}")
    print("drawing    the figures of the page", flush=True)
    from tlt_hpc.look.report.page import render

    _write(out, render(found, gain, why_none, time.time(), is_typical=options.step is None))
    if options.json is not None:
        _write(options.json, json.dumps({"gain": plain(gain), **found.to_json()}, indent=1, allow_nan=False) + "\n")
    print(f"report     {out}")
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.last is not None and options.last < 1:
        raise UserError(f"--last {options.last}: give 1 or more")
    for name, path, ending in (("--output", options.output, ".html"), ("--json", options.json, ".json")):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{name} {path}: its folder does not exist; make it first")
        if path is not None and path.is_dir():
            raise UserError(f"{name} {path} is a folder; give a file")
        if path is not None and path.suffix != ending:  # no file of the run is overwritten
            raise UserError(f"{name} {path}: give a file that ends in {ending}")


def _write(path: Path, text: str) -> None:
    try:
        with writing_beside(path) as part:
            part.write_text(text, encoding="utf-8", errors="backslashreplace")  # file names need not be valid text
    except WriteError as error:
        raise UserError(f"{error.fact}; give another place, such as --output report.html") from None
