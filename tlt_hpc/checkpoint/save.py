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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from tlt_hpc.checkpoint.host_buffer import HostBuffer
from tlt_hpc.checkpoint.manifest import (
    JSON,
    STATE_FILE,
    Checkpoint,
    CheckpointError,
    ListedFile,
    OtherVersionError,
    UnreadableCheckpointError,
    open_checkpoint,
    write_manifest,
)
from tlt_hpc.checkpoint.shard_file import Held, write_file
from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import naming, sampled_digest
from tlt_hpc.storage.folder import NO_ROOM, make_synced, part_of, sync

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World

logger = logging.getLogger(__name__)

NAME = re.compile(r"step-(\d{6,})")
FIRST_PAUSE_SECONDS = 1e-3
LONGEST_PAUSE_SECONDS = 0.25
_LIST = TypeAdapter(list[ListedFile])
Best = Callable[[Sequence[int]], int | None]
"""Which of these steps' checkpoints is kept however old it is; None: none is."""


@dataclass(frozen=True)
class Report:
    """The state of one rank's save, for the other ranks."""

    is_done: bool
    failure: str = ""


class Save(threading.Thread):
    """Writes one rank's share of a checkpoint; begins when it is made.

    It is a daemon: a rank that raises must not wait for its disk at exit.
    """

    def __init__(
        self, folder: Path, step: int, keep: int, best: Best, world: World, state: Mapping[str, JSON],
        copy: HostBuffer, held: Sequence[Held],
    ) -> None:  # fmt: skip
        super().__init__(name="checkpoint", daemon=True)
        self.final = folder / f"step-{step:06d}"
        self.given_up = threading.Event()
        """Set if another rank could not write."""
        self._part = part_of(self.final)
        self._folder, self._step, self._keep, self._best, self._state = folder, step, keep, best, state
        self._rank, self._num_ranks, self._who = world.rank, world.size, f"rank {world.rank} on {world.hostname}"
        self._copy, self._held = copy, held
        self._failure = ""
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._copy.wait()
            self.write()
        except OSError as error:
            name = f"{Path(error.filename).name}: " if error.filename else ""
            remedy = "free space there" if error.errno in NO_ROOM else "make sure that you can write there"
            self._failure = f"{self._who}: {name}{error.strerror or error}; {remedy}"
        except CheckpointError as error:
            self._failure = f"{self._who}: {error}; start again"
        except UnreadableCheckpointError as error:
            self._failure = f"{self._who}: {error}"
        except BaseException as error:  # noqa: BLE001 (whatever it is, ``report`` raises it)
            self._error = error

    def report(self) -> Report:
        """How far it is; raises what the thread raised, unless that is a failure to write."""
        if self.is_alive():
            return Report(is_done=False)
        if self._error is not None:
            raise self._error
        return Report(is_done=True, failure=self._failure)

    def write(self) -> None:
        """Write this rank's files, one for each part of which it holds anything; on rank 0, then make the checkpoint.

        Raises:
            OSError, CheckpointError: what could not be written.
        """
        make_synced(self._folder)
        self._part.mkdir(exist_ok=True)
        parts = dict.fromkeys(each.part for each in self._held)
        files = [self._write_part(part, [each for each in self._held if each.part == part]) for part in parts]
        self._list(files)
        if self._rank == 0:
            self._seal([file for path in self._await_lists() for file in _LIST.validate_json(path.read_bytes())])

    def _write_part(self, part: str, held: Sequence[Held]) -> ListedFile:
        path = self._part / f"{part}-{self._suffix(self._rank)}.safetensors"
        with naming(path):
            write_file(path, held)
            tensors: list[tuple[str, tuple[int, ...], int, int]] = sorted(each.stored for each in held)
            return ListedFile(
                part=part, name=path.name, size=path.stat().st_size, digest=sampled_digest(path), tensors=tensors
            )

    def _suffix(self, rank: int) -> str:
        return f"{rank:05d}-of-{self._num_ranks:05d}"

    def _list(self, files: list[ListedFile]) -> None:
        path = self._part / f"{self._suffix(self._rank)}.list"
        beside = part_of(path)
        beside.write_bytes(_LIST.dump_json(files))
        beside.rename(path)

    def _await_lists(self) -> list[Path]:
        """All ranks' lists, once they are there."""
        wanted = [self._part / f"{self._suffix(rank)}.list" for rank in range(self._num_ranks)]
        pause = FIRST_PAUSE_SECONDS
        while not set(wanted) <= set(self._part.iterdir()):
            if self.given_up.wait(pause):
                raise CheckpointError("another rank could not write")
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return wanted

    def _seal(self, files: Sequence[ListedFile]) -> None:
        """Make a checkpoint of all ranks' files, and remove those beyond ``keep``."""
        if self.final.exists() and try_open(self.final, self._step, "replacing"):
            shutil.rmtree(self._part)
            return
        for path in self._part.glob("*.list"):
            path.unlink()
        write_manifest(self._part / STATE_FILE, self._step, files, self._state)
        sync(self._part)
        if self.final.exists():  # a damaged one
            self.final.rename(part_of(self.final.with_name(f"{self.final.name}.damaged")))
        self._part.rename(self.final)
        sync(self._folder)
        self._prune()

    def _prune(self) -> None:
        """Remove leftovers, and the oldest up to this step; a later one is damaged, and is left for the user."""
        found = [(step, folder) for step, folder in found_in(self._folder) if step <= self._step]
        try:
            best = self._best([step for step, _ in found])
            old = [folder for step, folder in found[: -self._keep] if step != best]
            for folder in old:  # a removal that is cut off half-way must not leave a damaged one under a final name
                folder.rename(part_of(folder))
            if old:
                sync(self._folder)
            clear_leftovers(self._folder)
        except (OSError, UserError) as error:  # lines of metrics that cannot be read
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            logger.warning("cannot remove old checkpoints in %s: %s", self._folder, why)


def found_in(folder: Path) -> list[tuple[int, Path]]:
    """Step and folder of all checkpoints under a final name, the newest last."""
    if not folder.is_dir():
        return []
    matches = ((NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def try_open(folder: Path, step: int, verb: str) -> Checkpoint | None:
    """A checkpoint; None, with a warning, if it is damaged. ``verb``: what becomes of it.

    Raises:
        OtherVersionError: another version of this program wrote it.
        UnreadableCheckpointError: the disk refuses to read it now.
    """
    try:
        return open_checkpoint(folder, step)
    except OtherVersionError:
        raise
    except CheckpointError as error:
        logger.warning("%s checkpoint %s: %s", verb, folder, error)
        return None


def clear_leftovers(folder: Path) -> None:
    """Remove what killed or failed saves left; no save may be in progress.

    Raises:
        OSError: as the disk says.
    """
    for leftover in folder.glob("step-*.part"):
        shutil.rmtree(leftover)
