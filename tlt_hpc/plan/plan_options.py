"""The command line of ``tlt plan``, and types of options; imports nothing heavy."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress

GPU_GB = {"l4": 23.5, "rtx4090": 25.2, "a100-40": 42.2, "l40s": 47.6, "a100-80": 84.9, "h100-80": 84.9, "h200": 150.0}
"""What CUDA reports of well-known GPUs, in GB of 10^9 bytes, rounded down: "80 GB" are nearly 80 GiB."""
GPU_MEMORY = f"in GB of 10^9 bytes, or {', '.join(GPU_GB)}"


def parse_positive_integer(text: str) -> int:
    """A whole number of 1 or more; argparse names the option of any other."""
    return _parse_integer_at_least(1, text)


def parse_non_negative_integer(text: str) -> int:
    """A whole number of 0 or more."""
    return _parse_integer_at_least(0, text)


def _parse_integer_at_least(least: int, text: str) -> int:
    if not text.strip().isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: use whole numbers of {least} or more")
    return int(text)


def parse_positive_integers(text: str) -> list[int]:
    """Whole numbers of 1 or more that commas separate."""
    return list(map(parse_positive_integer, text.split(",")))


def parse_positive_number(text: str) -> float:
    """A finite number above 0."""
    with suppress(ValueError):
        if 0 < float(text) <= sys.float_info.max:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")


def parse_gpu_gigabytes(text: str) -> float:
    """GB of a GPU that is given by name or by number."""
    try:
        return GPU_GB.get(text.lower()) or parse_positive_number(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r}: give it {GPU_MEMORY}") from None


def add_plan_options(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tlt plan``."""
    add = command.add_argument
    add("config", metavar="CONFIG.toml", help="the run, e.g. jobs/qwen7b.toml")
    add("overrides", nargs="*", metavar="section.key=value", help="e.g. rollout.max_live=8")
    add(
        "--gpus-per-node",
        type=parse_positive_integer,
        metavar="N",
        help="one rank each; without: CPUs, run.ranks of a node",
    )
    add("--nodes", type=parse_positive_integer, default=1, metavar="N", help="default 1")
    add("--gpu-memory", type=parse_gpu_gigabytes, metavar="GB", help=f"of each GPU: {GPU_MEMORY}")
    add("--host-memory", type=parse_positive_number, metavar="GB", help="of each node")
    add("--shape", metavar="CONFIG.json", help="the model's config.json, or a known name such as Qwen2.5-7B")
