"""``tlt preflight``: runs every check of a job in order, whatever the others found, and shows the results.

One process, no ranks and no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.text import Text

from tlt_hpc.common.console import TextConsole
from tlt_hpc.common.words import count
from tlt_hpc.config import ConfigError, find_problems
from tlt_hpc.plan.preflight import fix, job_checks, mpi, slurm_checks, system_checks
from tlt_hpc.plan.preflight.planned_job import PlannedJob
from tlt_hpc.plan.preflight.request import make_request
from tlt_hpc.plan.preflight.results import Finding, Level, failure_of, judge, ok

FOUND_FAILURES = 1
"""Exit status if a check failed."""
_GB = 1_000_000_000

CHECKS: dict[str, Callable[[PlannedJob], Finding]] = {
    "run": job_checks.check_run,
    "ranks": job_checks.check_ranks_fit,
    "model": job_checks.check_model,
    "data": job_checks.check_data,
    "evaluation": job_checks.check_evaluation,
    "rewards": job_checks.check_rewards,
    "drafter": job_checks.check_drafter,
    "trackers": job_checks.check_trackers,
    "memory": system_checks.check_memory,
    "disk": system_checks.check_disk,
    "run folder": system_checks.check_run_folder,
    "python": system_checks.check_python,
    "packages": system_checks.check_packages,
    "torch": system_checks.check_torch,
    "mpi": mpi.check_launcher,
    "ranks talk": mpi.check_talk,
}
"""Checks by name, in the order of their lines."""
SLURM_CHECKS: dict[str, Callable[[PlannedJob], Finding]] = {
    **{name: partial(slurm_checks.check_partition, name) for name in slurm_checks.PARTITION_CHECKS},
    "requeue": slurm_checks.check_requeue,
    "sbatch": slurm_checks.check_acceptance,
}

Result = tuple[str, Finding]
"""A check's name and what it found."""


def run(options: argparse.Namespace) -> int:
    """Check a job and print the results; returns the exit status.

    Raises:
        ValueError: a mistake in the command.
    """
    started, results = time.monotonic(), list[Result]()
    for name, finding in all_results(options):
        show(name, finding)
        results.append((name, finding))
    print(summary([finding for _, finding in results], time.monotonic() - started))
    status = FOUND_FAILURES if any(finding.level == Level.FAILURE for _, finding in results) else 0
    if options.json is not None:
        write_json(options.json, results, status)
    return status


def all_results(options: argparse.Namespace) -> Iterator[Result]:
    """Every check's result, in order, each as soon as it is known.

    Raises:
        ConfigError: no such file, or an invalid option.
    """
    if options.model_id and not options.fix:
        raise ConfigError(f"--model-id {options.model_id} says nothing without --fix; give both")
    if options.gpu_memory is not None and not 0 < options.gpu_memory < math.inf:
        raise ConfigError(f"--gpu-memory {options.gpu_memory:g}: give a number above 0")
    if options.json is not None and not options.json.parent.is_dir():
        raise ConfigError(f"--json {options.json}: its folder does not exist; make it first")
    config, problems = find_problems(options.config, options.overrides)
    gpu_bytes = None if options.gpu_memory is None else int(options.gpu_memory * _GB)
    job = PlannedJob(config, make_request(options), options.slurm or options.script is not None, gpu_bytes)
    yield from (("config", failure_of(problem)) for problem in problems)
    if config is not None:
        yield "config", ok(f"{options.config}: {count(config.run.num_steps, 'step')} to {config.folder}")
        if options.fix:
            yield "fix run folder", fix.make_run_folder(config)
            yield "fix model", judge(partial(fix.get_model, config, options.model_id or ""))
    for name, check in (CHECKS | (SLURM_CHECKS if job.asks_slurm else {})).items():
        yield name, judge(partial(check, job))
    if not job.asks_slurm:
        yield "slurm", Finding(Level.SKIPPED, "--slurm or --script X.sh checks the job against Slurm's limits")


_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILURE: "bold red", Level.SKIPPED: "dim"}


def show(name: str, finding: Finding) -> None:
    """Print a result as one line before the next check begins; with colours on a terminal."""
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    level, rest = f"{finding.level:<8}", f" {name:<16} {finding.found}{remedy}"
    if sys.stdout.isatty():
        TextConsole().print(Text.assemble((level, _STYLES[finding.level]), rest))
    else:
        print(f"{level}{rest}", flush=True)


def summary(findings: Sequence[Finding], seconds: float) -> str:
    """The last line: how many results of each level, and whether the job would fail."""
    counts = Counter(finding.level for finding in findings)
    numbers = ", ".join(f"{counts[level]} {_word(level, counts[level])}" for level in Level if counts[level])
    end = "the job would fail" if counts[Level.FAILURE] else "nothing stands in the job's way"
    return f"preflight: {numbers} in {seconds:.1f} s: {end}"


def _word(level: Level, count: int) -> str:
    return f"{level}s" if count > 1 and level in (Level.WARNING, Level.FAILURE) else str(level)


def write_json(path: Path, results: Sequence[Result], status: int) -> None:
    """Write all results as JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    tree = {"status": status, "verdicts": [{"name": name, **vars(finding)} for name, finding in results]}
    try:
        path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}; give a file in a folder that exists") from None
