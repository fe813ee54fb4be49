"""Every path of a run, and how a file appears there whole or not at all. Treats the contents of files as opaque."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import adding_path_to_errors, read_text
from tlt_hpc.common.formatting import FIRST_STEP

PART_SUFFIX = ".part"
_STEP_NAME = re.compile(r"step-([0-9]{6,9})")
_UMASK = re.compile(r"^Umask:\s+([0-7]+)", re.MULTILINE)
_RANK_NAME = re.compile(r"rank-([0-9]{4,9})\.h5")
COMPARISON = "-compare-"
"""In the name of a folder that ``tlt compare`` has made, which has a run's folder for each mode."""
GIVE_OUTPUT = "give another place with --output"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NFS_SECONDS = 60.0
"""Seconds for which an NFS client may by default use an old listing of a folder."""


class WriteError(OSError):
    """A file of the run could not be written (disk full, quota, permission); its text is one line with the remedy."""

    def __init__(self, path: Path, cause: OSError, is_changed: bool = False) -> None:
        self.fact = f"cannot write {path}: {cause.strerror or cause}"
        """The text without the remedy, for files that have another."""
        state = "it is there, but a power failure may undo that" if is_changed else "nothing was changed"
        remedy = "make room there" if cause.errno in NO_ROOM else "make sure that you can write there"
        super().__init__(f"{self.fact}; {state}: {remedy} or set run.folder to another place, and restart")


class RunFolder:
    """The paths of one run below ``path``; creates nothing until ``make_missing_folders``."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.environment = self.path / "environment.jsonl"
        self.finished = self.path / "finished.json"
        self.data = self.path / "data.json"
        """Fingerprints of the data that the run draws from."""
        self.tracking = self.path / "tracking.json"
        """The steps that each tracker has been given."""
        self.checkpoints = self.path / "checkpoints"
        self.drafter_checkpoints = self.path / "drafter-checkpoints"
        self.rollouts = self.path / "rollouts"
        self.cache = self.path / "cache"
        self.kept = self.path / "kept"
        self.status = self.path / "status"
        """The activity of each rank, the last one where it has ended."""
        self.features = self.path / "features"
        self.training = self.path / "training"
        """These two are a warm-up's: what it learns from, and where its training stands."""

    @property
    def is_warmup(self) -> bool:
        """True if a drafter is, or was, warmed up here; features may be deleted afterwards."""
        return self.training.is_dir() or self.features.is_dir()

    def kept_responses_path(self, step: int, rank: int, number: int) -> Path:
        """The file of a rank's finished responses of a step in progress, saved for the ``number``-th time."""
        return _folder_of(self.kept, step) / f"rank-{rank:04d}-{number:06d}.h5"

    def next_kept_responses_path(self, step: int, rank: int) -> Path:
        """The rank's first file of ``kept_responses_path`` that does not exist yet."""
        numbers = [path.stem.rpartition("-")[2] for path in self.kept_responses_paths(step) if rank_of(path) == rank]
        return self.kept_responses_path(
            step, rank, max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1
        )

    def kept_responses_paths(self, step: int) -> list[Path]:
        """All ranks' files of ``kept_responses_path`` that exist, in order."""
        return sorted(_folder_of(self.kept, step).glob("rank-*-[0-9]*.h5"))

    def make_missing_folders(self) -> None:
        """Make the run's folders; those that exist stay as they are.

        Raises:
            WriteError: no room or no permission.
        """
        for folder in (self.checkpoints, self.rollouts, self.cache, self.status):
            make_folder(folder)

    def rollout_log(self, step: int, rank: int) -> Path:
        """The file of a rank's rollout log of a step."""
        return _folder_of(self.rollouts, step) / f"rank-{rank:04d}.h5"

    def feature_cache(self, step: int, rank: int) -> Path:
        """The file of a rank's feature cache of a step."""
        return _folder_of(self.cache, step) / f"rank-{rank:04d}.h5"

    def rollout_steps(self) -> list[int]:
        """Steps that have a folder in the rollout log, ascending."""
        return _list_steps(self.rollouts)

    def cache_steps(self) -> list[int]:
        """Steps that have a folder in the feature cache, ascending; none where that is no folder."""
        return _list_steps(self.cache) if self.cache.is_dir() else []

    def rollout_logs(self, step: int) -> list[Path]:
        """Closed files of a step, ordered by rank."""
        return _closed_files(self.rollouts, step)

    def feature_caches(self, step: int) -> list[Path]:
        """Closed files of a step, ordered by rank."""
        return _closed_files(self.cache, step) if _folder_of(self.cache, step).is_dir() else []

    def cache_parts(self) -> list[Path]:
        """Feature-cache files that are being written, or whose writer was killed."""
        return sorted(self.cache.glob(f"step-*/rank-*.h5{PART_SUFFIX}"))

    def remove_cache_step(self, step: int) -> None:
        """Remove a step's cache folder once no rank has a file in it."""
        with suppress(OSError):  # not empty, or another rank removed it first
            _folder_of(self.cache, step).rmdir()


