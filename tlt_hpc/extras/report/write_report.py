"""``tlt report``: writes a run's report page. Heavy imports follow the first line of output."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path

from tlt_hpc.common.errors import UserError
from tlt_hpc.plan.plan_options import parse_positive_integer
from tlt_hpc.storage.folder import COMPARISON, RunFolder, WriteError, check_writable, writing_atomically


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tlt report`` to a parser."""
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the run's folder, e.g. runs/tiny, or a copy of it")
    words = "another run of the same seed, such as one without speculation: measures the gain, compares tokens"
    add("--against", type=Path, metavar="RUN", help=words)
    add("--output", type=Path, metavar="FILE", help="the page (default: RUN/report.html)")
    add("--last", type=parse_positive_integer, metavar="N", help="look at the last N steps alone (default: all)")


def run(options: argparse.Namespace) -> int:
    """Write the page and print its key figures; returns the exit status.

    Raises:
        UserError: there is no such run, an option is invalid, or the page cannot be written.
    """
    out: Path = options.output or options.run / "report.html"
    if out.suffix != ".html" or out.is_dir():  # no file of the run is overwritten
        raise UserError(f"--output {out}: give a file that ends in .html")
    check_writable(out.parent, "give another place, such as --output report.html")
    if RunFolder(options.run).is_warmup:
        see = shlex.join(("tlt", "watch", str(options.run)))
        raise UserError(f"{options.run} holds a warm-up, which has no steps to report; see `{see}`")
    print(f"reading    {options.run}", flush=True)
    from tlt_hpc.extras.report.findings import read_findings
    from tlt_hpc.extras.report.verdict import gain_of, key_figures

    against = options.against or find_plain_run(options.run)
    found = read_findings(options.run, against, options.last)
    gain = gain_of(found)
    for card in key_figures(found, gain):
        print(f"{card.label.lower():<10} {card.value:<14} {card.words}")
    print("drawing    the figures of the page", flush=True)
    from tlt_hpc.extras.report.page import render

    text = render(found, gain, time.time())
    try:
        with writing_atomically(out) as part:
            part.write_text(text, encoding="utf-8", errors="backslashreplace")  # file names need not be valid text
    except WriteError as error:
        raise UserError(f"{error.fact}; give another place, such as --output report.html") from None
    print(f"report     {out}")
    return 0


def find_plain_run(run: Path) -> Path | None:
    """The run without speculation in the same folder of ``tlt compare``; None if there is none."""
    plain = run.absolute().parent / "plain"
    return plain if COMPARISON in plain.parent.name and run.name != plain.name and plain.is_dir() else None
