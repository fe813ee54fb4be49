"""Checks of the machine: memory, disk, the run's file system, torch."""

from __future__ import annotations

import importlib.util
import math
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tlt_hpc.cluster.slurm import SlurmError
from tlt_hpc.cluster.topology import System
from tlt_hpc.common.formatting import format_bytes
from tlt_hpc.common.host_memory import available_bytes
from tlt_hpc.extras.preflight import slurm_checks
from tlt_hpc.extras.preflight.planned_job import PlannedJob
from tlt_hpc.extras.preflight.results import Finding, Skip, failure, ok, warning
from tlt_hpc.plan.nodes import NEEDS_COMPILER, missing_for_triton
from tlt_hpc.storage.folder import WriteError

T = TypeVar("T")

_MB = 2**20
_MAKE_ROOM = "make room there, set run.folder to another place, or lower checkpoint.keep or drafter.cache_bytes"


def check_memory(job: PlannedJob) -> Finding:
    """The peak of each GPU and of each node's host memory, as ``tlt plan`` predicts them."""
    from tlt_hpc.plan.memory.plan import HERE, MemoryLimits
    from tlt_hpc.plan.memory.summary import describe_fit, savings_advice

    plan, asked = job.plan, (job.request.memory_mb or 0) * _MB
    if job.asks_slurm:
        sizes = [_MB * megabytes for megabytes in _if_slurm_answers(slurm_checks.node_megabytes, job, list[int]())]
    else:
        sizes = [available_bytes()]
    sizes = [each for each in sizes if each]  # 0: not known
    nodes = MemoryLimits(job.gpu_bytes if job.uses_gpu else None, sizes[0] if sizes else None)
    if not job.asks_slurm:
        nodes = replace(nodes, host_is=HERE)
    limits = replace(nodes, host=asked, host_is="what --mem asks for on each node") if asked else nodes
    said = describe_fit(plan, limits)
    more = f"ask Slurm for --mem={math.ceil(plan.node_bytes / 2**30)}G or more (--mem=0: all of a node)"
    if asked and sizes and asked > sizes[-1]:
        what = (
            f"--mem asks for {format_bytes(asked)} of a node, and the partition's largest has {format_bytes(sizes[-1])}"
        )
        return failure(what, "ask Slurm for less, or for another partition")
    if not limits.plan_fits(plan):
        if asked and nodes.plan_fits(plan):
            return failure(said.rstrip("."), more)
        remedy = savings_advice(plan, nodes)
        return failure(said.rstrip("."), f"{remedy[0].lower()}{remedy[1:]} See tlt plan")
    if job.asks_slurm and job.request.memory_mb is None:
        default, megabytes = _if_slurm_answers(slurm_checks.default_memory, job, ("", 0))
        if default and megabytes * _MB < plan.node_bytes:
            gets = f"gets {format_bytes(megabytes * _MB)} of a node ({default})"
            return warning(f"{said} But without --mem the job {gets}: Slurm may end it", more)
    if job.uses_gpu and limits.device is None:
        return warning(f"{said} How much a GPU has is not known here", "give --gpu-memory GB")
    return ok(said)


def _if_slurm_answers(ask: Callable[[PlannedJob], T], job: PlannedJob, otherwise: T) -> T:
    try:
        return ask(job)
    except SlurmError:  # the check of the partition reports it
        return otherwise


# --- disk ---