def node_folder(template: str, run: Path, hostname: str) -> Path:
    """The folder of a run on one node, below ``template`` with ``~`` and variables as they are there.

    It is the run's and the node's alone, even where the folder turns out to be shared: named after the run, the whole
    path of its folder and the host.

    Raises:
        UserError: a variable is not set here.
    """
    expanded = os.path.expandvars(Path(template).expanduser())
    if "$" in expanded:
        raise UserError(
            f"drafter.cache_folder = {template!r}: {expanded!r} has a variable that is not set on {hostname}; "
            "set it for all ranks, or give a folder by its name"
        )
    digest = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:8]
    return Path(expanded).absolute() / f"{run.name}-{digest}" / hostname


def rank_of(path: Path) -> int:
    """The rank in a file name such as ``rank-0003.h5``, ``rank-0003.h5.part`` or ``rank-0003-000001.h5``."""
    return int(re.split(r"[-.]", path.name)[1])


def part_path(path: Path) -> Path:
    """The path at which a file is written until it is whole."""
    return path.with_name(path.name + PART_SUFFIX)


def publish_part(path: Path, durable: bool = True) -> None:
    """Rename ``path``'s finished part to ``path``, replacing what was there.

    ``durable`` makes it survive a power failure too; a rename alone already survives the death of the process.

    Raises:
        WriteError: the disk refused; the part stays and ``path`` is unchanged, unless the text says that it is there.
    """
    is_changed = False
    try:
        apply_umask(part_path(path))
        if durable:
            sync(part_path(path))
        part_path(path).replace(path)
        is_changed = True
        if durable:
            sync(path.parent)
    except OSError as error:
        raise WriteError(path, error, is_changed) from error


@contextmanager
def writing_atomically(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yield the part to write; publish it on success, ``durable`` or not, and remove it on any error.

    Raises:
        WriteError: the disk refused, in the body or at the rename.
    """
    make_folder(path.parent)
    part = part_path(path)
    try:
        yield part
        publish_part(path, durable)
    except BaseException as error:
        with suppress(OSError):  # that would hide the first one
            part.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, WriteError):
            raise WriteError(path, error) from error
        raise


def check_writable(folder: Path, remedy: str) -> None:
    """Refuse a folder that this user cannot make or write to; it is left as it is.

    Raises:
        UserError: with the remedy.
    """
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise UserError(f"cannot write {folder}: {there} is a file; {remedy}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {folder}: no permission to write to {there}; {remedy}")


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, durably.

    Raises:
        WriteError: no room or no permission.
    """
    try:
        make_synced_folder(folder)
    except OSError as error:
        raise WriteError(folder, error) from error


def make_synced_folder(folder: Path) -> None:
    """Make a folder and its parents, and have them reach the disk.

    Raises:
        OSError: with the path, as the disk says.
    """
    if not folder.is_dir():
        new = [each for each in (folder, *folder.parents) if not each.is_dir()]
        folder.mkdir(parents=True, exist_ok=True)
        for each in new:
            sync(each.parent)


def apply_umask(*paths: Path) -> None:
    """Give files the permissions that the user's umask asks for; some writers, as of safetensors, make theirs private.

    The umask is read from /proc: ``os.umask`` would change it for all threads for a moment.
    """
    found = _UMASK.search(read_text(Path("/proc/self/status")))
    assert found is not None, "Linux 4.7 or newer tells the umask"
    for path in paths:
        path.chmod(0o666 & ~int(found[1], 8))


def sync(path: Path) -> None:
    """Have a file or folder reach the disk.

    Raises:
        OSError: with the path, as the disk says.
    """
    descriptor = os.open(path, os.O_RDONLY)
    with adding_path_to_errors(path):
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def wait_for_listed_files(folder: Path, names: Set[str]) -> Set[str]:
    """The names that a folder still does not list after the time that NFS may take; returns once it lists all.

    It is listed, not asked for the names: a client keeps for a while that a name was not there.
    """
    end = time.monotonic() + NFS_SECONDS
    while hidden := names - set(_list_names(folder) if folder.is_dir() else []):
        if time.monotonic() >= end:
            break
        time.sleep(0.1)
    return hidden


def _folder_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step + FIRST_STEP:06d}"


def _list_steps(folder: Path) -> list[int]:
    return sorted(int(found[1]) - FIRST_STEP for name in _list_names(folder) if (found := _STEP_NAME.fullmatch(name)))


def _closed_files(folder: Path, step: int) -> list[Path]:
    place = _folder_of(folder, step)
    names = sorted(_list_names(place), key=lambda name: (len(name), name))
    return [place / name for name in names if _RANK_NAME.fullmatch(name)]


def _list_names(folder: Path) -> list[str]:
    """The names in a folder, none where there is no folder; ``glob`` would return none where it may not be read, too.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []


_RUN_MARKS = ("config.toml", "metrics.jsonl", "rollouts")
_MAX_RUNS = 4


def no_run_message(path: Path, lacks: str = "rollouts/ and no metrics.jsonl") -> str:
    """A message: why a path is not the folder of a run, and which runs are in it or beside it."""
    if path.is_file():
        return f"{path} is a file; give a run's folder, with its rollouts/ and metrics.jsonl"
    why = f"{path} holds no {lacks}" if path.exists() else f"{path} does not exist"
    for folder in (path, path.parent, Path("runs")):
        if names := sorted({mark.parent.name for name in _RUN_MARKS for mark in folder.glob(f"*/{name}")}):
            return f"{why}; runs in {folder}: {', '.join(names[:_MAX_RUNS])}{', ...' * (len(names) > _MAX_RUNS)}"
    return f"{why}; give a run's folder"
