"""Checks of what a batch script requests against what Slurm allows.

``sbatch --test-only`` judges limits, accounts, QOS and features. The other checks name what Slurm accepts and a run
suffers from.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import partial

from tlt_hpc.cluster.request import num_gpus
from tlt_hpc.cluster.slurm import ANSWER_SECONDS, ask_slurm, parse_slurm_time
from tlt_hpc.cluster.stopping import SHORT_SECONDS, seconds_before_limit
from tlt_hpc.common.formatting import format_count
from tlt_hpc.extras.preflight.planned_job import PlannedJob
from tlt_hpc.extras.preflight.program import run_program
from tlt_hpc.extras.preflight.results import Finding, Level, Skip, failure, ok, run_check, warning
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.step_lines import read_lines

START_SECONDS = 120.0
"""What a start may take, beside a step whose time is known."""
DEFAULT_AHEAD_SECONDS = 60.0
"""sbatch's for ``--signal`` without a time."""


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike."""

    partition: str
    state: str
    """``up`` if the partition starts jobs."""
    time_limit: str
    memory_mb: int
    num_gpus: int


def read_nodes(partition: str) -> list[NodeKind]:
    """The kinds of nodes of a comma-separated list of partitions; of the default one if it is empty.

    Raises:
        SlurmError: Slurm does not answer.
    """
    return [
        NodeKind(name.rstrip("*"), state, time, int(memory.rstrip("+")), num_gpus(gres))  # 256000+: or more
        for name, state, time, memory, gres in _node_lines()
        if (name.rstrip("*") in partition.split(",") if partition else name.endswith("*"))
    ]


def _node_lines() -> list[list[str]]:
    """Of each kind of node: partition, state, time limit, memory and GPUs, as Slurm prints them."""
    return [line.split("|", 4) for line in ask_slurm("sinfo", "-h", "-o", "%P|%a|%l|%m|%G").splitlines()]


def query_mpi_types() -> list[str]:
    """The values that ``srun --mpi`` accepts here.

    Raises:
        SlurmError: Slurm does not answer.
    """
    told = run_program(["srun", "--mpi=list"], ANSWER_SECONDS).text
    lines = [line.removeprefix("srun: ").strip() for line in told.splitlines()]  # which Slurm 20.11 and older have
    named = [word.strip() for line in lines if "versions available:" in line for word in line.split(":")[1].split(",")]
    return sorted({line for line in lines if re.fullmatch(r"\w+", line)} | set(named))


def node_megabytes(job: PlannedJob) -> list[int]:
    """Memory of the partition's nodes that have the requested GPUs, ascending."""
    nodes = read_nodes(job.request.option_value("partition"))
    return sorted(node.memory_mb for node in nodes if node.num_gpus >= job.request.gpus_per_node)


def default_memory(job: PlannedJob) -> tuple[str, int]:
    """What a job gets that requests no memory: ``DefMemPerCPU = 4000 MB``, and megabytes of a node; empty: all of it.

    Raises:
        SlurmError: Slurm does not answer.
    """
    request, partition = job.request, job.request.option_value("partition")
    names = partition.split(",") if partition else [n[:-1] for n, *_ in _node_lines() if n.endswith("*")]
    asked = [*(("show", "partition", name) for name in dict.fromkeys(names)), ("show", "config")]
    found = (re.search(r"(DefMemPer\w+)\s*=\s*(\d+)", ask_slurm("scontrol", *words)) for words in asked)
    numbers = {"DefMemPerCPU": job.ranks_per_node * request.cores_per_rank, "DefMemPerGPU": request.gpus_per_node}
    for match in filter(None, found):
        if number := numbers.get(match[1], 1):  # what counts by GPUs is nothing to a job without
            return f"{match[1]} = {match[2]} MB", int(match[2]) * number
    return "", 0


def check_partition(job: PlannedJob) -> Finding:
    """A partition starts jobs and allows the requested time: Slurm may accept another job and never start it."""
    asked, partition = job.request.option_value("time"), job.request.option_value("partition")
    nodes = read_nodes(partition)
    limits = {node.partition: node.time_limit for node in nodes if node.state == "up"}
    if not nodes and not partition:
        return warning(
            "no partition is asked for, and none is the default; some sites choose one by QOS or features",
            "give --partition where sbatch refuses the job",
        )
    if not limits:
        known = ", ".join(sorted({name.rstrip("*") for name, state, *_ in _node_lines() if state == "up"}))
        return failure(
            f"no partition {partition or 'by default'} is up",
            f"give one of sinfo with --partition: {known or 'none is up now'}",
        )
    if not asked:
        return warning("no time is asked for, so the partition's default counts", "give --time")
    wanted = job.request.limit_seconds
    if all(wanted > parse_slurm_time(limit) for limit in limits.values()):
        most = ", ".join(f"{name!r} at most {limit}" for name, limit in limits.items())
        longest = max(limits.values(), key=parse_slurm_time)
        remedy = f"give --time {longest}, or less; the next job resumes the run"
        by = "is asked for" if job.request.option_source("time") == "the script" else "is in SBATCH_TIMELIMIT"
        return failure(f"time {asked} {by}, and partition {most}", remedy)
    return ok(f"{', '.join(limits)}: {asked} of at most {', '.join(limits.values())}")


