"""The checkpoints of a run on disk: pieces of named tensors and JSON in, whole tensors out.

A checkpoint is a folder ``step-000010`` of safetensors files, one writer each, and a ``state.json`` that lists them.
It is written as ``step-000010.part`` and renamed when it is whole, so a folder under its final name is complete unless
the disk has lost something.

The main thread copies this rank's share to host memory (``begin``) and continues; a thread of each rank writes it
(``save.py``). What became of it all ranks learn in ``advance``, from what each says of its own (``report``): the main
loop adds that to a collective that it has anyway.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from tlt_hpc.checkpoint.host_buffer import HostBuffer
from tlt_hpc.checkpoint.host_room import check_room
from tlt_hpc.checkpoint.manifest import JSON, Checkpoint, CheckpointError, open_checkpoint
from tlt_hpc.checkpoint.save import Save, clear_leftovers, found_in, part_of
from tlt_hpc.checkpoint.shard_file import Held
from tlt_hpc.cluster.watch.beat import BEAT
from tlt_hpc.models.piece import Piece

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World

Shard = Mapping[str, Tensor | Piece] | Iterable[tuple[str, Tensor | Piece]]
"""What a rank holds of a part of the state; an iterator is asked for one tensor at a time."""

ASK_EVERY_SECONDS = 0.05
"""How often ranks that wait for a save ask each other."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """What a rank tells the others of its thread."""

    is_done: bool
    failure: str = ""


class _Task(threading.Thread):
    """A call that begins when this is made. A daemon: a rank that raises must not wait for its disk at exit."""

    def __init__(self, action: Callable[[], Report]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._action = action
        self._report: Report | None = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._report = self._action()
        except BaseException as error:  # noqa: BLE001 (whatever it is, ``result`` raises it)
            self._error = error

    def result(self) -> Report:
        """Wait for the call; return what it returned, or raise what it raised."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report


