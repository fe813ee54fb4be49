"""Whether there is room for what a run writes: free bytes, quota, and the number of files."""

from __future__ import annotations

import getpass
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.preflight import machine
from tlt_hpc.preflight.ask import ask
from tlt_hpc.preflight.machine import size
from tlt_hpc.preflight.subject import Subject
from tlt_hpc.preflight.verdict import Finding, Skip, failure, ok, warning

_SURE = ("checkpoints", "the drafter's between them")
"""Of the plan's parts: the bytes that are written whatever the responses are. The others are upper bounds."""
_QUOTA_SECONDS = 30.0
_KIB = 1024
_QUOTA_FIELDS = 4
_MAKE_ROOM = "make room there, set run.folder to another place, or lower checkpoint.keep or drafter.cache_bytes"


@dataclass(frozen=True)
class Need:
    """Bytes that a run writes to its folder for sure, and at most; and about how many files."""

    sure: int
    most: int
    files: int

    def against(self, free: float, files: float, of: str) -> Finding:
        """Whether that much room is enough."""
        words = f"{size(free)} free of {of}, the run writes {size(self.sure)} to {size(self.most)}"
        if free < self.sure:
            return failure(words, _MAKE_ROOM)
        if files < self.files:
            return failure(f"{files:,.0f} more files fit on {of}, the run makes about {self.files:,}", _MAKE_ROOM)
        if free < self.most:
            return warning(f"{words}, the most where all responses are of full length", _MAKE_ROOM)
        return ok(words)


@dataclass(frozen=True)
class Quota:
    """What a user may still write; infinite where there is no limit."""

    num_bytes: float
    files: float


def need_of(subject: Subject) -> Need:
    """What the run writes, less what it has written already."""
    config, ranks = subject.config, subject.num_ranks
    elsewhere = ("features",) if config.drafter.cache_folder else ()
    parts = {part.name: part.num_bytes for part in subject.plan.disk if part.name not in elsewhere}
    saves = config.checkpoint.keep + 1 + (3 if "the drafter's between them" in parts else 0)
    files = config.run.num_steps * (ranks + 1) + 3 * ranks * saves + 3 * ranks
    there = _bytes_in(config.folder)
    sure = sum(parts.get(name, 0) for name in _SURE)
    return Need(max(0, sure - there), max(0, sum(parts.values()) - there), files)


def check_disk(subject: Subject) -> Finding:
    """The file system of the run's folder."""
    need = need_of(subject)
    folder = machine.nearest_folder(subject.config.folder)
    found = os.statvfs(folder)
    files = found.f_favail if found.f_files else float("inf")  # some file systems do not count
    return need.against(found.f_bavail * found.f_frsize, files, machine.mount_of(folder).point)


def check_quota(subject: Subject) -> Finding:
    """The user's quota there, by ``lfs quota`` on Lustre or ``quota`` elsewhere."""
    folder = machine.nearest_folder(subject.config.folder)
    mount = machine.mount_of(folder)
    quota = _lustre_quota(mount) if mount.kind == "lustre" else _quota(mount)
    if quota is None:
        raise Skip(f"no quota of {mount.point} is told here; see your site's pages for what you may write")
    return need_of(subject).against(quota.num_bytes, quota.files, f"your quota on {mount.point}")


def _quota(mount: machine.Mount) -> Quota | None:
    if shutil.which("quota") is None:
        return None
    answer = ask(["quota", "-w", "-p"], _QUOTA_SECONDS)  # its status says whether a limit is exceeded
    for line in answer.out.splitlines():
        words = line.split()
        if words and words[0] in (mount.source, mount.point):
            return _quota_of(words[1:])
    return None


def _lustre_quota(mount: machine.Mount) -> Quota | None:
    if shutil.which("lfs") is None:
        return None
    answer = ask(["lfs", "quota", "-q", "-u", getpass.getuser(), mount.point], _QUOTA_SECONDS)
    words = answer.out.split()
    return _quota_of(words[1:]) if words else None


def _quota_of(words: list[str]) -> Quota | None:
    """Of ``used soft hard grace``, first of KiB, then of files; a star marks what is exceeded, 0 means no limit."""
    numbers = [word.rstrip("*") for word in words]
    if len(numbers) < 2 * _QUOTA_FIELDS or not all(re.fullmatch(r"\d+", numbers[i]) for i in (0, 1, 2, 4, 5, 6)):
        return None
    kib, files = (_left(*map(int, numbers[i : i + 3])) for i in (0, _QUOTA_FIELDS))
    return Quota(kib * _KIB, files)


def _left(used: int, soft: int, hard: int) -> float:
    limit = min((one for one in (soft, hard) if one), default=0)
    return max(0, limit - used) if limit else float("inf")


def _bytes_in(folder: Path) -> int:
    """What a run that is to go on has written."""
    if not folder.is_dir():
        return 0
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
