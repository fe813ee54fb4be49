"""The environment of a run's starts: collects it from all ranks of a start, and puts it into words."""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import tlt_hpc
from tlt_hpc.common.source import git_commit, source_digest
from tlt_hpc.common.words import count
from tlt_hpc.look.words import listed
from tlt_hpc.storage.records import Environment, Host

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
# MPI libraries first: mpiexec may start its ranks through Slurm.
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
"""Set by cluster/local.py if ``tlt`` itself has started the ranks."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs; all ranks gather these."""

    hostname: str
    processor: str
    cores: int
    """Bit mask of the cores that the rank may use."""
    memory_bytes: int
    gpu: str
    """Its name; empty without one."""
    gpu_uuid: str
    """``GPU-...``, as the driver names it."""

    @classmethod
    def here(cls, hostname: str, gpu: str = "", gpu_uuid: str = "") -> RankPlace:
        """The place of this process."""
        cores = sum(1 << core for core in os.sched_getaffinity(0))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(hostname, processor_name(), cores, memory, gpu, gpu_uuid)


def processor_name() -> str:
    """The processor's marketing name if the system has it, otherwise its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def find_environment(world: World, places: Sequence[RankPlace], cuda: str, energy: Mapping[str, str]) -> Environment:
    """Describe this start; called on rank 0.

    Args:
        places: one for each rank, in order.
        cuda: version that torch is built for; empty without CUDA.
        energy: kind of counter -> empty if it is read, else the reason why not.
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


def hosts_of(places: Sequence[RankPlace]) -> tuple[Host, ...]:
    """The nodes in the order of their first ranks. A GPU that several ranks share counts once."""
    return tuple(
        _host([place for place in places if place.hostname == hostname])
        for hostname in dict.fromkeys(place.hostname for place in places)
    )


def _host(ranks: Sequence[RankPlace]) -> Host:
    first, cores = ranks[0], 0
    for rank in ranks:
        cores |= rank.cores
    gpus = {rank.gpu_uuid: rank.gpu for rank in ranks if rank.gpu}
    counts = dict(Counter(gpus.values()))
    return Host(first.hostname, len(ranks), first.processor, cores.bit_count(), first.memory_bytes, counts)


def launcher_of(environment: Mapping[str, str]) -> str:
    """What started the ranks, found from the variables that launchers set."""
    found = next((words for variable, words in _LAUNCHERS.items() if variable in environment), "none")
    return f"tlt, by {found}" if _STARTED in environment else found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def environment_in_words(environment: Environment) -> str:
    """One paragraph on a start: code, libraries, nodes and launcher."""
    commit = f"commit {environment.commit[:12]}, " if environment.commit else ""
    built = f"CUDA {environment.cuda}" if environment.cuda else "CPUs"
    mpi = " ".join(environment.mpi.partition("\n")[0].split())
    job = f" in Slurm job {environment.slurm['job']}" if "job" in environment.slurm else ""
    hosts = Counter(map(host_in_words, environment.hosts))
    nodes = [f"{count(number, 'node')} with {kind}" for kind, number in hosts.items()]
    return (
        f"tlt_hpc {environment.version} ({commit}files {environment.source}) with Python {environment.python}, "
        f"torch {environment.packages.get('torch', 'unknown')} for {built}, {mpi}, on {listed(nodes)}. "
        f"Started at {environment.time} by {environment.launcher}{job}."
    )


def host_in_words(host: Host) -> str:
    """Ranks, cores, processor, memory and GPUs of a host."""
    gpus = "".join(f", {number} x {name}" for name, number in sorted(host.gpus.items()))
    cores = count(host.num_cores, "core")
    return f"{count(host.num_ranks, 'rank')}, {cores} of {host.processor}, {host.memory_bytes / 1e9:,.0f} GB{gpus}"


def environments_in_words(starts: Sequence[Environment]) -> str:
    """One paragraph on the last start, and whether earlier ones differ."""
    if not starts:
        return "What the run ran on is unknown: its folder has no environment.jsonl."
    odd = sum(_what_counts(start) != _what_counts(starts[-1]) for start in starts[:-1])
    others = f"{odd} of them on other code, versions or nodes" if odd else "all on the same code, versions and nodes"
    more = f" The last of {len(starts)} starts; {others}." if len(starts) > 1 else ""
    return environment_in_words(starts[-1]) + more


def _what_counts(start: Environment) -> Environment:
    """The start without what differs between two starts of one job on one machine."""
    return replace(start, time="", slurm={}, launcher="", command=(), energy={})
