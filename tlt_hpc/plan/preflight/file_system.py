"""Tries on the run's file systems what a run does there, and removes the files again."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tlt_hpc.plan.preflight import machine
from tlt_hpc.plan.preflight.planned_job import PlannedJob
from tlt_hpc.plan.preflight.results import Finding, failure, ok, warning, worst
from tlt_hpc.storage.folder import WriteError, node_folder, writing_beside

_TRIAL_BYTES = 2**20
_SLOW_SECONDS = 2.0
"""Seconds for a file of a megabyte to reach the disk; a run writes one per rank and step."""
_WRITABLE = "make sure that you may write there, or set {key} to another place"


def check_run_folder(job: PlannedJob) -> Finding:
    """The run's folder can be written, synced, renamed in and read back, and its file system is suitable."""
    folder = machine.nearest_folder(job.config.folder)
    mount = machine.mount_of(folder)
    try:
        with trial_folder(folder) as trial:
            seconds = _try_files(trial)
    except OSError as error:
        return failure(f"{folder} ({mount.kind}): {_said(error)}", _WRITABLE.format(key="run.folder"))
    words = f"{folder} ({mount.kind}): write, fsync, rename and read back in {1000 * seconds:.0f} ms"
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
    if seconds > _SLOW_SECONDS:
        return warning(f"{words}, which is slow", "set run.folder to a faster file system")
    return ok(words)


def check_hdf5(job: PlannedJob) -> Finding:
    """An HDF5 file can be written to the run's file system and read back, with HDF5's own locking off as in a run."""
    import numpy as np

    from tlt_hpc.storage.hdf5 import CommittedFile, FileKind, put_array, replacing

    folder, kind = machine.nearest_folder(job.config.folder), FileKind("preflight trial", 1, "remove it")
    values = np.arange(_TRIAL_BYTES // 8)
    try:
        with trial_folder(folder) as trial:
            with replacing(trial / "trial.h5", kind, 1) as root:
                put_array(root, "values", values)
            with CommittedFile(trial / "trial.h5", kind) as written:
                is_same = bool(np.array_equal(written.array("values"), values))
    except OSError as error:
        return failure(f"{folder}: {_said(error)}", _WRITABLE.format(key="run.folder"))
    if not is_same:
        return failure(f"{folder} returns other bytes than were written", "set run.folder to another file system")
    return ok("written and read back, locking off")


def check_local_folder(job: PlannedJob) -> Finding:
    """The node's local folders work: for compiled kernels, as in the batch scripts, and for features."""
    config = job.config
    folders = {"TLT_LOCAL_DISK": Path(local_disk(os.environ))}
    if config.drafter.cache_folder:
        try:
            folders["drafter.cache_folder"] = node_folder(
                config.drafter.cache_folder, config.folder, socket.gethostname()
            )
        except ValueError as error:
            if not job.asks_slurm:
                raise
            return warning(f"{error}".rpartition("; ")[0], "make sure that it is set inside a job on every node")
    return worst(_check_local(key, machine.nearest_folder(path)) for key, path in folders.items())


def local_disk(environment: Mapping[str, str]) -> str:
    """The disk on which sbatch/env.sh puts compiled files; TMPDIR counts only if it was made for the job."""
    if environment.get("TLT_LOCAL_DISK"):
        return environment["TLT_LOCAL_DISK"]
    is_the_jobs = (environment.get("SLURM_JOB_ID") or "none") in environment.get("TMPDIR", "")
    return environment["TMPDIR"] if is_the_jobs else environment.get("SLURM_TMPDIR") or "/tmp"


def _check_local(key: str, folder: Path) -> Finding:
    mount = machine.mount_of(folder)
    try:
        with trial_folder(folder) as trial:
            _try_files(trial)
    except OSError as error:
        return failure(f"{folder} ({mount.kind}): {_said(error)}", _WRITABLE.format(key=key))
    if mount.is_shared:
        return warning(
            f"{folder} ({mount.kind}) is shared by the nodes: what ranks compile there races, and may go stale",
            f"set {key} to a disk of the node's own",
        )
    if mount.is_memory:
        return warning(f"{folder} ({mount.kind}) is in memory, which the job's own is counted from",
                       f"set {key} to a disk of the node's own, if there is one")  # fmt: skip
    return ok(f"{folder} ({mount.kind}) on this machine")


@contextmanager
def trial_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder in ``folder``, removed at the end.

    Raises:
        OSError: it cannot be made there.
    """
    trial = Path(tempfile.mkdtemp(prefix=".tlt-preflight-", dir=folder))
    try:
        yield trial
    finally:
        shutil.rmtree(trial)


def _said(error: OSError) -> str:
    return error.fact if isinstance(error, WriteError) else error.strerror or str(error)


def _try_files(trial: Path) -> float:
    """Write as a run writes; returns the seconds that it took.

    Raises:
        OSError: the system refuses, or what is read is not what was written.
    """
    started, content = time.perf_counter(), os.urandom(_TRIAL_BYTES)
    with writing_beside(trial / "step" / "trial") as part:
        part.write_bytes(content)
    if [path.name for path in (trial / "step").iterdir()] != ["trial"]:
        raise OSError("a renamed file is not listed")
    if (trial / "step" / "trial").read_bytes() != content:
        raise OSError("what is read is not what was written")
    return time.perf_counter() - started
