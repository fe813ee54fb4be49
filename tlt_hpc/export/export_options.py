"""The options of the exports; imports nothing heavy."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.config import EMBEDDED_MODEL, UserError

FORMATS = ("sglang", "vllm")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of ``tlt export-drafter`` and ``tlt export-policy``."""

    place: str
    """A run's folder; of a drafter also a folder with its file, or ``embedded:tiny``."""
    output: Path
    step: int | None
    """The checkpoint to take; None: the newest."""
    model: str | None
    """The target or start model, if the run does not name it, or it has moved."""
    kind: str
    """The engine that is to load a drafter, or the type of a policy's weights."""


def add_drafter_options(command: argparse.ArgumentParser) -> None:
    """The options, on the parser of ``tlt export-drafter``."""
    command.add_argument("place", metavar="RUN", help="a run's folder, one with drafter.safetensors, or embedded:tiny")
    command.add_argument("--format", dest="kind", required=True, choices=FORMATS, help="the engine that is to load it")
    _add_common(command, "FORMAT")


def add_policy_options(command: argparse.ArgumentParser) -> None:
    """The options, on the parser of ``tlt export-policy``."""
    command.add_argument("place", metavar="RUN", help="a run's folder")
    command.add_argument(
        "--dtype", dest="kind", choices=DTYPES, default="bfloat16", help="of the weights (default bfloat16)"
    )
    _add_common(command, "policy")


def _add_common(command: argparse.ArgumentParser, name: str) -> None:
    command.add_argument("--output", type=Path, metavar="FOLDER", help=f"where to write it (default RUN/export/{name})")
    command.add_argument("--step", type=int, metavar="N", help="take the checkpoint of this step (default: the newest)")
    command.add_argument("--model", metavar="FOLDER", help="the model, if RUN does not name it or it has moved")


def read_options(given: argparse.Namespace) -> ExportOptions:
    """The options, completed and checked.

    Raises:
        UserError: an invalid option.
    """
    if given.step is not None and given.step < 1:
        raise UserError(f"--step {given.step} is no checkpoint; use the number of a folder below RUN/checkpoints")
    if given.place == EMBEDDED_MODEL and given.output is None:
        raise UserError(f"{EMBEDDED_MODEL} lies inside the package, which is not written to; add --output FOLDER")
    name = (given.kind if given.kind in FORMATS else "policy") + (f"-step-{given.step:06d}" if given.step else "")
    output = given.output or Path(given.place) / "export" / name
    return ExportOptions(place=given.place, output=output, step=given.step, model=given.model, kind=given.kind)