def check_gpus(job: PlannedJob) -> Finding:
    """GPUs are requested if the job needs them; whether all of its nodes have the same, the start of the run checks."""
    asked = job.request.gpus_per_node
    if not asked and job.needs_gpu:
        return failure("model.device = 'cuda' and no GPUs are asked for", "ask Slurm for --gpus-per-node=N")
    return ok(f"{asked} a node" if asked else "none asked for")


def check_requeue(job: PlannedJob) -> Finding:
    """A job that is preempted or reaches its time limit is queued again, and gets a signal in time."""
    request = job.request
    default = re.search(r"JobRequeue\s*=\s*1", ask_slurm("scontrol", "show", "config"))
    if request.wants_requeue is False or (request.wants_requeue is None and not default):
        by = request.option_source("no-requeue")
        why = f"{by} says --no-requeue" if by == "the script" else f"{by} is set"
        why = why if request.wants_requeue is False else "JobRequeue = 0 in slurm.conf"
        return warning(
            f"requeue is off ({why}): a job that is preempted or reaches its time limit is not resumed by itself",
            "ask Slurm for --requeue, or submit the job again: it resumes from the last step",
        )
    signal = request.option_value("signal")
    if not re.match(r"(R:)?((SIG)?USR2|12)(@\d+)?$", signal):
        return warning(
            f"{request.option_source('signal')} requests no USR2 before the time limit, so the step in progress may be "
            "lost then",
            "ask Slurm for --signal=USR2@120",
        )
    return _check_time(job) or ok(f"on, {signal} before the time limit")


def _check_time(job: PlannedJob) -> Finding | None:
    """What is wrong if a start and a step do not fit in the time before the signal; None: nothing is known to be."""
    signal, limit = job.request.option_value("signal"), job.request.limit_seconds
    ahead = float(signal.partition("@")[2] or DEFAULT_AHEAD_SECONDS)
    lines = [] if job.loaded is None else list(read_lines(RunFolder(job.loaded.folder).metrics).values())
    step = next((float(line["timing_s/step"]) for line in reversed(lines) if "timing_s/step" in line), None)
    if limit - ahead >= (SHORT_SECONDS if step is None else START_SECONDS + step):
        return None
    known = "" if step is None else f" ({step:.0f} s in this run)"
    earlier = f", and ask for --signal=USR2@{seconds_before_limit(limit):.0f} if it stays below 8 minutes"
    left = f"{max(0.0, limit - ahead):.0f} s before {signal}"
    return warning(
        f"the time limit {job.request.option_value('time')} leaves at most {left}, in which a start and a step{known} "
        "may not fit: the job would train nothing",
        f"give more --time{earlier * (ahead > seconds_before_limit(limit))}",
    )


def check_cores(job: PlannedJob) -> Finding:
    """With offload, the optimiser runs on all cores of a rank, and on more than one."""
    cores = job.request.cores_per_rank
    given = os.environ.get("TLT_THREADS") or str(cores)
    if not given.isdecimal():
        return failure(f"TLT_THREADS={given!r} is no number", "set the threads of each rank, or unset it")
    threads = int(given)
    if not (job.config.optimizer.offload and job.uses_gpu):
        return ok(f"{format_count(cores, 'core')} a rank")
    if threads < cores:
        what = f"TLT_THREADS={threads}: the optimiser (optimizer.offload) uses {format_count(threads, 'thread')}"
        return warning(f"{what} on {cores} cores", "unset it, unless it leaves out only hardware threads")
    if cores == 1:
        what = "optimizer.offload = true runs the optimiser on the cores, and each rank has one"
        return warning(what, "ask Slurm for --cpus-per-task=N (tlt submit: --cpus-per-rank=N), such as 8")
    return ok(f"{format_count(cores, 'core')} a rank, for the optimiser (optimizer.offload)")


def check_acceptance(job: PlannedJob) -> Finding:
    """``sbatch --test-only`` accepts the job."""
    for word in (job.request.option_value("account"), job.request.option_value("partition")):
        if word.startswith("YOUR_"):
            remedy = "edit the lines at its top, or give --account and --partition here and to sbatch"
            return failure(f"the script still says {word}", remedy)
    if run_check(partial(check_partition, job)).level is Level.FAILURE:  # which says it more clearly
        raise Skip("not asked while the partition is wrong")
    answer = run_program(["sbatch", "--test-only", *job.request.arguments], ANSWER_SECONDS)
    if answer.status:  # a site's own rule is in the lines before the last
        said = " ".join(answer.err.split()) or answer.last_line
        return failure(f"sbatch would refuse the job: {said}", "correct what it asks for")
    return ok(f"would take it: {answer.last_line.removeprefix('sbatch: ')}")
