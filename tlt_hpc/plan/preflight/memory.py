"""Whether a job's memory plan stays within what its nodes have."""

from __future__ import annotations

from tlt_hpc.plan.preflight import machine
from tlt_hpc.plan.preflight.limits import partition_of
from tlt_hpc.plan.preflight.subject import Subject
from tlt_hpc.plan.preflight.verdict import Finding, Skip, failure, ok, warning

_MB = 2**20


def check_memory(subject: Subject) -> Finding:
    """The peak of each GPU and of each node's host memory, as ``tlt plan`` predicts them."""
    from tlt_hpc.plan.memory.plan import MemoryLimits
    from tlt_hpc.plan.memory.summary import verdict, way_out

    plan = subject.plan
    limits = MemoryLimits(_gpu_bytes(subject), _host_bytes(subject))
    said = verdict(plan, limits)
    if not limits.hold(plan):
        return failure(said.rstrip("."), f"{way_out(plan, limits)} See tlt plan")
    if subject.uses_gpu and limits.device is None:
        return warning(f"{said} How much a GPU has is not known here", "give --gpu-memory GB")
    return ok(said)


def _gpu_bytes(subject: Subject) -> int | None:
    """Of each GPU: as was said, or of this machine's smallest where the job runs here."""
    if subject.gpu_bytes is not None or not subject.uses_gpu or subject.asks_slurm:
        return subject.gpu_bytes if subject.uses_gpu else None
    return min((gpu.num_bytes for gpu in machine.read_gpus() if gpu.num_bytes is not None), default=None)


def _host_bytes(subject: Subject) -> int | None:
    """Of a node: what is asked of Slurm, or what its partition's smallest node has; else this machine's."""
    if not subject.asks_slurm:
        return machine.memory_bytes() if subject.request.nodes == 1 else None
    if subject.request.memory_mb:
        return subject.request.memory_mb * _MB
    try:
        groups = partition_of(subject).groups
    except Skip:
        return None
    gpus = subject.request.gpus_per_node
    return min((group.memory_mb for group in groups if group.gpus >= gpus), default=0) * _MB or None
