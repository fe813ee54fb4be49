"""Checks of the machine: memory, disk and quota, the run's file system, Python and packages, torch and the driver."""

from __future__ import annotations

import getpass
import grp
import math
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tlt_hpc.plan.preflight import machine
from tlt_hpc.plan.preflight.machine import Mount, size
from tlt_hpc.plan.preflight.planned_job import PlannedJob
from tlt_hpc.plan.preflight.program import ask
from tlt_hpc.plan.preflight.results import Finding, Skip, failure, failure_of, ok, warning, worst
from tlt_hpc.storage.folder import WriteError, node_folder

_MB, _KIB = 2**20, 1024
_QUOTA_SECONDS = 30.0
_SLOW_SECONDS = 2.0
"""Seconds for a file of a megabyte to reach the disk; a run writes one per rank and step."""
_MAKE_ROOM = "make room there, set run.folder to another place, or lower checkpoint.keep or drafter.cache_bytes"
_SHOWN = ("torch", "mpi4py", "deepspeed", "transformers", "h5py")


def check_memory(job: PlannedJob) -> Finding:
    """The peak of each GPU and of each node's host memory, as ``tlt plan`` predicts them."""
    from tlt_hpc.plan.memory.plan import MemoryLimits
    from tlt_hpc.plan.memory.summary import verdict, way_out

    plan, limits = job.plan, MemoryLimits(_gpu_bytes(job), _host_bytes(job))
    said = verdict(plan, limits)
    if not limits.hold(plan):
        return failure(said.rstrip("."), f"{way_out(plan, limits)} See tlt plan")
    if job.uses_gpu and limits.device is None:
        return warning(f"{said} How much a GPU has is not known here", "give --gpu-memory GB")
    return ok(said)


def _gpu_bytes(job: PlannedJob) -> int | None:
    """Memory of each GPU: as given, or that of this machine's smallest if the job runs here."""
    if job.gpu_bytes is not None or not job.uses_gpu or job.asks_slurm:
        return job.gpu_bytes if job.uses_gpu else None
    return min(job.driver.memory_bytes, default=None)


def _host_bytes(job: PlannedJob) -> int | None:
    """Memory of a node: as requested from Slurm, or of the partition's smallest node; else this machine's."""
    if not job.asks_slurm:
        return machine.memory_bytes() if job.request.nodes == 1 else None
    if job.request.memory_mb:
        return job.request.memory_mb * _MB
    try:
        groups = job.partitions[0].groups
    except Skip:
        return None
    return min((one.memory_mb for one in groups if one.gpus >= job.request.gpus_per_node), default=0) * _MB or None


# --- disk ---


@dataclass(frozen=True)
class Space:
    """Bytes and files that may still be written; infinite if there is no limit."""

    of: str
    num_bytes: float
    files: float


def check_disk(job: PlannedJob) -> Finding:
    """The file system of the run's folder, and the quotas there, have enough space and files left."""
    folder = machine.nearest_folder(job.config.folder)
    mount, found = machine.mount_of(folder), os.statvfs(folder)
    files = found.f_favail if found.f_files else math.inf  # some file systems do not count
    quotas = _quotas(mount, folder)
    spaces = [Space(mount.point, found.f_bavail * found.f_frsize, files), *quotas]
    finding = worst([_judge_space(job, space) for space in spaces])
    told = f"quotas of {' and '.join(quota.of for quota in quotas)}" if quotas else "no quota is reported"
    return ok(f"{finding.found}; {told}") if not finding.remedy else finding


def _judge_space(job: PlannedJob, space: Space) -> Finding:
    config, ranks = job.config, job.num_ranks
    disk = {
        name: count for name, count in job.plan.disk.items() if name != "features" or not config.drafter.cache_folder
    }
    # checkpoints are written whatever the responses are; the other parts are upper bounds
    sure = sum(disk.get(name, 0) for name in ("checkpoints", "the drafter's between them"))
    there = sum(path.lstat().st_size for path in config.folder.rglob("*") if path.is_file())
    sure, most = max(0, sure - there), max(0, sum(disk.values()) - there)
    saves = config.checkpoint.keep + 1 + (3 if "the drafter's between them" in disk else 0)
    files = config.run.num_steps * (ranks + 1) + 3 * ranks * (saves + 1)
    free = "no limit of bytes" if math.isinf(space.num_bytes) else f"{size(space.num_bytes)} free"
    words = f"{free} of {space.of}, the run writes {size(sure)} to {size(most)}"
    if space.num_bytes < sure:
        return failure(words, _MAKE_ROOM)
    if space.files < files:
        return failure(f"{space.files:,.0f} more files fit on {space.of}, the run makes about {files:,}", _MAKE_ROOM)
    if space.num_bytes < most:
        return warning(f"{words}, the most where all responses are of full length", _MAKE_ROOM)
    return ok(words)


