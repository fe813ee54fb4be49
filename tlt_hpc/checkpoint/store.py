"""Owns the checkpoints of a run on disk: pieces of named tensors and JSON in, whole tensors out; knows no model.

A checkpoint is a folder ``step-000010`` of safetensors files, one writer each, and a ``state.json`` that lists them.
It is written as ``step-000010.part`` and renamed when it is whole, so a folder under its final name is complete unless
the disk has lost something.

A save has three stages: the main thread copies this rank's share to host memory (``begin``); a thread of each rank
writes it, and calls no MPI; once all have, rank 0's thread lists the files and renames. From stage to stage it goes in
``advance``, on what all ranks say of theirs (``report``), which the main loop adds to collectives that it has anyway.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tlt_hpc.checkpoint.background import Background
from tlt_hpc.checkpoint.host_copy import HostCopy
from tlt_hpc.checkpoint.host_room import check_room
from tlt_hpc.checkpoint.manifest import (
    JSON,
    STATE_FILE,
    Checkpoint,
    CheckpointError,
    File,
    Stored,
    digest_of,
    open_checkpoint,
    write_manifest,
)
from tlt_hpc.checkpoint.shard_file import Copied, write_file
from tlt_hpc.models.piece import Piece
from tlt_hpc.storage.folder import sync

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World

Shard = Mapping[str, Tensor | Piece] | Iterable[tuple[str, Tensor | Piece]]
"""What a rank holds of a part of the state; an iterator is asked for one tensor at a time."""

logger = logging.getLogger(__name__)

NAME = re.compile(r"step-(\d{6,})")
PART = ".part"


@dataclass(frozen=True)
class Report:
    """What a rank tells the others of the stage that its thread is in."""

    is_done: bool
    files: tuple[File, ...] = ()
    failure: str = ""


@dataclass(frozen=True)
class _Held:
    """A copied piece. What is to be written of it is worked out on the thread: the step waits for the copy alone."""

    part: str
    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    dtype: torch.dtype
    views: Sequence[Tensor]

    @property
    def stored(self) -> Stored:
        return Stored(name=self.name, shape=list(self.shape), start=self.start, stop=self.stop)

    @property
    def copied(self) -> Copied:
        stored = self.stored
        shape = self.shape if stored.is_whole else (self.stop - self.start,)
        return Copied(stored.key, self.dtype, shape, self.views)


@dataclass(frozen=True)
class _Save:
    """The save under way."""

    final: Path
    step: int
    rank: int
    who: str
    state: Mapping[str, JSON]
    task: Background[Report]
    is_sealing: bool = False

    @property
    def part(self) -> Path:
        return _part_of(self.final)


class CheckpointStore:
    """The checkpoints in ``folder``, of which the newest ``keep`` are kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        assert keep >= 1, f"keep = {keep}"
        self._folder = folder
        self._keep = keep
        self._copy = HostCopy()
        self._save: _Save | None = None

    # -- saving -------------------------------------------------------------------------------------------------

    def reserve(self, world: World, num_bytes: int, pinned: bool) -> None:
        """Take the memory of this rank's copies now, ``num_bytes`` of them; collective.

        Raises:
            CheckpointError: on all ranks, where a node has not enough memory for those of its ranks.
        """
        check_room(world, num_bytes)
        self._copy.reserve(num_bytes, pinned)

    def begin(self, step: int, world: World, shards: Mapping[str, Shard], state: Mapping[str, JSON]) -> None:
        """Copy what is to be saved, and start to write it; every rank calls it, and none waits for another.

        What is saved is the state of now, whatever becomes of the tensors later.

        Args:
            shards: part -> what this rank holds of it; each element of a tensor is held by one rank only.
            state: what rank 0 gives is kept.
        """
        assert self._save is None, "finish the last save first"
        final, who = self._folder / f"step-{step:06d}", f"rank {world.rank} on {world.hostname}"
        plain = json.loads(json.dumps(state, allow_nan=False))
        action = self._take(shards, partial(self._write, _part_of(final), world.rank, world.size))
        self._save = _Save(final, step, world.rank, who, plain, Background(partial(_reported, who, action)))

    def report(self) -> Report | None:
        """How far this rank is; None where nothing is being saved, on all ranks alike."""
        if self._save is None:
            return None
        return self._save.task.result() if self._save.task.is_done else Report(is_done=False)

    def advance(self, reports: Sequence[Report | None]) -> None:
        """Go on with the save under way if all ranks are ready to; at once, and with all ranks' ``report``.

        Raises:
            CheckpointError: on all ranks, where one could not write; earlier checkpoints are as they were.
        """
        save = self._save
        said = [report for report in reports if report is not None]
        assert len(said) in (0, len(reports)) and bool(said) == (save is not None), "ranks disagree on the save"
        if save is None or not all(report.is_done for report in said):
            return
        self._save = None
        failures = [report.failure for report in said if report.failure]
        if failures:
            raise CheckpointError(
                f"cannot write checkpoint {save.final}: {failures[0]}; free space there or choose another run.folder "
                "(earlier checkpoints are untouched)"
            )
        if not save.is_sealing:
            files = [file for report in said for file in report.files]
            seal = partial(self._seal, save, files) if save.rank == 0 else tuple
            self._save = replace(save, is_sealing=True, task=Background(partial(_reported, save.who, seal)))

    def finish(self, world: World) -> None:
        """Wait until nothing is being saved; collective.

        Raises:
            CheckpointError: as ``advance``.
        """
        while self._save is not None:
            self.advance(world.allgather(self._save.task.result()))

    def save(self, step: int, world: World, shards: Mapping[str, Shard], state: Mapping[str, JSON]) -> Path:
        """``begin`` and ``finish``: the folder of the checkpoint; collective.

        A step that is there in good order already is left as it is: a run's state at a step is one and the same.

        Raises:
            CheckpointError: as ``advance``.
        """
        self.finish(world)
        self.begin(step, world, shards, state)
        self.finish(world)
        return self._folder / f"step-{step:06d}"

    def _take(
        self, shards: Mapping[str, Shard], write: Callable[[Sequence[_Held]], Sequence[File]]
    ) -> Callable[[], Sequence[File]]:
        """Copy, and return what is to be done with the copies: to write them, or to say that there was no room."""
        self._copy.clear()
        try:
            held = [
                _hold(part, name, _as_piece(tensor), self._copy)
                for part, shard in shards.items()
                for name, tensor in (shard.items() if isinstance(shard, Mapping) else shard)
            ]
        except CheckpointError as error:
            return partial(_fail, error)
        return partial(write, held)

    def _write(self, part: Path, rank: int, num_ranks: int, held: Sequence[_Held]) -> Sequence[File]:
        """Write this rank's files, one for each part of which it holds anything; on the thread."""
        part.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            self._clear_leftovers(part)
        self._copy.wait()
        return _write_files(part, f"{rank:05d}-of-{num_ranks:05d}.safetensors", held)

    def _clear_leftovers(self, part: Path) -> None:
        """Remove what killed runs left; what they left in ``part`` is found when that is sealed."""
        for leftover in self._folder.glob(f"step-*{PART}"):
            if leftover != part:
                shutil.rmtree(leftover)

    def _seal(self, save: _Save, files: Sequence[File]) -> Sequence[File]:
        """Make a checkpoint of all ranks' files, and remove those beyond ``keep``; on rank 0's thread."""
        if save.final.exists() and _in_good_order(save.final, save.step):
            shutil.rmtree(save.part)
            return ()
        for path in save.part.iterdir():
            if path.name not in {file.name for file in files}:
                path.unlink()
        write_manifest(save.part / STATE_FILE, save.step, files, save.state)
        sync(save.part)
        if save.final.exists():  # a damaged one
            save.final.rename(save.final.with_name(f"{save.final.name}.damaged{PART}"))
        save.part.rename(save.final)
        sync(self._folder)
        self._prune(save.step)
        return ()

    def _prune(self, step: int) -> None:
        """Remove the oldest, up to this step; a later one was passed over as damaged, and is left for its owner."""
        old = [folder for found, folder in self._found() if found <= step][: -self._keep]
        for folder in old:
            try:
                # A removal that is killed half-way must not leave a damaged checkpoint under a final name.
                shutil.rmtree(folder.rename(_part_of(folder)))
            except OSError as error:
                logger.warning("cannot remove the old checkpoint %s: %s", folder, error)

    # -- finding ------------------------------------------------------------------------------------------------

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint in good order, None where there is none of any kind; damaged ones are warned of.

        Reads up to 32 MiB of each file, so call it on one rank and broadcast what it returns.

        Raises:
            CheckpointError: there are checkpoints, but none in good order.
        """
        found = self._found()
        for step, folder in reversed(found):
            try:
                return open_checkpoint(folder, step)
            except CheckpointError as error:
                logger.warning("skipping checkpoint %s: %s", folder, error)
        if found:
            raise CheckpointError(
                f"none of the {len(found)} checkpoints in {self._folder} is in good order: restore one of them, or "
                "remove them all to start afresh"
            )
        return None

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of a step; reads as much as ``newest``.

        Raises:
            CheckpointError: there is none, or it is not in good order.
        """
        folders = dict(self._found())
        if step not in folders:
            there = f"those of steps {', '.join(map(str, folders))}" if folders else "none"
            raise CheckpointError(f"no such checkpoint in {self._folder}, which has {there}; use one that is there")
        try:
            return open_checkpoint(folders[step], step)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {folders[step]} is damaged ({error}); use another one") from None

    def _found(self) -> list[tuple[int, Path]]:
        """Step and folder of all under a final name, the newest last."""
        if not self._folder.is_dir():
            return []
        matches = ((NAME.fullmatch(path.name), path) for path in self._folder.iterdir() if path.is_dir())
        return sorted((int(match[1]), path) for match, path in matches if match)


