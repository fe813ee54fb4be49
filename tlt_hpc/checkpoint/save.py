"""One save on one rank's thread: write the rank's files, list them; on rank 0, make a checkpoint of all ranks' lists.

The threads of the ranks meet in the folder alone: a rank's list appears there, whole, when its files have reached the
disk, and rank 0's thread waits for all lists. So a checkpoint is whole as soon as its last file is, wherever the main
threads are, and no thread calls MPI.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tlt_hpc.checkpoint.manifest import (
    JSON,
    STATE_FILE,
    CheckpointError,
    File,
    FileList,
    digest_of,
    open_checkpoint,
    write_manifest,
)
from tlt_hpc.checkpoint.shard_file import Held, write_file
from tlt_hpc.storage.folder import sync

logger = logging.getLogger(__name__)

NAME = re.compile(r"step-(\d{6,})")
PART = ".part"
FIRST_PAUSE_SECONDS = 1e-3
LONGEST_PAUSE_SECONDS = 0.25


@dataclass(frozen=True)
class Save:
    """What is saved where, as one rank's thread knows it."""

    folder: Path
    step: int
    rank: int
    num_ranks: int
    keep: int
    state: Mapping[str, JSON]
    given_up: threading.Event = field(default_factory=threading.Event)
    """Set where another rank could not write."""

    @property
    def final(self) -> Path:
        return self.folder / f"step-{self.step:06d}"

    @property
    def part(self) -> Path:
        return part_of(self.final)

    def write(self, held: Sequence[Held]) -> None:
        """Write this rank's files, one for each part of which it holds anything; rank 0's thread sees it to its end.

        Raises:
            OSError, CheckpointError: what could not be written.
        """
        self.part.mkdir(parents=True, exist_ok=True)
        parts = dict.fromkeys(each.part for each in held)
        files = [self._write_part(part, [each for each in held if each.part == part]) for part in parts]
        self._list(files)
        if self.rank == 0:
            self._seal([file for name in self._await_lists() for file in _read_list(self.part / name)])

    def _write_part(self, part: str, held: Sequence[Held]) -> File:
        path = self.part / f"{part}-{self._suffix(self.rank)}.safetensors"
        try:
            write_file(path, held)
            tensors = sorted((each.stored for each in held), key=lambda stored: stored.name)
            return File(part=part, name=path.name, size=path.stat().st_size, digest=digest_of(path), tensors=tensors)
        except OSError as error:
            raise CheckpointError(f"{path.name}: {error}") from None

    def _suffix(self, rank: int) -> str:
        return f"{rank:05d}-of-{self.num_ranks:05d}"

    def _list(self, files: list[File]) -> None:
        path = self.part / f"{self._suffix(self.rank)}.list"
        beside = part_of(path)
        beside.write_text(FileList(files=files).model_dump_json(), encoding="utf-8")
        beside.rename(path)

    def _await_lists(self) -> list[str]:
        """The names of all ranks' lists, once they are there."""
        wanted = {f"{self._suffix(rank)}.list" for rank in range(self.num_ranks)}
        pause = FIRST_PAUSE_SECONDS
        while not wanted <= {path.name for path in self.part.iterdir()}:
            if self.given_up.wait(pause):
                raise CheckpointError("another rank could not write")
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return sorted(wanted)

    def _seal(self, files: Sequence[File]) -> None:
        """Make a checkpoint of all ranks' files, and remove those beyond ``keep``."""
        if self.final.exists() and _in_good_order(self.final, self.step):
            shutil.rmtree(self.part)
            return
        for path in self.part.glob("*.list"):
            path.unlink()
        write_manifest(self.part / STATE_FILE, self.step, files, self.state)
        sync(self.part)
        if self.final.exists():  # a damaged one
            self.final.rename(part_of(self.final.with_name(f"{self.final.name}.damaged")))
        self.part.rename(self.final)
        sync(self.folder)
        self._prune()

    def _prune(self) -> None:
        """Remove leftovers, and the oldest up to this step; a later one is damaged, and is left for its owner."""
        old = [folder for step, folder in found_in(self.folder) if step <= self.step][: -self.keep]
        try:
            for folder in old:  # a removal that is killed half-way must not leave a damaged one under a final name
                folder.rename(part_of(folder))
            clear_leftovers(self.folder)
        except OSError as error:
            logger.warning("cannot remove old checkpoints in %s: %s", self.folder, error)


def part_of(path: Path) -> Path:
    """Where a checkpoint is until it is whole."""
    return path.with_name(path.name + PART)


def found_in(folder: Path) -> list[tuple[int, Path]]:
    """Step and folder of all checkpoints under a final name, the newest last."""
    if not folder.is_dir():
        return []
    matches = ((NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def clear_leftovers(folder: Path) -> None:
    """Remove what killed or failed saves left; nothing may be under way.

    Raises:
        OSError: as the disk says.
    """
    for leftover in folder.glob(f"step-*{PART}"):
        shutil.rmtree(leftover)


def _read_list(path: Path) -> list[File]:
    return FileList.model_validate_json(path.read_bytes()).files


def _in_good_order(folder: Path, step: int) -> bool:
    try:
        open_checkpoint(folder, step)
    except CheckpointError as error:
        logger.warning("replacing checkpoint %s: %s", folder, error)
        return False
    return True
