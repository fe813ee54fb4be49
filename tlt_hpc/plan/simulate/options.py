"""The command line of ``tlt simulate``. Loads nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_simulate_options(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tlt simulate``."""
    command.add_argument("config", metavar="CONFIG.toml", nargs="?", help="the run, e.g. jobs/qwen7b.toml")
    command.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. rollout.max_live=8")
    command.add_argument("--nodes", default="1,2,4,8", metavar="N,N", help="numbers of nodes (default 1,2,4,8)")
    command.add_argument("--gpus", type=int, metavar="N", help="ranks of a node (default 8; with --from the run's)")
    command.add_argument(
        "--at", type=int, metavar="N", help="nodes at which settings are tried (default: most that all have work)"
    )
    command.add_argument(
        "--from", dest="source", type=Path, metavar="RUN", help="lengths, rounds and phases of this run's log"
    )
    command.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="rounds from a cost profile, TLT_CACHE's or a run's; with --from the run's lengths and chances",
    )
    command.add_argument(
        "--chance",
        type=float,
        metavar="P",
        help="with --profile: chance that the drafter's next draft stands (default: as --from RUN has it, or 0.8)",
    )
    command.add_argument(
        "--ngram-chance", type=float, metavar="P", help="the same of n-grams (default: as --from RUN has it, or 0.5)"
    )
    command.add_argument("--lengths", type=Path, metavar="FILE", help="a response length each; not a log-normal law")
    command.add_argument(
        "--median", type=float, metavar="TOKENS", help="of the log-normal law (default a sixth of the cap)"
    )
    command.add_argument("--spread", type=float, metavar="S", help="standard deviation of a log length (default 0.9)")
    command.add_argument(
        "--prompt-share", type=float, default=0.5, metavar="S", help="of that variance, between prompts (default 0.5)"
    )
    command.add_argument(
        "--prediction-error", type=float, default=0.5, metavar="S", help="of a log length (default 0.5)"
    )
    command.add_argument("--watts", default="", metavar="PHASE=W,..", help="a GPU's: decode, train, wait, update")
    command.add_argument("--steps", type=int, default=20, metavar="N", help="steps that are simulated (default 20)")
    command.add_argument("--seed", type=int, default=0, help="of the drawn lengths (default 0)")
    command.add_argument("--shape", metavar="CONFIG.json", help="the model's config.json, or a name such as Qwen2.5-7B")
    command.add_argument("--json", action="store_true", help="print all figures as JSON")
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw step seconds and gain by nodes: .png or .svg")
    command.add_argument(
        "--validate",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="hold the model against recorded runs; status 1: over 10 %%",
    )
    command.add_argument(
        "--paper", action="store_true", help="the TLT paper's gains, predicted from one of them; status 1: over 10 %%"
    )
