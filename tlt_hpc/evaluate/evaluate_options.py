"""The options of ``tlt evaluate``. Knows no heavy library."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class EvaluateOptions:
    """What to evaluate, as the user names it, and where to write."""

    place: str
    step: int | None = None
    """Of the checkpoint; None: the newest."""
    out: Path | None = None


def add_evaluate_options(parser: argparse.ArgumentParser) -> None:
    """Add what stands before the configuration, and the options."""
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a run's folder, one of its checkpoints, a Hugging Face folder, or "
        "embedded:tiny",
    )  # fmt: skip
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of that step instead of the newest")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write there instead of beside the run")


def read_options(options: argparse.Namespace) -> EvaluateOptions:
    """The options as they are used."""
    return EvaluateOptions(options.checkpoint, options.step, options.out)