def _quotas(mount: Mount, folder: Path) -> list[Space]:
    """Quotas of the user, of the group that new files there will have, and on Lustre of the folder's project."""
    group = _group_of(folder)
    asked = [("your user", ["-u", getpass.getuser()]), (f"group {group}", ["-g", group])]
    program = "lfs" if mount.kind == "lustre" else "quota"
    if shutil.which(program) is None:
        return []
    if program == "lfs":
        project = ask(["lfs", "project", "-d", str(folder)], _QUOTA_SECONDS).out.split()
        if project and project[0].isdigit() and project[0] != "0":
            asked.append((f"project {project[0]}", ["-p", project[0]]))
    found = []
    for of, options in asked:
        command = ["lfs", "quota", "-q", *options, mount.point] if program == "lfs" else ["quota", "-w", "-p", *options]
        answer = ask(command, _QUOTA_SECONDS)  # the status of quota says whether a limit is exceeded
        for words in (line.split() for line in answer.out.splitlines()):
            if words and words[0] in (mount.source, mount.point):
                found += _space_of(f"{of}'s quota on {mount.point}", words[1:])
    return found


def _group_of(folder: Path) -> str:
    """The group of files written in a folder: the folder's own if it is inherited (setgid), else the user's."""
    found = folder.stat()
    number = found.st_gid if found.st_mode & stat.S_ISGID else os.getegid()
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:  # a group of another machine
        return str(number)


def _space_of(of: str, words: list[str]) -> list[Space]:
    """Parses ``used soft hard grace`` of KiB, then of files; a star marks what is exceeded, 0 means no limit."""
    numbers = [word.rstrip("*") for word in words]
    if len(numbers) < 8 or not all(re.fullmatch(r"\d+", numbers[i]) for i in (0, 1, 2, 4, 5, 6)):
        return []
    kib, files = (_left(*map(int, numbers[i : i + 3])) for i in (0, 4))
    return [Space(of, kib * _KIB, files)]


def _left(used: int, soft: int, hard: int) -> float:
    limit = min((one for one in (soft, hard) if one), default=0)
    return max(0, limit - used) if limit else math.inf


def check_run_folder(job: PlannedJob) -> Finding:
    """HDF5 files can be written, synced, renamed and read back in the run's folder and in the feature cache's own."""
    template = job.config.drafter.cache_folder
    return worst([_try_run_folder(job), *([_try_cache_folder(template, job.config.folder)] if template else [])])


def _try_cache_folder(template: str, run: Path) -> Finding:
    remedy = "set drafter.cache_folder to another place on the nodes' disks"
    try:
        folder = machine.nearest_folder(node_folder(template, run, socket.gethostname()))
    except ValueError as error:  # the job may set the variable
        text, _, remedy = str(error).partition("; ")
        return warning(text, remedy)
    mount = machine.mount_of(folder)
    try:
        _try_file(folder)
    except OSError as error:
        said = error.fact if isinstance(error, WriteError) else error.strerror or str(error)
        return failure(f"drafter.cache_folder: {folder} ({mount.kind}): {said}", remedy)
    words = f"drafter.cache_folder: {folder} ({mount.kind})"
    return warning(f"{words} is in memory", remedy) if mount.is_memory else ok(words)


def _try_run_folder(job: PlannedJob) -> Finding:
    folder = machine.nearest_folder(job.config.folder)
    mount = machine.mount_of(folder)
    try:
        seconds = _try_file(folder)
    except OSError as error:
        said = error.fact if isinstance(error, WriteError) else error.strerror or str(error)
        return failure(f"{folder} ({mount.kind}): {said}", "make sure that you may write there, or set run.folder")
    words = f"{folder} ({mount.kind}): HDF5 file written and read back in {1000 * seconds:.0f} ms"
    if mount.is_memory:
        return warning(
            f"{words}; it is in memory, so runs are gone when the machine starts again, and take memory",
            "set run.folder to a place on a disk",
        )
    if job.request.nodes > 1 and not mount.is_shared:
        return warning(
            f"{words}; {mount.kind} is mostly of one machine, and all {job.request.nodes} nodes must see the run",
            "set run.folder to a file system that all nodes share",
        )
    if mount.is_shared and folder.is_relative_to(Path.home()):
        return warning(
            f"{words}; it is in your home folder, which on clusters is usually small and slow",
            "set run.folder to the scratch or project file system",
        )
    return warning(f"{words}, which is slow", "use a faster file system") if seconds > _SLOW_SECONDS else ok(words)


