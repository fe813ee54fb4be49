"""Every path of a run, and how a file appears there whole or not at all. Treats the contents of files as opaque."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PART_SUFFIX = ".part"
_STEP_NAME = re.compile(r"step-([0-9]{6,9})")
_RANK_NAME = re.compile(r"rank-([0-9]{4,9})\.h5")


_NO_ROOM, _FORBIDDEN = "make room there", "see to it that you may write there"
_REMEDIES = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EFBIG: _NO_ROOM,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: _FORBIDDEN,
    errno.ELOOP: "remove the link on the way that leads back to itself",
    errno.ENOTDIR: "move the file away that is where a folder should be",
    errno.EEXIST: "move the file away that is where a folder should be",
    errno.EISDIR: "move the folder away that is where a file should be",
    errno.ENAMETOOLONG: "use a shorter run.name or run.folder",
}
"""By the cause of a refusal."""


class WriteError(OSError):
    """A file of the run could not be written (disk full, quota, permission); its text is one line with the remedy."""

    def __init__(self, path: Path, cause: OSError) -> None:
        self.fact = f"cannot write {path}: {cause.strerror or cause}"
        """The text without the remedy, for files that have another."""
        remedy = _REMEDIES.get(cause.errno or 0, "see what is wrong with the file system")
        super().__init__(
            f"{self.fact}; what was there is as before: {remedy} (or set run.folder to another place) and start again"
        )


class RunFolder:
    """The paths of one run below ``path``; creates nothing until told to."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def environment(self) -> Path:
        return self.path / "environment.jsonl"

    @property
    def finished(self) -> Path:
        return self.path / "finished.json"

    @property
    def cost_profile(self) -> Path:
        """What rounds cost where the newest start ran, as it measured or read them ahead of the first rollout."""
        return self.path / "cost_profile.json"

    @property
    def data(self) -> Path:
        """Fingerprints of the data that the run draws from."""
        return self.path / "data.json"

    @property
    def tracking(self) -> Path:
        """What each tracker has been told."""
        return self.path / "tracking.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def drafter_checkpoints(self) -> Path:
        return self.path / "drafter-checkpoints"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    @property
    def kept(self) -> Path:
        return self.path / "kept"

    def kept_part(self, step: int, rank: int, number: int) -> Path:
        """Where a rank keeps finished responses of a step that is under way, the ``number``-th time."""
        return _folder_of(self.kept, step) / f"rank-{rank:04d}-{number:06d}.h5"

    def next_kept_part(self, step: int, rank: int) -> Path:
        """The next one that is not there."""
        names = [path.stem.rpartition("-")[2] for path in self.kept_parts(step, rank)]
        return self.kept_part(step, rank, max((int(name) for name in names if name.isdecimal()), default=-1) + 1)

    def kept_parts(self, step: int, rank: int | None = None) -> list[Path]:
        """Such files, of all ranks or of one, in order."""
        return sorted(_folder_of(self.kept, step).glob(f"rank-{'*' if rank is None else f'{rank:04d}'}-*.h5"))

    @property
    def status(self) -> Path:
        """What each rank is at, or was at when it ended."""
        return self.path / "status"

    def create(self) -> None:
        """Make the run's folders; those that exist stay as they are.

        Raises:
            WriteError: no room or no permission.
        """
        for folder in (self.checkpoints, self.rollouts, self.cache, self.status):
            make_folder(folder)

    def rollout_log(self, step: int, rank: int) -> Path:
        return _file_of(self.rollouts, step, rank)

    def feature_cache(self, step: int, rank: int) -> Path:
        return _file_of(self.cache, step, rank)

    def rollout_steps(self) -> list[int]:
        """Steps that have a folder in the rollout log, ascending."""
        return _steps(self.rollouts)

    def cache_steps(self) -> list[int]:
        """Steps that have a folder in the feature cache, ascending; none where that is no folder."""
        return _steps(self.cache) if self.cache.is_dir() else []

    def rollout_logs(self, step: int) -> list[Path]:
        """Closed files of a step, ordered by rank."""
        return _closed_files(self.rollouts, step)

    def rollout_files(self, step: int) -> tuple[list[Path], list[Path]]:
        """The same, and what else there is of such a kind."""
        closed, place = self.rollout_logs(step), _folder_of(self.rollouts, step)
        names = sorted(name for name in _names(place) if name.startswith("rank-") and name.endswith(".h5"))
        return closed, [place / name for name in names if place / name not in closed]

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
    """Where a run keeps what belongs to one node, below ``template`` with ``~`` and variables as they are there.

    It is the run's and the node's alone, even where the folder turns out to be shared: named after the run, the whole
    path of its folder and the host.

    Raises:
        ValueError: a variable is not set here.
    """
    expanded = os.path.expandvars(Path(template).expanduser())
    if "$" in expanded:
        raise ValueError(
            f"drafter.cache_folder = {template!r}: {expanded!r} has a variable that is not set on {hostname}; "
            "set it for all ranks, or give a folder by its name"
        )
    digest = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:8]
    return Path(expanded).absolute() / f"{run.name}-{digest}" / hostname


