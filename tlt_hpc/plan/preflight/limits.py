"""Checks what a job requests against what Slurm allows.

A job may name several partitions and runs in one of them: it is checked against the one with the fewest obstacles.
"""

from __future__ import annotations

import getpass
import math
from collections.abc import Callable, Sequence
from functools import wraps

from tlt_hpc.plan.preflight import cluster
from tlt_hpc.plan.preflight.planned_job import PlannedJob
from tlt_hpc.plan.preflight.request import SlurmRequest
from tlt_hpc.plan.preflight.results import Finding, Level, Skip, failure, ok, warning

SAVING_SECONDS = 10.0
"""Seconds that a run needs after TERM to save the responses that it has finished."""
_MOST_NAMES = 6
Judge = Callable[[PlannedJob, cluster.Partition], Finding]
_JUDGES: list[Judge] = []
"""The checks that a partition is chosen by."""


def of_a_partition(judge: Judge) -> Callable[[PlannedJob], Finding]:
    """Makes a check of the partition that the job is checked against, which all these checks together choose."""
    _JUDGES.append(judge)

    @wraps(judge)
    def check(job: PlannedJob) -> Finding:
        return judge(job, partition_of(job))

    return check


def partition_of(job: PlannedJob) -> cluster.Partition:
    """The requested partition with the fewest failures, then warnings; the first of equal ones."""

    def obstacles(partition: cluster.Partition) -> tuple[int, int]:
        levels = [judge(job, partition).level for judge in (_judge_state, *_JUDGES)]
        return levels.count(Level.FAILURE), levels.count(Level.WARNING)

    return min(job.partitions, key=obstacles)


def check_partition(job: PlannedJob) -> Finding:
    """The requested partitions exist, and one of them accepts jobs."""
    cluster.read_partitions(job.request.partition)  # raises the error for which other checks are skipped
    return _judge_state(job, partition_of(job))


def _judge_state(job: PlannedJob, partition: cluster.Partition) -> Finding:
    if partition.state != "UP":
        return failure(f"partition {partition.name!r} is {partition.state}", "wait until it is UP, or give another")
    chosen = f", which suits best of {job.request.partition}," if len(job.partitions) > 1 else ""
    nodes = f"{partition.num_nodes} nodes, at most {_hours(partition.max_seconds)}"
    return ok(f"{partition.name}{chosen} is up: {nodes}")


@of_a_partition
def check_time(job: PlannedJob, partition: cluster.Partition) -> Finding:
    """The requested time is no longer than the partition allows: Slurm may accept such a job and never start it."""
    asked = job.request.seconds
    if not asked:
        return warning("no time was asked for, so the partition's default counts", "give --time")
    if asked > partition.max_seconds:
        return failure(
            f"{_hours(asked)} asked for, partition {partition.name!r} gives at most {_hours(partition.max_seconds)}",
            f"ask for --time={_as_time(partition.max_seconds)}; the next job resumes the run",
        )
    return ok(f"{_hours(asked)} of at most {_hours(partition.max_seconds)}")


@of_a_partition
def check_node_count(job: PlannedJob, partition: cluster.Partition) -> Finding:
    """The partition has enough nodes, allows a job that many, and enough of them are up."""
    asked = job.request.nodes
    allowed = min(partition.num_nodes, partition.max_nodes)
    if asked > allowed:
        has = f"partition {partition.name!r} has {partition.num_nodes}"
        most = "" if math.isinf(partition.max_nodes) else f", {partition.max_nodes:.0f} to a job"
        return failure(f"{asked} nodes are asked for, {has}{most}", f"ask for --nodes={allowed:.0f} or less")
    usable = sum(group.count for group in partition.groups if group.is_usable)
    if asked > usable:
        down = ", ".join(f"{group.count} {group.state}" for group in partition.groups if not group.is_usable)
        return warning(
            f"{asked} nodes are asked for, {usable} of {partition.num_nodes} are up ({down})",
            f"the job waits until more are up, or ask for --nodes={usable}",
        )
    return ok(f"{asked} of {partition.num_nodes}, {usable} of them up")


