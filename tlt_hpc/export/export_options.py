"""The options of the exports; imports nothing heavy."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tlt_hpc.config import EMBEDDED_MODEL, UserError

DtypeName = Literal["bfloat16", "float16", "float32"]
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
        UserError: an invalid option.
    """
    folder = _output(given, given.format)
    if given.place == EMBEDDED_MODEL and given.output is None:
        raise UserError(f"{EMBEDDED_MODEL} lies inside the package, which is not written to; add --output FOLDER")
    return ExportOptions(place=given.place, format=given.format, output=folder, step=given.step, model=given.model)


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """``tlt export-policy``."""

    place: str
    """A run's folder."""
    output: Path
    step: int | None
    """The checkpoint to take; None: the newest."""
    model: str | None
    """The start model, where it lies elsewhere now."""
    dtype: DtypeName
    shard_gigabytes: float
    """Most of one file of weights, in 10^9 bytes."""


def add_policy_options(command: argparse.ArgumentParser) -> None:
    """The options, on the parser of ``tlt export-policy``."""
    add = command.add_argument
    add("place", metavar="RUN", help="a run's folder")
    add("--output", type=Path, metavar="FOLDER", help="where to write it (default RUN/export/policy)")
    add("--step", type=int, metavar="N", help="take the checkpoint of this step (default: the newest)")
    add("--model", metavar="FOLDER", help="the model that the run began with, where it has moved")
    add("--dtype", choices=get_args(DtypeName), default="bfloat16", help="of the weights (default bfloat16)")
    add("--shard-gb", type=float, default=5.0, metavar="GB", help="most of one file of weights (default 5)")


def read_policy_options(given: argparse.Namespace) -> PolicyOptions:
    """The options, completed and checked.

    Raises:
        UserError: an invalid option.
    """
    folder = _output(given, "policy")
    if not 0.001 <= given.shard_gb < math.inf:
        raise UserError(f"--shard-gb {given.shard_gb}: give at least 0.001, e.g. 5")
    return PolicyOptions(
        place=given.place,
        output=folder,
        step=given.step,
        model=given.model,
        dtype=given.dtype,
        shard_gigabytes=given.shard_gb,
    )


def _output(given: argparse.Namespace, name: str) -> Path:
    """Where to write an export of this name, if the user did not say."""
    if given.step is not None and given.step < 1:
        raise UserError(f"--step {given.step} is no checkpoint; use the number of a folder below RUN/checkpoints")
    of_step = "" if given.step is None else f"-step-{given.step:06d}"
    return given.output or Path(given.place) / "export" / f"{name}{of_step}"