class CheckpointStore:
    """The checkpoints in ``folder``, of which the newest ``keep`` are kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        assert keep >= 1, f"keep = {keep}"
        self._folder = folder
        self._keep = keep
        self._copy = HostBuffer()
        self._is_clear = False
        self._is_abandoned = False
        self._save: Save | None = None
        self._task: _Task | None = None

    # -- saving -------------------------------------------------------------------------------------------------

    def reserve(self, world: World, num_bytes: int, pinned: bool) -> None:
        """Take the memory of this rank's copies now, ``num_bytes`` of them; collective.

        Raises:
            CheckpointError: on all ranks, where a node has not enough memory for those of its ranks.
        """
        check_room(world, num_bytes)
        self._copy.reserve(num_bytes, pinned)

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way, as of the last ``advance``; on all ranks alike."""
        return self._save is not None

    def begin(self, step: int, world: World, shards: Mapping[str, Shard], state: Mapping[str, JSON]) -> None:
        """Copy what is to be saved, and start to write it; collective, but only the first waits for other ranks.

        What is saved is the state of now, whatever becomes of the tensors later.

        Args:
            shards: part -> what this rank holds of it; each element of a tensor is held by one rank only.
            state: what rank 0 gives is kept.

        Raises:
            CheckpointError: on all ranks, where rank 0 cannot remove what killed runs have left.
        """
        assert self._save is None, "finish the last save first"
        assert not self._is_abandoned, "a thread may still read the copy"
        if not self._is_clear:
            self._clear(world)
        plain = json.loads(json.dumps(state, allow_nan=False))
        self._save = Save(self._folder, step, world.rank, world.size, self._keep, plain)
        action = self._take(shards, self._save)
        self._task = _Task(partial(_reported, f"rank {world.rank} on {world.hostname}", action))

    def report(self) -> Report | None:
        """How far this rank is; None where nothing is being saved, on all ranks alike."""
        if self._task is None:
            return None
        return Report(is_done=False) if self._task.is_alive() else self._task.result()

    def advance(self, reports: Sequence[Report | None]) -> None:
        """Take note of all ranks' ``report``: whether the save under way is over, or has failed.

        Raises:
            CheckpointError: on all ranks, where one could not write; earlier checkpoints are as they were.
        """
        said = [report for report in reports if report is not None]
        assert len(said) == (0 if self._save is None else len(reports)), "ranks disagree on whether anything is saved"
        failure = next((report.failure for report in said if report.failure), "")
        if self._save is not None and failure:
            self._give_up(self._save, failure)
        if all(report.is_done for report in said):
            self._save = self._task = None

    def finish(self, world: World) -> None:
        """Wait until nothing is being saved; collective.

        Raises:
            CheckpointError: as ``advance``.
        """
        with BEAT.asking():
            while self._task is not None:
                self._task.join(ASK_EVERY_SECONDS)
                self.advance(world.allgather(self.report()))

    def abandon(self) -> None:
        """Wait no longer for what is being saved, nor for the disk, as before the process ends; on all ranks together.

        It becomes a checkpoint if it was written all the same, and else is removed by the next start.
        """
        assert self._save is not None, "nothing is being saved"
        self._save.given_up.set()
        self._save = self._task = None
        self._is_abandoned = True

    def save(self, step: int, world: World, shards: Mapping[str, Shard], state: Mapping[str, JSON]) -> Path:
        """``begin`` and ``finish``: the folder of the checkpoint; collective.

        A step that is there in good order already is left as it is: a run's state at a step is one and the same.

        Raises:
            CheckpointError: as ``begin`` and ``advance``.
        """
        self.finish(world)
        self.begin(step, world, shards, state)
        self.finish(world)
        return self._folder / f"step-{step:06d}"

    def _clear(self, world: World) -> None:
        """Have rank 0 remove what killed runs left: a list of theirs must not be taken for one of ours."""
        report = _reported("rank 0", partial(clear_leftovers, self._folder)) if world.rank == 0 else Report(True)
        failure = world.allgather(report)[0].failure
        if failure:
            raise CheckpointError(f"cannot remove leftovers in {self._folder}: {failure}; remove its *.part folders")
        self._is_clear = True

    def _take(self, shards: Mapping[str, Shard], save: Save) -> Callable[[], None]:
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
        return partial(_write, self._copy, save, held)

    def _give_up(self, save: Save, failure: str) -> None:
        assert self._task is not None
        save.given_up.set()
        self._task.result()  # nobody writes any more
        self._save, self._task, self._is_clear = None, None, False
        raise CheckpointError(
            f"cannot write checkpoint {save.final}: {failure}; free space there or choose another run.folder (earlier "
            "checkpoints are untouched)"
        )

    # -- finding ------------------------------------------------------------------------------------------------

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint in good order, None where there is none of any kind; damaged ones are warned of.

        Reads up to 32 MiB of each file, so call it on one rank and broadcast what it returns.

        Raises:
            CheckpointError: there are checkpoints, but none in good order.
        """
        found = found_in(self._folder)
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

    def within(self, first: int, last: int) -> dict[int, Checkpoint]:
        """The checkpoints in good order of these steps, by step; reads as much of each as ``newest``."""
        good = {}
        for step, folder in found_in(self._folder):
            if first <= step <= last:
                try:
                    good[step] = open_checkpoint(folder, step)
                except CheckpointError as error:
                    logger.warning("skipping checkpoint %s: %s", folder, error)
        return good

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, which are about to be made again; for one rank.

        Raises:
            CheckpointError: one cannot be removed.
        """
        for later, folder in found_in(self._folder):
            if later > step:
                try:
                    folder.rename(part_of(folder))
                    shutil.rmtree(part_of(folder))
                except OSError as error:
                    raise CheckpointError(f"cannot remove {folder}: {error.strerror}; remove it by hand") from None

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of a step; reads as much as ``newest``.

        Raises:
            CheckpointError: there is none, or it is not in good order.
        """
        folders = dict(found_in(self._folder))
        if step not in folders:
            there = f"those of steps {', '.join(map(str, folders))}" if folders else "none"
            raise CheckpointError(f"no such checkpoint in {self._folder}, which has {there}; use one that is there")
        try:
            return open_checkpoint(folders[step], step)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {folders[step]} is damaged ({error}); use another one") from None


def _as_piece(tensor: Tensor | Piece) -> Piece:
    return tensor if isinstance(tensor, Piece) else Piece.whole(tensor)


def _hold(part: str, name: str, piece: Piece, copy: HostBuffer) -> Held:
    return Held(part, name, piece.shape, piece.start, piece.stop, piece.values.dtype, copy.take(piece.values))


def _write(copy: HostBuffer, save: Save, held: Sequence[Held]) -> None:
    copy.wait()
    save.write(held)


def _fail(error: CheckpointError) -> None:
    raise error


def _reported(who: str, action: Callable[[], None]) -> Report:
    try:
        action()
    except (OSError, CheckpointError) as error:
        return Report(is_done=True, failure=f"{who}: {error}")
    return Report(is_done=True)