@of_a_partition
def check_gpus(job: PlannedJob, partition: cluster.Partition) -> Finding:
    """The partition's nodes have enough GPUs, and the job requests those that it needs."""
    asked = job.request.gpus_per_node
    most = max((group.gpus for group in partition.groups), default=0)
    if not asked:
        if job.needs_gpu:
            return failure("model.device = 'cuda' and no GPUs are asked for", f"give --gpus-per-node={most or 'N'}")
        return ok("none asked for")
    if not most:
        return failure(
            f"{asked} GPUs a node are asked for, partition {partition.name!r} has none (Gres)",
            "give a partition with GPUs: sinfo -o '%P %G'",
        )
    if asked > most:
        return failure(
            f"{asked} GPUs a node are asked for, the nodes of {partition.name!r} have at most {most}",
            f"ask for --gpus-per-node={most} and more nodes",
        )
    groups = [group for group in partition.groups if group.gpus >= asked and _suits(group, job.request)]
    having = sum(group.count for group in groups)
    if having < job.request.nodes:
        what = f"{job.request.nodes} nodes with {asked} GPUs{_wanted(job.request)}"
        less = f"ask for --nodes={having}, or for fewer GPUs a node"
        other = "ask for what `sinfo -o '%P %D %G %f'` shows"
        return failure(f"{what} are asked for, partition {partition.name!r} has {having}", less if having else other)
    return _judge_mixture(job.request, groups) or ok(
        f"{asked} a node, which {having} nodes have ({', '.join(dict.fromkeys(group.gres for group in groups))})"
    )


def _suits(group: cluster.NodeKind, request: SlurmRequest) -> bool:
    """Whether nodes have the kind of GPU and the features that are requested."""
    return group.meets(request.constraint) and request.gpu_kind in ("", *group.gpu_kinds)


def _wanted(request: SlurmRequest) -> str:
    kind = f" of the kind {request.gpu_kind}" if request.gpu_kind else ""
    return kind + (f" and the features {request.constraint}" if request.constraint else "")


def _judge_mixture(request: SlurmRequest, groups: Sequence[cluster.NodeKind]) -> Finding | None:
    """Nodes that Slurm may combine in one job, which fails if their GPUs differ; None: they are alike."""
    if request.nodes == 1 or request.constraint.startswith("["):  # Slurm does not mix these alternatives
        return None
    kinds = sorted({" and ".join(group.gpu_kinds) or "GPUs without a name" for group in groups})
    if not request.gpu_kind and len(kinds) > 1:
        return failure(
            f"the job may get nodes with {' or '.join(kinds)}, and all its nodes must have the same GPUs",
            "ask for one kind in the script, such as #SBATCH --gpus-per-node=KIND:COUNT or --constraint=FEATURE",
        )
    features = {group.features for group in groups}
    differing = frozenset[str]().union(*features) - frozenset.intersection(*features)
    if differing:
        return warning(
            f"the job's nodes may differ in {_first_of(sorted(differing))}, and all must have the same GPUs",
            "where these are different GPUs, ask for one in the script: #SBATCH --constraint=FEATURE",
        )
    return None


@of_a_partition
def check_cpus(job: PlannedJob, partition: cluster.Partition) -> Finding:
    """Enough of the partition's nodes have the requested cores and memory."""
    request = job.request
    cpus = job.ranks_per_node * request.cpus_per_rank
    memory = f" and {request.memory_mb} MB" if request.memory_mb else ""
    what = f"{cpus} cores ({job.ranks_per_node} x {request.cpus_per_rank}){memory}"
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


def check_account(job: PlannedJob) -> Finding:
    """The account is one of the user's and may use the partition; what Slurm does not show, ``sbatch`` checks."""
    request = job.request
    placeholder = next((word for word in (request.account, request.partition) if word.startswith("YOUR_")), "")
    if placeholder:
        return failure(
            f"the script still says {placeholder}",
            "edit the lines at its top, or give --account and --partition here and to sbatch",
        )
    gate = _check_gate(job)
    if gate.level == Level.FAILURE:
        return gate
    mine = cluster.accounts_of(getpass.getuser())
    if not mine:
        raise Skip("this Slurm reports no accounts (sacctmgr)")
    account, names = request.account.lower(), ", ".join(sorted(mine))  # Slurm ignores capital letters
    if account and account not in mine:
        return failure(f"account {request.account!r} is none of {getpass.getuser()}'s", f"give one of {names}")
    qos = mine.get(account, frozenset())
    if request.qos and qos and request.qos.lower() not in qos:
        return failure(f"QOS {request.qos!r} is none of the account's", f"give one of {', '.join(sorted(qos))}")
    return ok(request.account or f"the default of {names}")


