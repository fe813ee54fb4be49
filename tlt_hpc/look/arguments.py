"""Command-line arguments of ``tlt report`` and ``tlt watch``. Imports nothing heavy: ``tlt --help`` reads it."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tlt report`` to a parser."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, e.g. runs/tiny, or a copy of it")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="RUN",
        help="another run of the same seed, such as one without speculation: measures the gain, compares tokens",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page (default: RUN/report.html)")
    parser.add_argument("--last", type=int, metavar="N", help="look at the last N steps alone (default: all)")


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tlt watch`` to a parser."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, e.g. runs/tiny")
    parser.add_argument("--once", action="store_true", help="print it once, after two looks, and end")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="print N responses of the newest step instead, drafted tokens coloured"
    )


def add_runs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tlt runs`` to a parser."""
    parser.description = (
        f"{parser.description}; score: its mean over the first quarter of the steps -> over the last quarter"
    )
    words = "where they are looked for (default runs), folders inside included"
    parser.add_argument("folder", type=Path, metavar="FOLDER", nargs="?", default=Path("runs"), help=words)
    parser.add_argument("--output", type=Path, metavar="FILE.csv", help="write the table there as well")
