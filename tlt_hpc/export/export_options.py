"""The options of the exports; imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from tlt_hpc.config import EMBEDDED_MODEL, UserError

DTYPES = ("bfloat16", "float16", "float32")


def add_policy_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``tlt export-policy``."""
    command.add_argument("place", metavar="RUN", help="a run's folder")
    command.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights (default bfloat16)")
    command.add_argument("--adapter", action="store_true", help="write the adapters of lora.rank alone, for peft")
    add_common_options(command, "policy")


def add_step_option(command: argparse.ArgumentParser, words: str) -> None:
    """Add the option of the commands that read a checkpoint of a run."""
    command.add_argument("--step", type=number_or_best, metavar="N", help=f"{words}, or best: of the best evaluation")


def number_or_best(text: str) -> int | str:
    """The number of a step, or the word ``best``; for argparse.

    Raises:
        argparse.ArgumentTypeError: the text is neither.
    """
    if text != "best" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: use the number of a step, or best")
    return text if text == "best" else int(text)


def add_common_options(command: argparse.ArgumentParser, name: str) -> None:
    """Add the options that both exports have; ``name``: of the folder that is written."""
    command.add_argument("--output", type=Path, metavar="FOLDER", help=f"where to write it (default RUN/export/{name})")
    add_step_option(command, "take the checkpoint of this step (default: the newest)")
    command.add_argument("--model", metavar="FOLDER", help="the model, if RUN does not name it or it has moved")


def output_folder(options: argparse.Namespace, name: str) -> Path:
    """The folder that an export called ``name`` is written to.

    Raises:
        UserError: no place is given, and there is no run to write beside.
    """
    if options.output is not None:
        return Path(options.output)
    if options.place == EMBEDDED_MODEL:
        raise UserError(f"{EMBEDDED_MODEL} lies inside the package, which is not written to; add --output FOLDER")
    return Path(options.place) / "export" / (name if options.step is None else f"{name}-step-{options.step:06d}")