@of_a_partition
def _check_gate(job: PlannedJob, partition: cluster.Partition) -> Finding:
    """The partition admits the account and the QOS, if they were named."""
    account, qos = job.request.account, job.request.qos
    if account and not partition.accounts.takes(account):
        found = f"account {account!r} may not use partition {partition.name!r}, which {partition.accounts.words}"
        return failure(found, "give another --account, or another --partition")
    if qos and not partition.qos.takes(qos):
        found = f"QOS {qos!r} may not use partition {partition.name!r}, which {partition.qos.words}"
        return failure(found, "give another --qos, or another --partition")
    return ok("admitted")


def check_requeue(job: PlannedJob) -> Finding:
    """A job that is preempted or reaches its time limit is queued again, and gets a signal in time."""
    request = job.request
    if request.requeue is False or (request.requeue is None and not job.slurm_settings.requeues):
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
    return ok("on" + (f", {request.signal} before the time limit" if request.signal else ""))


def check_preemption(job: PlannedJob) -> Finding:
    """How a job of this partition is preempted, and the time between TERM and KILL."""
    partition, settings = partition_of(job), job.slurm_settings
    seconds = settings.kill_wait_seconds + partition.grace_seconds
    time = f"KILL comes {seconds:g} s after TERM (KillWait {settings.kill_wait_seconds:g}, GraceTime "
    time += f"{partition.grace_seconds:g})"
    if partition.preempt_mode == "OFF" or settings.preempt_type == "preempt/none":
        return ok(f"nothing preempts a job here; at scancel and the time limit KILL comes "
                  f"{settings.kill_wait_seconds:g} s after TERM (KillWait)")  # fmt: skip
    if partition.preempt_mode == "CANCEL":
        return warning(
            f"PreemptMode = CANCEL: a preempted job ends and is not queued again; {time}",
            "submit the same script again when that happens, or use another partition",
        )
    if seconds < SAVING_SECONDS:
        return warning(
            f"PreemptMode = {partition.preempt_mode}, and {time}: not all finished responses may be kept",
            f"nothing committed is lost; ask the site for a GraceTime of {SAVING_SECONDS:g} s or more",
        )
    return ok(f"PreemptMode = {partition.preempt_mode}; {time}")


def check_acceptance(job: PlannedJob) -> Finding:
    """``sbatch --test-only`` accepts the job."""
    answer = cluster.would_take(arguments_of(job.request, job.ranks_per_node))
    if answer.status:
        return failure(f"sbatch would refuse the job: {answer.last_line}", "ask for what the lines above allow")
    return ok(f"would take it: {answer.last_line.removeprefix('sbatch: ')}")


def arguments_of(request: SlurmRequest, ranks_per_node: int) -> list[str]:
    """Arguments of ``sbatch``: the script with the options that override its lines; without a script, the request."""
    if request.script is not None:
        return [*request.overrides, str(request.script)]
    seconds = 0 if math.isinf(request.seconds) else request.seconds
    given = {
        "--nodes": request.nodes,
        "--ntasks-per-node": ranks_per_node,
        "--cpus-per-task": request.cpus_per_rank,
        "--gpus-per-node": request.gpus_per_node,
        "--mem": f"{request.memory_mb}M" if request.memory_mb else "",
        "--partition": request.partition,
        "--account": request.account,
        "--qos": request.qos,
        "--time": _as_time(seconds) if seconds else "",
    }
    return [*(f"{name}={value}" for name, value in given.items() if value), "--wrap=true"]


def _first_of(names: Sequence[str]) -> str:
    """Names in one line: nodes may have one each for their rack or their place in it."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _hours(seconds: float) -> str:
    return (
        "any time" if math.isinf(seconds) else f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds / 60:g} min"
    )


def _as_time(seconds: float) -> str:
    if math.isinf(seconds):
        return "UNLIMITED"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest:02d}"
