"""Submits a run, or a sweep of runs, to Slurm as one array; knows submitit, and of a run its configuration only.

    python jobs/submit.py jobs/qwen7b.toml --nodes 8 --gpus-per-node 8 --partition gpu --sweep run.seed=0,1,2

Every member of the sweep is checked before any is submitted, gets its own ``run.name`` and runs ``tlt train`` on all
its ranks. Call it where the ranks are to start: relative paths in a configuration are read from there.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import runpy
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt_hpc.cli import STOPPED_EARLY, USER_ERROR
from tlt_hpc.config import Config, ConfigError, load_config

ENVIRONMENT = Path(__file__).resolve().parent.parent / "sbatch" / "env.sh"
SIGNAL_SECONDS = 120
"""How long before its time limit a job is told to save and stop."""


@dataclass(frozen=True)
class Member:
    """One run of the sweep: its configuration and the arguments of ``tlt`` that lead to it."""

    config: Config
    arguments: tuple[str, ...]


def main(given: Sequence[str] | None = None) -> int:
    """Check and submit; returns the exit status."""
    options = parse(given)
    try:
        members = make_members(options.config, options.overrides, options.sweep, local=options.local)
        check(members, 1 if options.local else options.nodes * ranks_per_node(options))
    except ValueError as error:
        print(f"submit: {error}", file=sys.stderr)
        return USER_ERROR
    for member in members:
        print(f"{member.config.folder}: tlt {' '.join(member.arguments)}")
    if options.dry_run:
        print("\n".join(f"{name} = {value}" for name, value in executor_settings(options).items()))
        return 0
    return submit(options, members)


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="submit.py", description="Submit a run, or a sweep of runs, as one Slurm array."
    )
    parser.add_argument("config", metavar="CONFIG.toml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for every member")
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="section.key=A,B,..", help="a member each; repeat for a grid"
    )
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=0, help="one rank each")
    parser.add_argument("--ranks-per-node", type=int, help="where it is not the number of GPUs")
    parser.add_argument("--cpus-per-rank", type=int, default=1)
    parser.add_argument("--partition")
    parser.add_argument("--account")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument(
        "--mpi", default=os.environ.get("TLT_SRUN_MPI", "pmix"), help="srun's --mpi: pmix, or pmi2 for MPICH"
    )
    parser.add_argument("--at-once", type=int, default=256, help="members that may run together")
    parser.add_argument("--logs", type=Path, default=Path("runs/submitit"))
    parser.add_argument("--local", action="store_true", help="on this machine, one rank a member")
    parser.add_argument("--dry-run", action="store_true", help="check everything and show it; submit nothing")
    return parser.parse_intermixed_args(given)


def make_members(config: str, overrides: Sequence[str], sweeps: Sequence[str], *, local: bool = False) -> list[Member]:
    """The grid of all sweeps, as loaded configurations.

    Raises:
        ConfigError: a member's configuration is wrong, or two members would write to one folder.
    """
    members = []
    base = load_config(config, overrides).run.name
    for values in itertools.product(*map(expand, sweeps)):
        own = [*overrides, *values]
        if values:
            own.append(f"run.name={'-'.join([base, *map(label, values)])}")
        if local:
            own.append("run.ranks=1")
        members.append(Member(load_config(config, own), ("train", config, *own)))
    names = [member.config.run.name for member in members]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--sweep gives run.name = {twice!r} to two members; remove the value that stands twice")
    return members


def expand(sweep: str) -> list[str]:
    """The overrides that ``section.key=A,B`` stands for."""
    key, separator, values = sweep.partition("=")
    if not separator or not all(values.split(",")):
        raise ConfigError(f"--sweep {sweep!r} is not of the form section.key=A,B, e.g. run.seed=0,1,2")
    return [f"{key}={value}" for value in values.split(",")]


def label(override: str) -> str:
    """A member's part of its run's name, e.g. ``seed0``."""
    key, _, value = override.partition("=")
    return re.sub(r"[^A-Za-z0-9._-]", "_", key.rpartition(".")[2] + value)


def check(members: Sequence[Member], num_ranks: int) -> None:
    """Hold every member against its model, data and rank count, as ``tlt train --dry-run`` does.

    Raises:
        ValueError: in one line, of the first member that would fail.
    """
    from tlt_hpc.plan import read_assets

    for member in members:
        try:
            read_assets(member.config, num_ranks)
        except ValueError as error:
            raise ConfigError(f"{member.config.run.name}: {error}") from None


def ranks_per_node(options: argparse.Namespace) -> int:
    """One rank a GPU unless it is said otherwise."""
    return int(options.ranks_per_node or options.gpus_per_node or 1)


def executor_settings(options: argparse.Namespace) -> dict[str, Any]:
    """What submitit is told about every job of the array."""
    minutes = round(60 * options.hours)
    if options.local:
        return {"timeout_min": minutes}
    settings = {
        "timeout_min": minutes,
        "nodes": options.nodes,
        "tasks_per_node": ranks_per_node(options),
        "cpus_per_task": options.cpus_per_rank,
        "gpus_per_node": options.gpus_per_node or None,
        "slurm_partition": options.partition,
        "slurm_account": options.account,
        "slurm_array_parallelism": options.at_once,
        "slurm_signal_delay_s": SIGNAL_SECONDS,
        # a rank that dies takes the others with it instead of leaving them in a collective
        "slurm_srun_args": [f"--mpi={options.mpi}", "--kill-on-bad-exit=1", f"--cpus-per-task={options.cpus_per_rank}"],
        "slurm_setup": [f"source {shlex.quote(str(ENVIRONMENT))}"],
        "slurm_additional_parameters": {"requeue": True},
    }
    return {name: value for name, value in settings.items() if value is not None}


def submit(options: argparse.Namespace, members: Sequence[Member]) -> int:
    """Submit all members as one array; ``--local`` waits for them, one after another."""
    import submitit

    executor = submitit.AutoExecutor(folder=options.logs / "%j", cluster="local" if options.local else "slurm")
    executor.update_parameters(name=members[0].config.run.name, **executor_settings(options))
    if options.local:
        return max(int(executor.submit(run_rank, member.arguments).result()) for member in members)
    jobs = executor.map_array(run_rank, [member.arguments for member in members])
    for job, member in zip(jobs, members, strict=True):
        print(f"job {job.job_id}: {member.config.folder}, log {job.paths.stdout}")
    return 0


def run_rank(arguments: Sequence[str]) -> int:
    """This rank's part of ``tlt ARGUMENTS``; returns its exit status. submitit calls it in every task of a job.

    It goes through mpi4py's runner, as in a batch script, so that a rank which raises ends the whole job.

    Raises:
        RuntimeError: the command failed.
    """
    sys.argv = ["mpi4py", "-m", "tlt_hpc", *arguments]
    try:
        runpy.run_module("mpi4py", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code not in (0, None, STOPPED_EARLY):
            raise RuntimeError(f"tlt {' '.join(arguments)} ended with status {end.code}; its log says why") from None
        return int(end.code or 0)
    raise AssertionError("the command always ends by SystemExit")


if __name__ == "__main__":
    sys.exit(main())
