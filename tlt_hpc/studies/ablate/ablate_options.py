"""The options of ``tlt ablate``: what may be asked for, and what makes no sense. Knows nothing heavy."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tlt_hpc.config import UserError

ArmName = Literal["plain", "ngram", "frozen", "frozen-tv", "serial", "tail", "control", "tail-random"]
ARMS: tuple[ArmName, ...] = get_args(ArmName)
"""In the order in which they run: the control repeats the tail's updates."""


@dataclass(frozen=True)
class AblateOptions:
    """What was asked for; None where the default is meant, or what a resumed ablation has."""

    num_steps: int | None
    arms: tuple[ArmName, ...] | None
    tv_drafter: str | None
    resume: Path | None
    json: Path | None
    plot: Path | None


def add_ablate_options(command: argparse.ArgumentParser) -> None:
    """The options beside the configuration and its overrides."""
    add = command.add_argument
    add("--steps", type=int, metavar="N", help="steps of each arm (default 30)")
    add("--arms", metavar="ARM,...", help=f"of {','.join(ARMS)} (default: all that the job can have but tail-random)")
    add("--tv-drafter", metavar="FOLDER", help="drafter of frozen-tv, in place of a warm-up with that loss")
    add("--resume", type=Path, metavar="FOLDER", help="go on with this ablation; --steps and --arms may add to it")
    add("--json", type=Path, metavar="PATH", help="write the figures there as well")
    add("--plot", type=Path, metavar="PATH.png", help="write the picture there as well, as PNG and SVG")


def read_options(given: argparse.Namespace) -> AblateOptions:
    """The options, checked.

    Raises:
        UserError: an option that makes no sense.
    """
    options = AblateOptions(
        num_steps=given.steps,
        arms=None if given.arms is None else read_arms(given.arms),
        tv_drafter=given.tv_drafter,
        resume=given.resume,
        json=given.json,
        plot=given.plot,
    )
    if options.num_steps is not None and options.num_steps < 1:
        raise UserError(f"--steps {options.num_steps} compares nothing; use 1 or more")
    for name, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{name} {path}: its folder does not exist; make it first")
    if options.plot is not None and options.plot.suffix != ".png":
        raise UserError(f"--plot {options.plot}: give a name that ends in .png; the SVG is written beside it")
    return options


def read_arms(text: str) -> tuple[ArmName, ...]:
    """The arms of a list with commas, each once, in the order in which they run.

    Raises:
        UserError: no such arm, or one without the arm that it follows.
    """
    names = text.split(",")
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise UserError(f"--arms {text}: there is no arm {unknown[0]!r}; use {', '.join(ARMS)}")
    if "control" in names and "tail" not in names:
        raise UserError(f"--arms {text}: control repeats the tail's updates on other rollouts; add tail")
    return tuple(arm for arm in ARMS if arm in names)