def _try_file(folder: Path) -> float:
    """Write and read as a run does, in a temporary folder; returns the seconds that it took.

    Raises:
        OSError: the system refuses, or what is read is not what was written.
    """
    import numpy as np

    from tlt_hpc.storage.hdf5 import CommittedFile, FileKind, put_array, replacing

    values, kind = np.arange(_MB // 8), FileKind("preflight trial", 1, "remove it")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=".tlt-preflight-", dir=folder) as trial:
        file = Path(trial) / "trial.h5"
        with replacing(file, kind, 1) as root:
            put_array(root, "values", values)
        with CommittedFile(file, kind) as written:
            if not np.array_equal(written.array("values"), values):
                raise OSError("what is read is not what was written")
    return time.perf_counter() - started


# --- Python, packages, torch ---


def check_python(job: PlannedJob) -> Finding:
    """The Python that the job will use; it should be the one that preflight runs in."""
    python, wanted = job.python, SpecifierSet(metadata.metadata("tlt_hpc")["Requires-Python"])
    found = f"{python.version}, {python.program}"
    if not wanted.contains(python.version):
        return failure(f"{found}: the project needs {wanted}", "create the environment again with such a Python")
    if not python.is_this:
        return warning(
            f"{found}, by sbatch/env.sh; preflight runs in {sys.prefix} and checks the packages there",
            "activate the job's environment and call preflight in it, or name this one in TLT_ENVIRONMENT",
        )
    return ok(found)


def check_packages(job: PlannedJob) -> Finding:
    """Every required package is installed in a supported version."""
    wanted = map(Requirement, metadata.requires("tlt_hpc") or [])
    needed = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    wrong = [words for one in needed if (words := _misfit(one))]
    if wrong:
        return failure(", ".join(wrong), "pip install the required versions, or create the environment again")
    return ok(", ".join(f"{name} {metadata.version(name)}" for name in _SHOWN))


def _misfit(wanted: Requirement) -> str:
    """What is wrong with a package, in words; empty if nothing is."""
    try:
        found = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted.name} is not installed ({wanted.specifier})"
    fits = wanted.specifier.contains(found, prereleases=True)
    return "" if fits else f"{wanted.name} {found} is not {wanted.specifier}"


def check_torch(job: PlannedJob) -> Finding:
    """The build of torch is for the job's device, and the driver, if there is one, is new enough for it."""
    driver, python = job.driver, job.python
    if driver.error:
        return failure_of(ValueError(driver.error))
    if not python.torch:
        return failure(f"torch is not installed in {python.prefix}", "create the environment again (environment.yml)")
    cuda, version = python.torch_cuda, python.torch
    if job.uses_gpu and not cuda:
        return failure(
            f"torch {version} in {python.prefix} is a build for CPUs, and the job runs on GPUs",
            "install torch's CUDA build (environment.yml; on a login node CONDA_OVERRIDE_CUDA says which), or name an "
            "environment that has it in TLT_ENVIRONMENT",
        )
    if not cuda:
        return ok(f"torch {version} for CPUs")
    if not driver.gpus:
        if job.needs_gpu and not job.asks_slurm:
            return warning(f"torch {version} for CUDA {cuda}; this machine has no GPU, and the job runs on GPUs",
                           "start the job where there are some; a login node needs none")  # fmt: skip
        return ok(f"torch {version} for CUDA {cuda}; no GPU here, so its driver is not known")
    here = f"{len(driver.gpus)} x {driver.gpus[0]}, driver {driver.version}"
    if driver.cuda and int(driver.cuda.partition(".")[0]) < int(cuda.partition(".")[0]):
        return failure(
            f"torch {version} is for CUDA {cuda}, and the driver ({here}) takes CUDA {driver.cuda} at most",
            f"install torch's build for CUDA {driver.cuda.partition('.')[0]}",
        )
    return ok(f"torch {version} for CUDA {cuda}; {here}, which takes CUDA {driver.cuda or 'of its own'}")
