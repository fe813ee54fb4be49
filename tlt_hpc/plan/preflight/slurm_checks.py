"""Checks of what a job requests against what Slurm allows.

``sbatch --test-only`` judges accounts, QOS and features. The other checks name what Slurm accepts and never starts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

from tlt_hpc.plan.preflight.cluster import ANSWER_SECONDS, Partition, read_partitions, slurm_output
from tlt_hpc.plan.preflight.planned_job import PlannedJob
from tlt_hpc.plan.preflight.program import ask
from tlt_hpc.plan.preflight.request import SlurmRequest
from tlt_hpc.plan.preflight.results import Finding, Level, failure, ok, warning

# --- checks of a partition ---


def check_state(request: SlurmRequest, partition: Partition) -> Finding:
    """The partition accepts jobs."""
    if partition.state != "UP":
        return failure(f"partition {partition.name!r} is {partition.state}", "wait until it is UP, or give another")
    return ok(f"{partition.name} is up: {partition.num_nodes} nodes, at most {_hours(partition.max_seconds)}")


def check_time(request: SlurmRequest, partition: Partition) -> Finding:
    """The requested time is no longer than the partition allows: Slurm may accept such a job and never start it."""
    asked = request.seconds
    if not asked:
        return warning("no time was asked for, so the partition's default counts", "give --time")
    if asked > partition.max_seconds:
        return failure(
            f"{_hours(asked)} asked for, partition {partition.name!r} gives at most {_hours(partition.max_seconds)}",
            f"ask for --time={_as_time(partition.max_seconds)}; the next job resumes the run",
        )
    return ok(f"{_hours(asked)} of at most {_hours(partition.max_seconds)}")


def check_node_count(request: SlurmRequest, partition: Partition) -> Finding:
    """The partition has enough nodes, allows a job that many, and enough of them are up."""
    asked, allowed = request.nodes, min(partition.num_nodes, partition.max_nodes)
    if asked > allowed:
        most = "" if math.isinf(partition.max_nodes) else f", {partition.max_nodes:.0f} to a job"
        return failure(f"{asked} nodes are asked for, partition {partition.name!r} has {partition.num_nodes}{most}",
                       f"ask for --nodes={allowed:.0f} or less")  # fmt: skip
    usable = sum(group.count for group in partition.groups if group.is_usable)
    if asked > usable:
        down = ", ".join(f"{group.count} {group.state}" for group in partition.groups if not group.is_usable)
        return warning(
            f"{asked} nodes are asked for, {usable} of {partition.num_nodes} are up ({down})",
            f"the job waits until more are up, or ask for --nodes={usable}",
        )
    return ok(f"{asked} of {partition.num_nodes}, {usable} of them up")


def check_gpus(request: SlurmRequest, partition: Partition) -> Finding:
    """Enough of the partition's nodes have the requested GPUs, and all of a job's nodes have the same kind."""
    asked, kind = request.gpus_per_node, request.gpu_kind
    if not asked:
        return ok("none asked for")
    most = max((group.gpus for group in partition.groups), default=0)
    if not most:
        return failure(
            f"{asked} GPUs a node are asked for, partition {partition.name!r} has none (Gres)",
            "give a partition with GPUs: sinfo -o '%P %G'",
        )
    groups = [one for one in partition.groups if one.gpus >= asked and kind in ("", *one.gpu_kinds)]
    having = sum(group.count for group in groups)
    if having < request.nodes:
        return failure(
            f"{request.nodes} nodes with {asked} GPUs{f' of the kind {kind}' if kind else ''} are asked for, "
            f"partition {partition.name!r} has {having}, of at most {most} a node",
            f"ask for --nodes={having}, or for fewer GPUs a node" if having else f"ask for --gpus-per-node={most}",
        )
    kinds = sorted({" and ".join(group.gpu_kinds) or "GPUs without a name" for group in groups})
    if request.nodes > 1 and len(kinds) > 1 and not kind and not request.constraint:
        return failure(
            f"the job may get nodes with {' or '.join(kinds)}, and all its nodes must have the same GPUs",
            "ask for one kind in the script, such as #SBATCH --gpus-per-node=KIND:COUNT or --constraint=FEATURE",
        )
    return ok(f"{asked} a node, which {having} nodes have ({', '.join(dict.fromkeys(group.gres for group in groups))})")


def check_cpus(request: SlurmRequest, partition: Partition) -> Finding:
    """Enough of the partition's nodes have the requested cores and memory."""
    ranks = max(request.ranks_per_node, 1)
    cpus, memory = ranks * request.cpus_per_rank, f" and {request.memory_mb} MB" if request.memory_mb else ""
    what = f"{cpus} cores ({ranks} x {request.cpus_per_rank}){memory}"
    groups = [group for group in partition.groups if group.cpus >= cpus and group.memory_mb >= request.memory_mb]
    having = sum(group.count for group in groups)
    if having < min(request.nodes, partition.num_nodes):
        most = max(partition.groups, key=lambda group: (group.cpus, group.memory_mb))
        return failure(
            f"{what} a node are asked for, {having} of {partition.name!r}'s nodes have them; its largest have "
            f"{most.cpus} cores and {most.memory_mb} MB",
            "ask for fewer ranks, cores or less memory a node",
        )
    return ok(f"{what} a node")


