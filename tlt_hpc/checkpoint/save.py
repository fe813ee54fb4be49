"""One save on one rank's thread: write the rank's files, list them; on rank 0, make a checkpoint of all ranks' lists.

The threads of the ranks meet in the folder alone: a rank's list appears there, whole, when its files have reached the
disk, and rank 0's thread waits for all lists. So a checkpoint is whole as soon as its last file is, wherever the main
threads are, and no thread calls MPI.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import TypeAdapter
from torch import Tensor

from tlt_hpc.checkpoint.manifest import (
    JSON,
    STATE_FILE,
    Checkpoint,
    CheckpointError,
    ListedFile,
    OtherVersionError,
    Stored,
    UnreadableCheckpointError,
    open_checkpoint,
    write_manifest,
)
from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import adding_path_to_errors, sampled_digest
from tlt_hpc.storage.folder import NO_ROOM, make_synced_folder, part_path, sync

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
        self._part = part_path(self.final)
        self._folder, self._step, self._keep, self._best, self._state = folder, step, keep, best, state
        self._rank, self._num_ranks, self._who = world.rank, world.size, f"rank {world.rank} on {world.hostname}"
        self._copy, self._held = copy, held
        self._failure = ""
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Write this rank's share; ``poll_save_state`` has what went wrong."""
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
        except BaseException as error:  # noqa: BLE001 (whatever it is, ``poll_save_state`` raises it)
            self._error = error

    def poll_save_state(self) -> Report:
        """Return the state of the save; raise what the thread raised, unless that is a failure to write."""
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
        make_synced_folder(self._folder)
        self._part.mkdir(exist_ok=True)
        parts = dict.fromkeys(each.part for each in self._held)
        files = [self._write_part(part, [each for each in self._held if each.part == part]) for part in parts]
        self._write_file_list(files)
        if self._rank == 0:
            self._finalise_checkpoint(
                [file for path in self._wait_for_file_lists() for file in _LIST.validate_json(path.read_bytes())]
            )

    def _write_part(self, part: str, held: Sequence[Held]) -> ListedFile:
        path = self._part / f"{part}-{self._suffix(self._rank)}.safetensors"
        with adding_path_to_errors(path):
            write_safetensors_file(path, held)
            tensors: list[tuple[str, tuple[int, ...], int, int]] = sorted(each.manifest_piece for each in held)
            return ListedFile(
                part=part, name=path.name, size=path.stat().st_size, digest=sampled_digest(path), tensors=tensors
            )

    def _suffix(self, rank: int) -> str:
        return f"{rank:05d}-of-{self._num_ranks:05d}"

    def _write_file_list(self, files: list[ListedFile]) -> None:
        path = self._part / f"{self._suffix(self._rank)}.list"
        beside = part_path(path)
        beside.write_bytes(_LIST.dump_json(files))
        beside.rename(path)

    def _wait_for_file_lists(self) -> list[Path]:
        """All ranks' lists, once they are there."""
        wanted = [self._part / f"{self._suffix(rank)}.list" for rank in range(self._num_ranks)]
        pause = FIRST_PAUSE_SECONDS
        while not set(wanted) <= set(self._part.iterdir()):
            if self.given_up.wait(pause):
                raise CheckpointError("another rank could not write")
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return wanted

    def _finalise_checkpoint(self, files: Sequence[ListedFile]) -> None:
        """Make a checkpoint of all ranks' files, and remove those beyond ``keep``."""
        if self.final.exists() and try_open(self.final, self._step, "replacing"):
            shutil.rmtree(self._part)
            return
        for path in self._part.glob("*.list"):
            path.unlink()
        write_manifest(self._part / STATE_FILE, self._step, files, self._state)
        sync(self._part)
        if self.final.exists():  # a damaged one
            self.final.rename(part_path(self.final.with_name(f"{self.final.name}.damaged")))
        self._part.rename(self.final)
        sync(self._folder)
        self._remove_old_checkpoints()

    def _remove_old_checkpoints(self) -> None:
        """Remove leftovers, and the oldest up to this step; a later one is damaged, and is left for the user."""
        found = [(step, folder) for step, folder in list_checkpoints(self._folder) if step <= self._step]
        try:
            best = self._best([step for step, _ in found])
            old = [folder for step, folder in found[: -self._keep] if step != best]
            for folder in old:  # a removal that is cut off half-way must not leave a damaged one under a final name
                folder.rename(part_path(folder))
            if old:
                sync(self._folder)
            clear_leftovers(self._folder)
        except (OSError, UserError) as error:  # lines of metrics that cannot be read
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            logger.warning("cannot remove old checkpoints in %s: %s", self._folder, why)


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return step and folder of all checkpoints under a final name, the newest last."""
    if not folder.is_dir():
        return []
    matches = ((NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def try_open(folder: Path, step: int, verb: str) -> Checkpoint | None:
    """Return a checkpoint; None, with a warning, if it is damaged. ``verb``: what becomes of it.

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


DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


# -- a rank's copies in one safetensors file ---------------------------------------------------------------------------
#
# The format's own library wants whole tensors; these are in chunks, and each write lets other threads run meanwhile.


@dataclass(frozen=True)
class Held:
    """A copied piece of a tensor of ``shape``: its elements ``start`` to ``stop``, in views of host memory."""

    part: str
    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    dtype: torch.dtype
    views: Sequence[Tensor]

    @property
    def manifest_piece(self) -> Stored:
        """The piece as the manifest and the file name it."""
        return Stored(self.name, self.shape, self.start, self.stop)


def write_safetensors_file(path: Path, pieces: Sequence[Held]) -> None:
    """Write a safetensors file and have it reach the disk.

    Raises:
        OSError: as the disk says.
    """
    # wider types first, as the library does: then all of them are aligned
    ordered = sorted(pieces, key=lambda piece: (-piece.dtype.itemsize, piece.manifest_piece.safetensors_key))
    with path.open("wb") as file:
        file.write(_header(ordered))
        for piece in ordered:
            for view in piece.views:
                file.write(view.numpy().data)
                BEAT.written += 1
        file.flush()
        os.fsync(file.fileno())


def _header(pieces: Sequence[Held]) -> bytes:
    entries, offset = {}, 0
    for piece in pieces:
        stored, end = piece.manifest_piece, offset + sum(view.numel() for view in piece.views)
        shape = piece.shape if stored.is_whole else (piece.stop - piece.start,)
        entries[stored.safetensors_key] = {
            "dtype": DTYPE_NAMES[piece.dtype],
            "shape": shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


CHUNK_BYTES = 2**24


class HostBuffer:
    """Host memory for copies of tensors; it grows to the most that was ever asked for, and stays from save to save.

    It is in chunks of 16 MiB, so that one budget fits any mixture of tensors, and none is lost where torch rounds
    pinned memory up to powers of two.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._used = 0
        """Bytes in use; those of the first chunks."""
        self._copied: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that it occupies."""
        return len(self._chunks) * CHUNK_BYTES

    def reserve(self, num_bytes: int, pinned: bool) -> None:
        """Allocate and touch memory for copies of so many bytes, so that the first save is as fast as the next.

        Raises:
            CheckpointError: the host has no room.
        """
        while self.num_bytes < num_bytes:
            self._grow(pinned)

    def clear(self) -> None:
        """Forget what was copied, and keep the memory."""
        self._used = 0

    def copy_tensor(self, values: Tensor) -> list[Tensor]:
        """Copy a flat tensor [N]; return its bytes, in order, as uint8 views of the chunks, to be read after ``wait``.

        Raises:
            CheckpointError: the host has no room.
        """
        source = values.detach().view(torch.uint8)
        size, done, views = source.numel(), 0, []
        while done < size:
            if self._used == self.num_bytes:
                self._grow(values.is_cuda)
            offset = self._used % CHUNK_BYTES
            count = min(CHUNK_BYTES - offset, size - done)
            room = self._chunks[self._used // CHUNK_BYTES].narrow(0, offset, count)
            room.copy_(source.narrow(0, done, count), non_blocking=True)
            views.append(room)
            self._used, done = self._used + count, done + count
        if values.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return views

    def wait(self) -> None:
        """Wait until the last copy is done; at once where none was from a GPU."""
        if self._copied is not None:
            self._copied.synchronize()

    def _grow(self, pinned: bool) -> None:
        try:
            # zeros written, not asked for: a page that was never touched is found at the first write, in the step
            self._chunks.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned).fill_(0))
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(
                f"no room in host memory for a copy of this rank's state beyond {self.num_bytes / 1e9:.1f} GB "
                f"({str(error).splitlines()[0]})"
            ) from None
