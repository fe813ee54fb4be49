"""The options of ``tlt report``."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add them to a parser."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, e.g. runs/tiny, or a copy of it")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="RUN",
        help="another run of the same seed, such as one without speculation: measures the gain, compares tokens",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: RUN/report.html)")
    parser.add_argument("--step", type=int, metavar="N", help="whose timeline is drawn (default: a typical step)")
    parser.add_argument("--last", type=int, metavar="N", help="look at the last N steps alone (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures behind the page as JSON, too")