def _nearest_folder(path: Path) -> Path:
    """The path if it is a folder, else the nearest folder above it."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def check_disk(job: PlannedJob) -> Finding:
    """The file system of the run's folder has enough space and files left."""
    config, ranks, folder = job.config, job.num_ranks, _nearest_folder(job.config.folder)
    disk = {
        name: count for name, count in job.plan.disk.items() if name != "features" or not config.drafter.cache_folder
    }
    # checkpoints are written whatever the responses are; the other parts are upper bounds
    sure = sum(disk.get(name, 0) for name in ("checkpoints", "the drafter's between them"))
    there = 0
    for path in config.folder.rglob("*"):
        with suppress(FileNotFoundError):  # a run at work removes old checkpoints
            there += path.lstat().st_size if path.is_file() else 0
    sure, most = max(0, sure - there), max(0, sum(disk.values()) - there)
    saves = config.checkpoint.keep + 1 + (3 if "the drafter's between them" in disk else 0)
    files = config.run.num_steps * (ranks + 1) + 3 * ranks * (saves + 1)
    found, place = os.statvfs(folder), System().find_mount(folder).point
    free = found.f_bavail * found.f_frsize
    writes = f"{format_bytes(sure)} to {format_bytes(most)} in about {files:,} files"
    words = f"{format_bytes(free)} free of {place}, the run writes {writes}"
    if free < sure:
        return failure(words, _MAKE_ROOM)
    if found.f_files and found.f_favail < files:  # some file systems do not count
        return failure(f"{found.f_favail:,} more files fit on {place}, the run makes about {files:,}", _MAKE_ROOM)
    if free < most:
        return warning(f"{words}, the most where all responses are of full length", _MAKE_ROOM)
    return ok(f"{words}; quotas are not checked")


def check_run_folder(job: PlannedJob) -> Finding:
    """An HDF5 file can be written, synced, renamed and read back in the run's folder; all nodes will see it."""
    folder = _nearest_folder(job.config.folder)
    mount, started = System().find_mount(folder), time.perf_counter()
    place = f"{folder} ({mount.kind})"
    try:
        _write_and_read(folder)
    except OSError as error:
        said = error.fact if isinstance(error, WriteError) else error.strerror or str(error)
        return failure(f"{place}: {said}", "make sure that you may write there, or set run.folder")
    if mount.is_memory:
        return warning(f"{place} is in memory, and is lost when the machine restarts", "set run.folder to a disk")
    if job.request.nodes > 1 and not mount.is_shared:
        return warning(
            f"{place}: {mount.kind} is mostly of one machine, and all {job.request.nodes} nodes must see the run",
            "set run.folder to a file system that all nodes share",
        )
    return ok(f"{place}: HDF5 file written and read back in {1000 * (time.perf_counter() - started):.0f} ms")


def _write_and_read(folder: Path) -> None:
    """Write and read as a run does, in a temporary folder.

    Raises:
        OSError: the system refuses, or what is read is not what was written.
    """
    import numpy as np

    from tlt_hpc.storage.hdf5 import CommittedFile, FileKind, put_array, replacing_file

    values, kind = np.arange(_MB // 8), FileKind("preflight trial", 1, "remove it")
    with tempfile.TemporaryDirectory(prefix=".tlt-preflight-", dir=folder) as trial:
        file = Path(trial) / "trial.h5"
        with replacing_file(file, kind, 1) as root:
            put_array(root, "values", values)
        with CommittedFile(file, kind) as written:
            if not np.array_equal(written.read_array("values"), values):
                raise OSError("what is read is not what was written")


# --- torch ---


def torch_build() -> tuple[str, str]:
    """Torch's version, and the CUDA version that it is built for, such as ``12.8``; empty for a build for CPUs.

    Reads torch's version.py, since importing torch takes seconds.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Skip("torch is not installed")
    version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return version["__version__"], version["cuda"] or ""


def check_torch(job: PlannedJob) -> Finding:
    """The build of torch is for the job's device; whether the driver is new enough, torch reports at the start."""
    version, cuda = torch_build()
    if job.uses_gpu and not cuda:
        return failure(
            f"torch {version} in {sys.prefix} is a build for CPUs, and the job runs on GPUs",
            "install torch's CUDA build (environment.yml; on a login node CONDA_OVERRIDE_CUDA says which)",
        )
    if job.uses_gpu and (missing := missing_for_triton(os.environ)):
        return warning(f"this machine has {missing}, which Triton needs where the job runs", NEEDS_COMPILER)
    return ok(f"torch {version} for {f'CUDA {cuda}' if cuda else 'CPUs'}, in {sys.prefix}")
