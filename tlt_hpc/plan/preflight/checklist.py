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
from itertools import chain
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tlt_hpc.common.console import TextConsole
from tlt_hpc.common.words import count
from tlt_hpc.config import Config, ConfigError, find_problems
from tlt_hpc.plan.preflight import assets, file_system, fix, limits, mpi, resources, versions
from tlt_hpc.plan.preflight.planned_job import PlannedJob
from tlt_hpc.plan.preflight.request import make_request
from tlt_hpc.plan.preflight.results import CheckResult, Finding, Level, Skip, failure_of, judge

FOUND_FAILURES = 1
"""Exit status if a check failed."""
_GB = 1_000_000_000

Check = Callable[[PlannedJob], Finding]
CHECKS: dict[str, Check] = {
    "run": assets.check_run,
    "ranks": assets.check_ranks_fit,
    "model": assets.check_model,
    "tokenizer": assets.check_tokenizer,
    "chat template": assets.check_template,
    "data": assets.check_data,
    "evaluation": assets.check_evaluation,
    "rewards": assets.check_rewards,
    "drafter": assets.check_drafter,
    "trackers": assets.check_trackers,
    "memory": resources.check_memory,
    "disk": resources.check_disk,
    "quota": resources.check_quota,
    "run folder": file_system.check_run_folder,
    "hdf5": file_system.check_hdf5,
    "local folder": file_system.check_local_folder,
    "python": versions.check_python,
    "packages": versions.check_packages,
    "torch": versions.check_torch,
    "flash-attn": versions.check_flash_attention,
    "offload": versions.check_offload,
    "mpi library": mpi.check_library,
    "mpi launcher": mpi.check_launcher,
    "ranks talk": mpi.check_talk,
}
"""Checks by name, in the order of their lines."""
SLURM_CHECKS: dict[str, Check] = {
    "partition": limits.check_partition,
    "time": limits.check_time,
    "nodes": limits.check_node_count,
    "cores": limits.check_cpus,
    "gpus": limits.check_gpus,
    "account": limits.check_account,
    "requeue": limits.check_requeue,
    "preemption": limits.check_preemption,
    "sbatch": limits.check_acceptance,
}


def run(options: argparse.Namespace) -> int:
    """Check a job and print the results; returns the exit status.

    Raises:
        ValueError: a mistake in the command.
    """
    started = time.monotonic()
    job, first = read_subject(options)
    verdicts = []
    for verdict in chain(first, _repairs(options, job), check_all(job)):
        show(verdict)
        verdicts.append(verdict)
    print(summary(verdicts, time.monotonic() - started))
    status = FOUND_FAILURES if any(verdict.level == Level.FAILURE for verdict in verdicts) else 0
    if options.json is not None:
        write_json(options.json, verdicts, status)
    return status


def read_subject(options: argparse.Namespace) -> tuple[PlannedJob, list[CheckResult]]:
    """The job, and a result for each mistake in its configuration, or one that says that there is none.

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
    return job, _of_the_configuration(options, config, problems)


def check_all(job: PlannedJob) -> Iterator[CheckResult]:
    """Every check's result, in order, each as soon as it is there."""
    for name, check in (CHECKS | (SLURM_CHECKS if job.asks_slurm else {})).items():
        yield judge(name, partial(check, job))
    if not job.asks_slurm:
        yield judge("slurm", _not_asked)


def _repairs(options: argparse.Namespace, job: PlannedJob) -> Iterator[CheckResult]:
    if options.fix and job.loaded is not None:
        yield from (judge(name, repair) for name, repair in fix.repairs(job.loaded, options.model_id or ""))


def _of_the_configuration(
    options: argparse.Namespace, config: Config | None, problems: list[ConfigError]
) -> list[CheckResult]:
    findings = [failure_of(problem) for problem in problems]
    if config is not None:
        findings = [Finding(Level.OK, f"{options.config}: {count(config.run.num_steps, 'step')} to {config.folder}")]
    return [CheckResult("config", one.level, one.found, one.remedy) for one in findings]


def _not_asked() -> Finding:
    raise Skip("not asked: --slurm or --script X.sh checks the job against Slurm's limits")


_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILURE: "bold red", Level.SKIPPED: "dim"}


def show(verdict: CheckResult) -> None:
    """Print a result before the next check begins."""
    if sys.stdout.isatty():
        TextConsole().print(_row(verdict))
    else:
        print(line_of(verdict), flush=True)


def line_of(verdict: CheckResult) -> str:
    """A result as one plain line."""
    remedy = f"; {verdict.remedy}" if verdict.remedy else ""
    return f"{verdict.level:<8} {verdict.name:<16} {verdict.found}{remedy}"


def summary(verdicts: Sequence[CheckResult], seconds: float) -> str:
    """The last line: how many results of each level, and whether the job would fail."""
    counts = Counter(verdict.level for verdict in verdicts)
    numbers = ", ".join(f"{counts[level]} {_word(level, counts[level])}" for level in Level if counts[level])
    end = "the job would fail" if counts[Level.FAILURE] else "nothing stands in the job's way"
    return f"preflight: {numbers} in {seconds:.1f} s: {end}"


def _word(level: Level, count: int) -> str:
    return f"{level}s" if count > 1 and level in (Level.WARNING, Level.FAILURE) else str(level)


def write_json(path: Path, verdicts: Sequence[CheckResult], status: int) -> None:
    """Write all results as JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    tree: dict[str, Any] = {"status": status, "verdicts": [vars(verdict) for verdict in verdicts]}
    try:
        path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}; give a file in a folder that exists") from None


def _row(verdict: CheckResult) -> Table:
    """A result in columns of fixed width."""
    row = Table.grid(padding=(0, 1))
    row.add_column(width=8)
    row.add_column(width=13)
    row.add_column(overflow="fold")
    remedy = f"\n{verdict.remedy}" if verdict.remedy else ""
    row.add_row(Text(verdict.level, _STYLES[verdict.level]), verdict.name, f"{verdict.found}{remedy}")
    return row
