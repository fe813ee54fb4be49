"""The command line of ``tlt plan``. Loads nothing heavy."""

from __future__ import annotations

import argparse

GPU_GB = {"a100-40": 42.2, "a100-80": 84.9, "h100-80": 84.9, "h200": 150.0}
"""What CUDA reports of well-known GPUs, in GB of 10^9 bytes, rounded down: "80 GB" are nearly 80 GiB."""
GPU_MEMORY_HELP = f"in GB of 10^9 bytes, or {', '.join(GPU_GB)}"


def gpu_gb(text: str) -> float:
    """GB of a GPU that is given by name or by number.

    Raises:
        ArgumentTypeError: it is neither.
    """
    if text.lower() in GPU_GB:
        return GPU_GB[text.lower()]
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of GB, or {', '.join(GPU_GB)}") from None


def add_plan_options(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tlt plan``."""
    command.add_argument("config", metavar="CONFIG.toml", help="the run, e.g. jobs/qwen7b.toml")
    command.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. rollout.max_live=8")
    command.add_argument("--gpus", type=int, metavar="N", help="GPUs of a node, one rank each; without: CPUs")
    command.add_argument("--ranks", type=int, metavar="N", help="all ranks (default: one node's, or run.ranks)")
    command.add_argument("--gpu-memory", type=gpu_gb, metavar="GB", help=f"of each GPU: {GPU_MEMORY_HELP}")
    command.add_argument("--host-memory", type=float, metavar="GB", help="of each node")
    command.add_argument(
        "--shape", metavar="CONFIG.json", help="the model's config.json, or a known name such as Qwen2.5-7B"
    )
    command.add_argument("--json", action="store_true", help="print all figures in bytes, as JSON")