def rank_of(path: Path) -> int:
    """The rank in a file name such as ``rank-0003.h5`` or ``rank-0003.h5.part``."""
    return int(path.name.removeprefix("rank-").partition(".")[0])


def part_of(path: Path) -> Path:
    """Where a file is written until it is whole."""
    return path.with_name(path.name + PART_SUFFIX)


def publish(path: Path, durable: bool = True) -> None:
    """Rename ``path``'s finished part to ``path``, replacing what was there.

    ``durable`` makes it survive a power failure too; a rename alone already survives the death of the process.

    Raises:
        WriteError: the disk refused; the part stays and ``path`` is as before.
    """
    try:
        share(part_of(path))
        if durable:
            sync(part_of(path))
        part_of(path).replace(path)
        if durable:
            sync(path.parent)
    except OSError as error:
        raise WriteError(path, error) from error


@contextmanager
def writing_beside(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yield the part to write; publish it on success, ``durable`` or not, and remove it on any error.

    Raises:
        WriteError: the disk refused, in the body or at the rename.
    """
    make_folder(path.parent)
    part = part_of(path)
    try:
        yield part
        publish(path, durable)
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(path, error) from error
    finally:
        part.unlink(missing_ok=True)  # gone already where it was published


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, durably.

    Raises:
        WriteError: no room or no permission.
    """
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            sync(folder.parent)
    except OSError as error:
        raise WriteError(folder, error) from error


def share(path: Path) -> None:
    """Give a file the permissions that the user's umask asks for; some writers make theirs private."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def sync(path: Path) -> None:
    """Have a file or folder reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file_of(folder: Path, step: int, rank: int) -> Path:
    return _folder_of(folder, step) / f"rank-{rank:04d}.h5"


def _folder_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def _steps(folder: Path) -> list[int]:
    return sorted(int(found[1]) for name in _names(folder) if (found := _STEP_NAME.fullmatch(name)))


def _closed_files(folder: Path, step: int) -> list[Path]:
    place = _folder_of(folder, step)
    return [place / name for name in sorted(_names(place), key=_in_order) if _RANK_NAME.fullmatch(name)]


def _in_order(name: str) -> tuple[int, str]:
    return len(name), name


def _names(folder: Path) -> list[str]:
    """What a folder has, nothing where there is none; ``glob`` would say the same of one that may not be read.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []


_RUN_MARKS = ("config.toml", "metrics.jsonl", "rollouts")
_MAX_RUNS = 4


def no_run(path: Path, lacks: str = "rollouts/ and no metrics.jsonl") -> str:
    """Why a path is no run's folder (where it is a folder: what it lacks), and what may be meant."""
    if path.exists() and not path.is_dir():
        return f"{path} is a file; give a run's folder, with its rollouts/ and metrics.jsonl"
    if within := _runs_in(path):
        return f"{path} is no run's folder, it holds some; give one of them: {within}"
    why = f"{path} holds no {lacks}" if path.exists() else f"{path} does not exist"
    beside = _runs_in(path.parent)
    return f"{why}; runs in {path.parent}: {beside}" if beside else f"{why}; give a run's folder"


def _runs_in(folder: Path) -> str:
    """The runs in a folder."""
    names = sorted({mark.parent.name for name in _RUN_MARKS for mark in folder.glob(f"*/{name}")})
    return ", ".join(names[:_MAX_RUNS]) + (", ..." if len(names) > _MAX_RUNS else "")
