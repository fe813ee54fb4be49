"""The command line of ``tlt preflight``. Loads nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from tlt_hpc.plan.memory.options import GPU_MEMORY_HELP, gpu_gb


def add_preflight_options(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tlt preflight``."""
    command.add_argument("config", metavar="CONFIG.toml", help="the run, e.g. jobs/qwen7b.toml")
    command.add_argument("overrides", nargs="*", metavar="section.key=value", help="as tlt train is to be given them")
    command.add_argument("--slurm", action="store_true", help="hold the job against Slurm's limits too")
    command.add_argument("--script", type=Path, metavar="X.sh", help="take what is asked of Slurm from a batch script")
    command.add_argument("--nodes", type=int, metavar="N", help="(default: the script's, or 1)")
    command.add_argument("--ranks-per-node", type=int, metavar="R", help="(default: the script's, or one a GPU)")
    command.add_argument("--gpus-per-node", type=int, metavar="G", help="(default: the script's, or none)")
    command.add_argument("--cpus-per-rank", type=int, metavar="C", help="(default: the script's, or 1)")
    command.add_argument("--partition", metavar="P", help="(default: the script's, or Slurm's own)")
    command.add_argument("--account", metavar="A")
    command.add_argument("--time", metavar="T", help="as sbatch takes it, e.g. 24:00:00 or 2-00:00:00")
    command.add_argument("--gpu-memory", type=gpu_gb, metavar="GB", help=f"of each GPU of the job: {GPU_MEMORY_HELP}")
    command.add_argument("--fix", action="store_true", help="make missing folders; with --model-id fetch the model")
    command.add_argument("--model-id", metavar="OWNER/NAME", help="what --fix fetches where model.path does not exist")
    command.add_argument("--json", type=Path, metavar="PATH", help="write the verdicts there as well")
