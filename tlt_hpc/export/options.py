"""The options of ``tlt export-drafter``: what may be asked for, and what makes no sense. Knows nothing heavy."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.config import EMBEDDED_MODEL, UserError

FORMATS = ("sglang", "vllm", "speculators", "eagle")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """``tlt export-drafter``."""

    place: str
    """A run's folder, a folder with a drafter's file, or ``embedded:tiny``."""
    format: str
    output: Path
    step: int | None
    """The checkpoint to take; None: the newest."""
    model: str | None
    """The target, where the drafter's folder does not name it, or names a place that is elsewhere now."""


def add_export_options(command: argparse.ArgumentParser) -> None:
    """The options, on the parser of ``tlt export-drafter``."""
    add = command.add_argument
    add("place", metavar="RUN", help="a run's folder, a folder with drafter.safetensors, or embedded:tiny")
    add("--format", required=True, choices=FORMATS, help="who is to load it; eagle: EAGLE's reference code")
    add("--output", type=Path, metavar="FOLDER", help="where to write it (default RUN/export/FORMAT)")
    add("--step", type=int, metavar="N", help="take the checkpoint of this step (default: the newest)")
    add("--model", metavar="FOLDER", help="the target model, where RUN does not say or it has moved")


def read_options(given: argparse.Namespace) -> ExportOptions:
    """The options, completed and checked.

    Raises:
        UserError: an option that makes no sense.
    """
    if given.step is not None and given.step < 1:
        raise UserError(f"--step {given.step} is no checkpoint; use the number of a folder below RUN/checkpoints")
    if given.place == EMBEDDED_MODEL and given.output is None:
        raise UserError(f"{EMBEDDED_MODEL} lies inside the package, which is not written to; add --output FOLDER")
    name = given.format if given.step is None else f"{given.format}-step-{given.step:06d}"
    output = given.output or Path(given.place) / "export" / name
    return ExportOptions(place=given.place, format=given.format, output=output, step=given.step, model=given.model)
