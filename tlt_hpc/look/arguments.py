"""Command-line arguments of ``tlt watch`` and ``tlt runs``. Imports nothing heavy: ``tlt --help`` reads it."""

from __future__ import annotations

import argparse
from pathlib import Path

from tlt_hpc.plan.plan_options import parse_positive_integer


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tlt watch`` to a parser."""
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the run's folder, e.g. runs/tiny")
    add("--once", action="store_true", help="print it once, after two looks, and end")
    words = "print N responses of the newest step instead, drafted tokens coloured"
    add("--sample", type=parse_positive_integer, metavar="N", help=words)


def add_runs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tlt runs`` to a parser."""
    parser.description = (
        f"{parser.description}; score: its mean over the first quarter of the steps -> over the last quarter"
    )
    words = "where they are looked for (default runs), folders inside included"
    parser.add_argument("folder", type=Path, metavar="FOLDER", nargs="?", default=Path("runs"), help=words)
    parser.add_argument("--output", type=Path, metavar="FILE.csv", help="write the table there as well")
