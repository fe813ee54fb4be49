"""``tlt preflight``: all checks of a job, in order, each whatever the others found. One process, no ranks, no GPU."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

from tlt_hpc.common.words import count
from tlt_hpc.config import Config, ConfigError, find_problems
from tlt_hpc.plan.preflight import assets, disk, file_system, fix, limits, memory, mpi, versions
from tlt_hpc.plan.preflight.request import make_request
from tlt_hpc.plan.preflight.show import show, summary, write_json
from tlt_hpc.plan.preflight.subject import Subject
from tlt_hpc.plan.preflight.verdict import Finding, Level, Skip, Verdict, failure_of, judge

FOUND_FAILURES = 1
"""Exit status where a check failed."""
_GB = 1_000_000_000

Check = Callable[[Subject], Finding]
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
    "memory": memory.check_memory,
    "disk": disk.check_disk,
    "quota": disk.check_quota,
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
"""By name, in the order of their lines."""
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
    """Check a job, print the verdicts; returns the exit status.

    Raises:
        ValueError: a mistake in the command.
    """
    started = time.monotonic()
    subject, first = read_subject(options)
    verdicts = []
    for verdict in chain(first, _repairs(options, subject), check_all(subject)):
        show(verdict)
        verdicts.append(verdict)
    print(summary(verdicts, time.monotonic() - started))
    status = FOUND_FAILURES if any(verdict.level == Level.FAILURE for verdict in verdicts) else 0
    if options.json is not None:
        write_json(options.json, verdicts, status)
    return status


def read_subject(options: argparse.Namespace) -> tuple[Subject, list[Verdict]]:
    """The job, and a verdict for each mistake in its configuration, or that there is none.

    Raises:
        ConfigError: no such file, or an option that cannot be.
    """
    if options.model_id and not options.fix:
        raise ConfigError(f"--model-id {options.model_id} says nothing without --fix; give both")
    if options.gpu_memory is not None and not 0 < options.gpu_memory < math.inf:
        raise ConfigError(f"--gpu-memory {options.gpu_memory:g}: give a number above 0")
    if options.json is not None and not options.json.parent.is_dir():
        raise ConfigError(f"--json {options.json}: its folder does not exist; make it first")
    config, problems = find_problems(options.config, options.overrides)
    gpu_bytes = None if options.gpu_memory is None else int(options.gpu_memory * _GB)
    subject = Subject(config, make_request(options), options.slurm or options.script is not None, gpu_bytes)
    return subject, _of_the_configuration(options, config, problems)


def check_all(subject: Subject) -> Iterator[Verdict]:
    """Every check's verdict, in order, each as it is made."""
    for name, check in (CHECKS | (SLURM_CHECKS if subject.asks_slurm else {})).items():
        yield judge(name, partial(check, subject))
    if not subject.asks_slurm:
        yield judge("slurm", _not_asked)


def _repairs(options: argparse.Namespace, subject: Subject) -> Iterator[Verdict]:
    if options.fix and subject.loaded is not None:
        yield from (judge(name, repair) for name, repair in fix.repairs(subject.loaded, options.model_id or ""))


def _of_the_configuration(
    options: argparse.Namespace, config: Config | None, problems: list[ConfigError]
) -> list[Verdict]:
    findings = [failure_of(problem) for problem in problems]
    if config is not None:
        findings = [Finding(Level.OK, f"{options.config}: {count(config.run.num_steps, 'step')} to {config.folder}")]
    return [Verdict("config", one.level, one.found, one.remedy) for one in findings]


def _not_asked() -> Finding:
    raise Skip("not asked: --slurm or --script X.sh holds the job against Slurm's limits")
