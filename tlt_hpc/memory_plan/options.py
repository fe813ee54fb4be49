"""The command line of ``tlt plan``. Loads nothing heavy."""

from __future__ import annotations

import argparse


def add_plan_options(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tlt plan``."""
    command.add_argument("config", metavar="CONFIG.toml", help="the run, e.g. jobs/qwen7b.toml")
    command.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. rollout.max_live=8")
    command.add_argument("--gpus", type=int, metavar="N", help="GPUs of a node, one rank each; without: CPUs")
    command.add_argument("--ranks", type=int, metavar="N", help="all ranks (default: one node's, or run.ranks)")
    command.add_argument("--gpu-memory", type=float, metavar="GB", help="of each GPU, in GB of 10^9 bytes")
    command.add_argument("--host-memory", type=float, metavar="GB", help="of each node")
    command.add_argument(
        "--shape", metavar="CONFIG.json", help="the model's config.json, or a known name such as Qwen2.5-7B"
    )
    command.add_argument("--json", action="store_true", help="print all figures in bytes, as JSON")
