"""The command lines of ``tlt plan``, ``tlt preflight`` and ``tlt simulate``; imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

GPU_GB = {"a100-40": 42.2, "a100-80": 84.9, "h100-80": 84.9, "h200": 150.0}
"""What CUDA reports of well-known GPUs, in GB of 10^9 bytes, rounded down: "80 GB" are nearly 80 GiB."""
_GPU_MEMORY = f"in GB of 10^9 bytes, or {', '.join(GPU_GB)}"


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
    add = command.add_argument
    add("config", metavar="CONFIG.toml", help="the run, e.g. jobs/qwen7b.toml")
    add("overrides", nargs="*", metavar="section.key=value", help="e.g. rollout.max_live=8")
    add("--gpus", type=int, metavar="N", help="GPUs of a node, one rank each; without: CPUs")
    add("--ranks", type=int, metavar="N", help="all ranks (default: one node's, or run.ranks)")
    add("--gpu-memory", type=gpu_gb, metavar="GB", help=f"of each GPU: {_GPU_MEMORY}")
    add("--host-memory", type=float, metavar="GB", help="of each node")
    add("--shape", metavar="CONFIG.json", help="the model's config.json, or a known name such as Qwen2.5-7B")
    add("--json", action="store_true", help="print all figures in bytes, as JSON")


def add_preflight_options(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tlt preflight``."""
    add = command.add_argument
    add("config", metavar="CONFIG.toml", help="the run, e.g. jobs/qwen7b.toml")
    add("overrides", nargs="*", metavar="section.key=value", help="the same as for tlt train")
    add("--slurm", action="store_true", help="check the job against Slurm's limits too")
    add("--script", type=Path, metavar="X.sh", help="read what is requested of Slurm from a batch script")
    add("--nodes", type=int, metavar="N", help="(default: the script's, or 1)")
    add("--ranks-per-node", type=int, metavar="R", help="(default: the script's, or one a GPU)")
    add("--gpus-per-node", type=int, metavar="G", help="(default: the script's, or none)")
    add("--cpus-per-rank", type=int, metavar="C", help="(default: the script's, or 1)")
    add("--partition", metavar="P", help="(default: the script's, or Slurm's own)")
    add("--account", metavar="A")
    add("--time", metavar="T", help="in sbatch's format, e.g. 24:00:00 or 2-00:00:00")
    add("--gpu-memory", type=gpu_gb, metavar="GB", help=f"of each GPU of the job: {_GPU_MEMORY}")
    add("--fix", action="store_true", help="make missing folders; with --model-id download the model")
    add("--model-id", metavar="OWNER/NAME", help="what --fix downloads if model.path does not exist")
    add("--json", type=Path, metavar="PATH", help="write the results there as well")


def add_simulate_options(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tlt simulate``."""
    add = command.add_argument
    add("config", metavar="CONFIG.toml", nargs="?", help="the run, e.g. jobs/qwen7b.toml")
    add("overrides", nargs="*", metavar="section.key=value", help="e.g. rollout.max_live=8")
    add("--nodes", default="1,2,4,8", metavar="N,N", help="numbers of nodes (default 1,2,4,8)")
    add("--gpus", type=int, metavar="N", help="ranks of a node (default 8; with --from the run's)")
    add("--from", dest="source", type=Path, metavar="RUN", help="lengths, rounds and phases of this run's log")
    add("--median", type=float, metavar="TOKENS", help="of the log-normal law (default a sixth of the cap)")
    add("--steps", type=int, default=20, metavar="N", help="steps that are simulated (default 20)")
    add("--shape", metavar="CONFIG.json", help="the model's config.json, or a name such as Qwen2.5-7B")
    add("--json", action="store_true", help="print all figures as JSON")
    validate = "compare predictions with recorded runs; status 1: over 10 %% off"
    add("--validate", nargs="+", type=Path, metavar="RUN", help=validate)
