"""A start's environment, from what each rank tells of its place."""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING

import tlt_hpc
from tlt_hpc.common.source import git_commit, source_digest
from tlt_hpc.rollout.cost_profile import processor_name
from tlt_hpc.storage.environment_lines import Environment, Host

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World

_PACKAGES = (
    "torch", "mpi4py", "deepspeed", "transformers", "flash-attn", "h5py", "numpy", "triton", "nvidia-ml-py"
)  # fmt: skip
_SLURM = {
    "job": "SLURM_JOB_ID",
    "partition": "SLURM_JOB_PARTITION",
    "nodelist": "SLURM_JOB_NODELIST",
    "restarts": "SLURM_RESTART_COUNT",
}
# The libraries' own first: mpiexec may start its ranks through Slurm.
_LAUNCHERS = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "mpiexec of Open MPI",
    "MPI_LOCALRANKID": "mpiexec of MPICH or Intel MPI (Hydra)",
    "MV2_COMM_WORLD_LOCAL_RANK": "mpiexec of MVAPICH",
    "PALS_LOCAL_RANKID": "mpiexec of PALS",
    "SLURM_STEP_ID": "srun",
    "PMI_RANK": "another (PMI)",
    "PMIX_RANK": "another (PMIx)",
}
_STARTED = "TLT_STARTED"
"""Where cluster/local.py says that ``tlt`` has started the ranks itself."""


@dataclass(frozen=True)
class Gpu:
    """The GPU that a rank uses."""

    name: str
    uuid: str
    """``GPU-...``, as the driver has it."""


@dataclass(frozen=True)
class Place:
    """Where a rank is; a small record that all ranks gather."""

    hostname: str
    processor: str
    cores: int
    """One bit each, of those that it may run on."""
    memory_bytes: int
    gpu: Gpu | None

    @classmethod
    def here(cls, hostname: str, gpu: Gpu | None) -> Place:
        """This rank's."""
        cores = sum(1 << core for core in os.sched_getaffinity(0))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(hostname, processor_name(), cores, memory, gpu)


def find_environment(world: World, places: Sequence[Place], cuda: str, energy: Mapping[str, str]) -> Environment:
    """Of this start; for rank 0.

    Args:
        places: all ranks', in their order.
        cuda: that torch is built for; empty for CPUs alone.
        energy: kind of counter -> empty where it is read, else why not.
    """
    return Environment(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        version=tlt_hpc.__version__,
        commit=git_commit(),
        source=source_digest(),
        python=platform.python_version(),
        packages={name: version for name in _PACKAGES if (version := _version(name))},
        cuda=cuda,
        mpi=world.library.strip("\0 \n"),
        hosts=hosts_of(places),
        threads=os.environ.get("OMP_NUM_THREADS", ""),
        slurm={name: os.environ[variable] for name, variable in _SLURM.items() if variable in os.environ},
        launcher=launcher_of(os.environ),
        command=tuple(sys.orig_argv),
        energy=dict(energy),
    )


def hosts_of(places: Sequence[Place]) -> tuple[Host, ...]:
    """The nodes, in the order of their first ranks; a GPU that several ranks share counts once."""
    return tuple(
        _host([place for place in places if place.hostname == hostname])
        for hostname in dict.fromkeys(place.hostname for place in places)
    )


def _host(ranks: Sequence[Place]) -> Host:
    first, cores = ranks[0], 0
    for rank in ranks:
        cores |= rank.cores
    gpus = {rank.gpu.uuid: rank.gpu.name for rank in ranks if rank.gpu}
    counts = dict(Counter(gpus.values()))
    return Host(first.hostname, len(ranks), first.processor, cores.bit_count(), first.memory_bytes, counts)


def launcher_of(environment: Mapping[str, str]) -> str:
    """Who has started the ranks, by the variables that launchers leave."""
    found = next((words for variable, words in _LAUNCHERS.items() if variable in environment), "none")
    return f"tlt, by {found}" if _STARTED in environment else found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
