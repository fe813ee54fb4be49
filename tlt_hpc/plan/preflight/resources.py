"""Whether the job fits: its predicted memory on the nodes, and what it writes to disk: bytes, quota, files."""

from __future__ import annotations

import getpass
import grp
import math
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.plan.preflight import machine
from tlt_hpc.plan.preflight.limits import partition_of
from tlt_hpc.plan.preflight.machine import size
from tlt_hpc.plan.preflight.planned_job import PlannedJob
from tlt_hpc.plan.preflight.program import ask
from tlt_hpc.plan.preflight.results import Finding, Skip, failure, ok, warning, worst

_MB = 2**20


def check_memory(job: PlannedJob) -> Finding:
    """The peak of each GPU and of each node's host memory, as ``tlt plan`` predicts them."""
    from tlt_hpc.plan.memory.plan import MemoryLimits
    from tlt_hpc.plan.memory.summary import verdict, way_out

    plan = job.plan
    limits = MemoryLimits(_gpu_bytes(job), _host_bytes(job))
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
    return min((gpu.num_bytes for gpu in machine.read_gpus() if gpu.num_bytes is not None), default=None)


def _host_bytes(job: PlannedJob) -> int | None:
    """Memory of a node: as requested from Slurm, or of the partition's smallest node; else this machine's."""
    if not job.asks_slurm:
        return machine.memory_bytes() if job.request.nodes == 1 else None
    if job.request.memory_mb:
        return job.request.memory_mb * _MB
    try:
        groups = partition_of(job).groups
    except Skip:
        return None
    gpus = job.request.gpus_per_node
    return min((group.memory_mb for group in groups if group.gpus >= gpus), default=0) * _MB or None


_SURE = ("checkpoints", "the drafter's between them")
"""Parts of the plan that are written whatever the responses are; the others are upper bounds."""
_QUOTA_SECONDS = 30.0
_KIB = 1024
_QUOTA_FIELDS = 4
_MAKE_ROOM = "make room there, set run.folder to another place, or lower checkpoint.keep or drafter.cache_bytes"


@dataclass(frozen=True)
class Need:
    """Bytes that a run writes to its folder at least and at most, and about how many files."""

    sure: int
    most: int
    files: int

    def against(self, free: float, files: float, of: str) -> Finding:
        """Whether this much space is enough."""
        room = "no limit of bytes" if math.isinf(free) else f"{size(free)} free"
        words = f"{room} of {of}, the run writes {size(self.sure)} to {size(self.most)}"
        if free < self.sure:
            return failure(words, _MAKE_ROOM)
        if files < self.files:
            return failure(f"{files:,.0f} more files fit on {of}, the run makes about {self.files:,}", _MAKE_ROOM)
        if free < self.most:
            return warning(f"{words}, the most where all responses are of full length", _MAKE_ROOM)
        return ok(words)


@dataclass(frozen=True)
class Room:
    """What a quota still allows; infinite if there is no limit."""

    num_bytes: float
    files: float


UNLIMITED = Room(math.inf, math.inf)


@dataclass(frozen=True)
class Quota:
    """A quota that counts what a run writes, and whose it is: the user's, a group's or a project's."""

    of: str
    room: Room


def need_of(job: PlannedJob) -> Need:
    """What the run still writes, without what is there already."""
    config, ranks = job.config, job.num_ranks
    elsewhere = ("features",) if config.drafter.cache_folder else ()
    parts = {part.name: part.num_bytes for part in job.plan.disk if part.name not in elsewhere}
    saves = config.checkpoint.keep + 1 + (3 if "the drafter's between them" in parts else 0)
    files = config.run.num_steps * (ranks + 1) + 3 * ranks * saves + 3 * ranks
    there = _bytes_in(config.folder)
    sure = sum(parts.get(name, 0) for name in _SURE)
    return Need(max(0, sure - there), max(0, sum(parts.values()) - there), files)