def _part_of(folder: Path) -> Path:
    return folder.with_name(folder.name + PART)


def _as_piece(tensor: Tensor | Piece) -> Piece:
    return tensor if isinstance(tensor, Piece) else Piece.whole(tensor)


def _hold(part: str, name: str, piece: Piece, copy: HostCopy) -> _Held:
    return _Held(part, name, piece.shape, piece.start, piece.stop, piece.values.dtype, copy.take(piece.values))


def _fail(error: CheckpointError) -> Sequence[File]:
    raise error


def _reported(who: str, action: Callable[[], Sequence[File]]) -> Report:
    try:
        return Report(is_done=True, files=tuple(action()))
    except (OSError, CheckpointError) as error:
        return Report(is_done=True, failure=f"{who}: {error}")


def _write_files(folder: Path, suffix: str, held: Sequence[_Held]) -> list[File]:
    parts = dict.fromkeys(each.part for each in held)
    return [
        _write_part(folder / f"{part}-{suffix}", part, [each for each in held if each.part == part]) for part in parts
    ]


def _write_part(path: Path, part: str, held: Sequence[_Held]) -> File:
    try:
        write_file(path, [each.copied for each in held])
        tensors = sorted((each.stored for each in held), key=lambda stored: stored.name)
        return File(part=part, name=path.name, size=path.stat().st_size, digest=digest_of(path), tensors=tensors)
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error}") from None


def _in_good_order(folder: Path, step: int) -> bool:
    try:
        open_checkpoint(folder, step)
    except CheckpointError as error:
        logger.warning("replacing checkpoint %s: %s", folder, error)
        return False
    return True