PARTITION_CHECKS: dict[str, Callable[[SlurmRequest, Partition], Finding]] = {
    "partition": check_state,
    "time": check_time,
    "nodes": check_node_count,
    "cores": check_cpus,
    "gpus": check_gpus,
}


def best_partition(request: SlurmRequest, partitions: Iterable[Partition]) -> Partition:
    """The requested partition with the fewest failures, then warnings: Slurm runs the job in one of them."""

    def obstacles(partition: Partition) -> tuple[int, int]:
        levels = [check(request, partition).level for check in PARTITION_CHECKS.values()]
        return levels.count(Level.FAILURE), levels.count(Level.WARNING)

    return min(partitions, key=obstacles)


def check_partition(name: str, job: PlannedJob) -> Finding:
    """Makes one of ``PARTITION_CHECKS``."""
    partitions = read_partitions(job.request.partition) if name == "partition" else job.partitions
    if name == "gpus" and job.needs_gpu and not job.request.gpus_per_node:
        return failure("model.device = 'cuda' and no GPUs are asked for", "give --gpus-per-node")
    return PARTITION_CHECKS[name](job.request, best_partition(job.request, partitions))


# --- checks of the whole request ---


def check_requeue(job: PlannedJob) -> Finding:
    """A job that is preempted or reaches its time limit is queued again, and gets a signal in time."""
    request, partition = job.request, best_partition(job.request, job.partitions)
    default = re.search(r"JobRequeue\s*=\s*1", slurm_output("scontrol", "show", "config"))
    if request.requeue is False or (request.requeue is None and not default):
        why = "the script says --no-requeue" if request.requeue is False else "JobRequeue = 0 in slurm.conf"
        return warning(
            f"requeue is off ({why}): a job that is preempted or reaches its time limit is not resumed by itself",
            "add #SBATCH --requeue, or submit the same script again: it resumes from the last step",
        )
    if request.script is not None and not request.signal.startswith("USR2@"):
        return warning(
            f"{request.script} requests no USR2 before its time limit, so the step in progress is lost then",
            "add #SBATCH --signal=USR2@120",
        )
    if partition.preempt_mode == "CANCEL":
        return warning(
            f"PreemptMode = CANCEL in {partition.name!r}: a preempted job ends and is not queued again",
            "submit the same script again when that happens, or use another partition",
        )
    return ok("on" + (f", {request.signal} before the time limit" if request.signal else ""))


def check_acceptance(job: PlannedJob) -> Finding:
    """``sbatch --test-only`` accepts the job."""
    request = job.request
    for word in (request.account, request.partition):
        if word.startswith("YOUR_"):
            remedy = "edit the lines at its top, or give --account and --partition here and to sbatch"
            return failure(f"the script still says {word}", remedy)
    answer = ask(["sbatch", "--test-only", *arguments_of(request, job.ranks_per_node)], ANSWER_SECONDS)
    if answer.status:
        return failure(f"sbatch would refuse the job: {answer.last_line}", "ask for what the lines above allow")
    return ok(f"would take it: {answer.last_line.removeprefix('sbatch: ')}")


def arguments_of(request: SlurmRequest, ranks_per_node: int) -> list[str]:
    """Arguments of ``sbatch``: the script with the options that override its lines; without a script, the request."""
    if request.script is not None:
        return [*request.overrides, str(request.script)]
    given = {
        "--nodes": request.nodes,
        "--ntasks-per-node": ranks_per_node,
        "--cpus-per-task": request.cpus_per_rank,
        "--gpus-per-node": request.gpus_per_node,
        "--partition": request.partition,
        "--account": request.account,
        "--time": _as_time(request.seconds) if request.seconds else "",
    }
    return [*(f"{name}={value}" for name, value in given.items() if value), "--wrap=true"]


def _hours(seconds: float) -> str:
    if math.isinf(seconds):
        return "any time"
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds / 60:g} min"


def _as_time(seconds: float) -> str:
    if math.isinf(seconds):
        return "UNLIMITED"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest:02d}"