def check_disk(job: PlannedJob) -> Finding:
    """The file system of the run's folder has enough space and files left."""
    need = need_of(job)
    folder = machine.nearest_folder(job.config.folder)
    found = os.statvfs(folder)
    files = found.f_favail if found.f_files else float("inf")  # some file systems do not count
    return need.against(found.f_bavail * found.f_frsize, files, machine.mount_of(folder).point)


def check_quota(job: PlannedJob) -> Finding:
    """The quotas there, of user, group and project: by ``lfs quota`` on Lustre or ``quota`` elsewhere."""
    folder = machine.nearest_folder(job.config.folder)
    mount = machine.mount_of(folder)
    quotas = _lustre_quotas(mount, folder) if mount.kind == "lustre" else _quotas(mount, folder)
    if not quotas:
        raise Skip(f"no quota of {mount.point} is reported here; see your site's pages for what you may write")
    limited = [quota for quota in quotas if quota.room != UNLIMITED]
    if not limited:
        return ok(f"none on {mount.point} for {' and '.join(quota.of for quota in quotas)}")
    need = need_of(job)
    return worst(
        need.against(one.room.num_bytes, one.room.files, f"{one.of}'s quota on {mount.point}") for one in limited
    )


def _quotas(mount: machine.Mount, folder: Path) -> list[Quota]:
    """The user's quota, and that of the group which files written in the folder will have."""
    if shutil.which("quota") is None:
        return []
    asked = ("your user", ["quota", "-w", "-p"]), (_group_words(folder), ["quota", "-w", "-p", "-g", _group_of(folder)])
    found = ((of, _reported_by_quota(command, mount)) for of, command in asked)
    return [Quota(of, room) for of, room in found if room is not None]


def _reported_by_quota(command: list[str], mount: machine.Mount) -> Room | None:
    """What ``quota`` reports of this mount; None if it has no line for it."""
    answer = ask(command, _QUOTA_SECONDS)  # its status says whether a limit is exceeded
    for words in (line.split() for line in answer.out.splitlines()):
        if words and words[0] in (mount.source, mount.point):
            return _room_of(words[1:])
    return None


def _lustre_quotas(mount: machine.Mount, folder: Path) -> list[Quota]:
    """As ``_quotas``, and that of the folder's project if it has one."""
    if shutil.which("lfs") is None:
        return []
    asked = [("your user", "-u", getpass.getuser()), (_group_words(folder), "-g", _group_of(folder))]
    words = ask(["lfs", "project", "-d", str(folder)], _QUOTA_SECONDS).out.split()
    if words and words[0].isdigit() and words[0] != "0":
        asked.append((f"project {words[0]}", "-p", words[0]))
    quotas = []
    for of, option, whose in asked:
        words = ask(["lfs", "quota", "-q", option, whose, mount.point], _QUOTA_SECONDS).out.split()
        room = _room_of(words[1:])
        quotas += [Quota(of, room)] if room is not None else []
    return quotas


def _group_of(folder: Path) -> str:
    """The group of files written in a folder: the folder's own if it is inherited (setgid), else the user's."""
    found = folder.stat()
    number = found.st_gid if found.st_mode & stat.S_ISGID else os.getegid()
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:  # a group of another machine
        return str(number)


def _group_words(folder: Path) -> str:
    return f"group {_group_of(folder)}"


def _room_of(words: list[str]) -> Room | None:
    """Parses ``used soft hard grace`` of KiB, then of files; a star marks what is exceeded, 0 means no limit."""
    numbers = [word.rstrip("*") for word in words]
    if len(numbers) < 2 * _QUOTA_FIELDS or not all(re.fullmatch(r"\d+", numbers[i]) for i in (0, 1, 2, 4, 5, 6)):
        return None
    kib, files = (_left(*map(int, numbers[i : i + 3])) for i in (0, _QUOTA_FIELDS))
    return Room(kib * _KIB, files)


def _left(used: int, soft: int, hard: int) -> float:
    limit = min((one for one in (soft, hard) if one), default=0)
    return max(0, limit - used) if limit else float("inf")


def _bytes_in(folder: Path) -> int:
    """What a run that will be resumed has written."""
    if not folder.is_dir():
        return 0
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
