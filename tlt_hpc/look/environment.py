"""The environment of a run's starts, collected from all ranks of a start."""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import tlt_hpc
from tlt_hpc.cluster.slurm import job_number
from tlt_hpc.common.formatting import format_spans
from tlt_hpc.common.source import installed_version, read_git_commit, source_digest
from tlt_hpc.storage.records import Environment, Host

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World

_PACKAGES = (
    "torch", "mpi4py", "deepspeed", "transformers", "flash-attn", "h5py", "numpy", "triton"
)  # fmt: skip
_SLURM = {
    "partition": "SLURM_JOB_PARTITION",
    "nodelist": "SLURM_JOB_NODELIST",
    "restarts": "SLURM_RESTART_COUNT",
}


@dataclass(frozen=True)
class RankPlace:
    """The host, cores, memory and GPU of a rank; all ranks gather these."""

    hostname: str
    processor: str
    cores: frozenset[int]
    """Cores that the rank may use."""
    memory_bytes: int
    gpu: str
    """Its name; empty without one."""
    gpu_uuid: str
    """``GPU-...``, as the driver names it."""

    @classmethod
    def here(cls, hostname: str, gpu: str = "", gpu_uuid: str = "") -> RankPlace:
        """The place of this process."""
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(hostname, processor_name(), frozenset(os.sched_getaffinity(0)), memory, gpu, gpu_uuid)


def processor_name() -> str:
    """The processor's marketing name if the system has it, otherwise its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def collect_start_environment(
    world: World,
    places: Sequence[RankPlace],
    cuda: str,
    never_sampled: Sequence[int] = (),
) -> Environment:
    """Describe this start; called on rank 0.

    Args:
        places: one for each rank, in order.
        cuda: version that torch is built for; empty without CUDA.
        never_sampled: ids of tokens, ascending.
    """
    return Environment(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        version=tlt_hpc.__version__,
        commit=read_git_commit(),
        source=source_digest(),
        python=platform.python_version(),
        packages={name: version for name in _PACKAGES if (version := installed_version(name))},
        cuda=cuda,
        mpi=world.mpi_version.strip("\0 \n"),
        hosts=hosts_of(places),
        threads=os.environ.get("OMP_NUM_THREADS", ""),
        slurm=({"job": job} if (job := job_number(os.environ)) else {})
        | {name: os.environ[variable] for name, variable in _SLURM.items() if variable in os.environ},
        command=tuple(sys.orig_argv),
        placement=world.placement,
        never_sampled=", ".join(format_spans(never_sampled)),
    )


def hosts_of(places: Sequence[RankPlace]) -> tuple[Host, ...]:
    """The nodes in the order of their first ranks. A GPU that several ranks share counts once."""
    nodes: dict[str, list[RankPlace]] = {}
    for place in places:
        nodes.setdefault(place.hostname, []).append(place)
    return tuple(
        Host(
            name=hostname,
            num_ranks=len(ranks),
            processor=ranks[0].processor,
            num_cores=len(frozenset().union(*(rank.cores for rank in ranks))),
            memory_bytes=ranks[0].memory_bytes,
            gpus=dict(Counter({rank.gpu_uuid: rank.gpu for rank in ranks if rank.gpu}.values())),
        )
        for hostname, ranks in nodes.items()
    )
