"""``tlt preflight``: runs every check of a job in order, whatever the others found, and shows the results.

One process, no ranks and no GPU.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tlt_hpc.cluster.request import SlurmRequest, sbatch_arguments
from tlt_hpc.common.formatting import GB, format_count
from tlt_hpc.config import ConfigError, load_config_or_problems
from tlt_hpc.extras.preflight import job_checks, mpi, slurm_checks, system_checks
from tlt_hpc.extras.preflight.planned_job import PlannedJob
from tlt_hpc.extras.preflight.results import Finding, Level, failure_of, ok, run_check
from tlt_hpc.plan.plan_options import GPU_MEMORY, parse_gpu_gigabytes, parse_positive_integer

FOUND_FAILURES = 1
"""Exit status if a check failed."""
_TYPED = ("nodes", "partition", "account", "time")
"""Options of sbatch that the command has as well."""

CHECKS: dict[str, Callable[[PlannedJob], Finding]] = {
    "run": job_checks.check_run,
    "ranks": job_checks.check_ranks_fit,
    "sampling": job_checks.check_sampling,
    "model": job_checks.check_model,
    "data": job_checks.check_data,
    "evaluation": job_checks.check_evaluation,
    "rewards": job_checks.check_rewards,
    "drafter": job_checks.check_drafter,
    "trackers": job_checks.check_trackers,
    "memory": system_checks.check_memory,
    "disk": system_checks.check_disk,
    "run folder": system_checks.check_run_folder,
    "torch": system_checks.check_torch,
    "mpi": mpi.check_launcher,
    "ranks talk": mpi.check_rank_communication,
}
"""Checks by name, in the order of their lines."""
SLURM_CHECKS: dict[str, Callable[[PlannedJob], Finding]] = {
    "partition": slurm_checks.check_partition,
    "gpus": slurm_checks.check_gpus,
    "cores": slurm_checks.check_cores,
    "requeue": slurm_checks.check_requeue,
    "sbatch": slurm_checks.check_acceptance,
}


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``tlt preflight``."""
    add = command.add_argument
    add("config", metavar="CONFIG.toml", help="the run, e.g. jobs/qwen7b.toml")
    add("overrides", nargs="*", metavar="section.key=value", help="the same as for tlt train")
    add(
        "--script", type=Path, metavar="X.sh", help="the batch script that will be submitted; checked against Slurm too"
    )
    add(
        "--nodes",
        type=parse_positive_integer,
        metavar="N",
        help="as it will be given to sbatch (default: the script's, or 1)",
    )
    add("--partition", metavar="P", help="the same")
    add("--account", metavar="A", help="the same")
    add("--time", metavar="T", help="the same, e.g. 24:00:00 or 2-00:00:00")
    add("--gpu-memory", type=parse_gpu_gigabytes, metavar="GB", help=f"of each GPU of the job: {GPU_MEMORY}")
    add("--fix", action="store_true", help="download the model of --model-id if it does not exist")
    add("--model-id", metavar="OWNER/NAME", help="what --fix downloads to model.path")


def run(options: argparse.Namespace) -> int:
    """Check a job and print a line for each result as soon as it is known; returns the exit status.

    Raises:
        ValueError: a mistake in the command.
    """
    started, findings = time.monotonic(), list[Finding]()
    for name, finding in check_job_of_options(options):
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        print(f"{finding.level:<8} {name:<16} {finding.found}{remedy}", flush=True)
        findings.append(finding)
    counts = Counter(finding.level for finding in findings)
    words = {level: format_count(counts[level], level) for level in (Level.WARNING, Level.FAILURE)}
    numbers = ", ".join(words.get(level, f"{counts[level]} {level}") for level in Level if counts[level])
    end = "the job would fail" if counts[Level.FAILURE] else "nothing stands in the job's way"
    print(f"preflight: {numbers} in {time.monotonic() - started:.1f} s: {end}")
    return FOUND_FAILURES if counts[Level.FAILURE] else 0


def check_job_of_options(options: argparse.Namespace) -> Iterator[tuple[str, Finding]]:
    """``check_job`` by the options of the command.

    Raises:
        ConfigError: no such file, or an invalid option.
    """
    if options.model_id and not options.fix:
        raise ConfigError(f"--model-id {options.model_id} says nothing without --fix; give both")
    given = {name: str(value) for name in _TYPED if (value := vars(options)[name]) is not None}
    if given and options.script is None:
        raise ConfigError(f"{sbatch_arguments(given)[0]} without --script: give the batch script that asks for it")
    request = SlurmRequest.of_script(options.script, given) if options.script else SlurmRequest()
    model_id = (options.model_id or "") if options.fix else None
    return check_job(options.config, options.overrides, request, options.gpu_memory, model_id)


def check_job(
    path: str, overrides: Sequence[str], request: SlurmRequest, gpu_gb: float | None, model_id: str | None = None
) -> Iterator[tuple[str, Finding]]:
    """Every check's name and what it found, in order, each as soon as it is known.

    Args:
        gpu_gb: memory of each GPU, if it is known.
        model_id: downloaded if the model does not exist; None: nothing is.

    Raises:
        ConfigError: no such file, or an invalid value.
    """
    config, problems = load_config_or_problems(path, overrides)
    gpu_bytes = None if gpu_gb is None else int(gpu_gb * GB)
    job = PlannedJob(config, request, gpu_bytes)
    if gpu_bytes and config is not None and not job.uses_gpu:
        raise ConfigError("--gpu-memory for a job on CPUs; give the batch script that asks for GPUs (--script)")
    yield from (("config", failure_of(problem)) for problem in problems)
    if config is not None:
        yield "config", ok(f"{path}: {format_count(config.run.num_steps, 'step')} to {config.folder}")
        if model_id is not None:
            yield "fix model", run_check(partial(job_checks.download_missing_model, config.model, model_id))
    for name, check in (CHECKS | (SLURM_CHECKS if job.asks_slurm else {})).items():
        yield name, run_check(partial(check, job))
    if not job.asks_slurm:
        yield "slurm", Finding(Level.SKIPPED, "--script X.sh checks the batch script as well")
