"""The options of ``tlt watch``."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_watch_options(parser: argparse.ArgumentParser) -> None:
    """Add them to a parser."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, e.g. runs/tiny")
    parser.add_argument("--once", action="store_true", help="print it once, after two looks, and end")
    parser.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds between looks (default 2)")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="print N responses of the newest step instead, drafted tokens coloured"
    )
    parser.add_argument("--seed", type=int, help="draws the same ones each time")
