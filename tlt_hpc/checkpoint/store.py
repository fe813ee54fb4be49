"""The checkpoints of a run on disk: pieces of named tensors and JSON in, whole tensors out.

A checkpoint is a folder ``step-000010`` of safetensors files, one writer each, and a ``state.json`` that lists them.
It is written as ``step-000010.part`` and renamed when it is whole, so a folder under its final name is complete unless
the disk has lost something.

The main thread copies this rank's share to host memory (``begin_save_all_ranks``) and continues; a thread of each rank
writes it (``save.py``). All ranks learn in ``end_save_if_all_done`` what became of it, from each rank's
``poll_save_state``: the main loop adds that to a collective that it has anyway.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from tlt_hpc.checkpoint.manifest import JSON, Checkpoint, CheckpointError, OtherVersionError, open_checkpoint
from tlt_hpc.checkpoint.save import Best, Held, HostBuffer, Report, Save, clear_leftovers, list_checkpoints, try_open
from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.common.errors import UserError
from tlt_hpc.common.host_memory import available_bytes
from tlt_hpc.models.piece import LOWER_RATE, Piece, is_finite, names_not_finite
from tlt_hpc.storage.folder import RunFolder, part_path, sync
from tlt_hpc.storage.step_lines import best_evaluated_step

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World

Shard = Mapping[str, Tensor | Piece] | Iterable[tuple[str, Tensor | Piece]]
"""One rank's tensors, or pieces of them, of a part of the state; an iterator is asked for one at a time."""

ASK_EVERY_SECONDS = 0.05
"""Interval at which ranks that wait for a save exchange reports."""


def find_requested_step(run: RunFolder, step: int | str | None) -> int | None:
    """Return the step that ``--step`` names: ``best`` is that of the best evaluation among those with a checkpoint.

    Raises:
        UserError: no step that has a checkpoint was evaluated.
    """
    if step is None or isinstance(step, int):
        return step
    best = best_evaluated_step(run.metrics, [found for found, _ in list_checkpoints(run.checkpoints)])
    if best is None:
        raise UserError(
            f"--step best: no step of {run.path} that has a checkpoint was evaluated; give a number, or train with "
            "evaluation.every_steps and checkpoint.every_steps of which one is a multiple of the other"
        )
    return best


class CheckpointStore:
    """The checkpoints in ``folder``, of which the newest ``keep`` are kept, and the one that ``best`` names."""

    def __init__(self, folder: Path, keep: int, best: Best = lambda _: None) -> None:
        assert keep >= 1, f"keep = {keep}"
        self._folder = folder
        self._keep, self._best = keep, best
        self._copy = HostBuffer()
        self._is_clear = False
        self._is_abandoned = False
        self._save: Save | None = None

    # -- saving -------------------------------------------------------------------------------------------------

    def reserve_copy_memory_all_ranks(self, world: World, num_bytes: int, pinned: bool) -> None:
        """Collective. Allocate the memory of this rank's copies, ``num_bytes``.

        Raises:
            CheckpointError: on all ranks, if a node has not enough for its ranks.
        """
        check_memory_all_ranks(world, num_bytes)
        world.run_on_all_ranks(lambda: self._copy.reserve(num_bytes, pinned))

    @property
    def is_saving(self) -> bool:
        """True while a save is in progress, as of the last ``end_save_if_all_done``; the same on all ranks."""
        return self._save is not None

    def begin_save_all_ranks(
        self, step: int, world: World, shards: Mapping[str, Shard], state: Mapping[str, JSON]
    ) -> None:
        """Collective. Copy what is to be saved, and start to write it.

        What is saved is the state of now, whatever becomes of the tensors later.

        Args:
            shards: part -> what this rank holds of it; each element of a tensor is held by one rank only.
            state: what rank 0 gives is kept.

        Raises:
            CheckpointError: on all ranks, if rank 0 cannot remove what killed runs have left, or if one has no memory
                for its copy (never after ``reserve_copy_memory_all_ranks``), or a value is not finite.
        """
        assert self._save is None, "finish the last save first"
        assert not self._is_abandoned, "a thread may still read the copy"
        if not self._is_clear:  # a list of a killed run must not be taken for one of ours
            world.run_first_and_broadcast(self._remove_unfinished_saves)
            self._is_clear = True
        held = world.run_on_all_ranks(lambda: self._copy_shards(shards))
        plain = json.loads(json.dumps(state, allow_nan=False))
        self._save = Save(self._folder, step, self._keep, self._best, world, plain, self._copy, held)

    def _copy_shards(self, shards: Mapping[str, Shard]) -> list[Held]:
        self._copy.clear()
        held, finite = list[Held](), dict[str, Tensor]()
        for part, shard in shards.items():
            for name, tensor in shard.items() if isinstance(shard, Mapping) else shard:
                piece = tensor if isinstance(tensor, Piece) else Piece.whole(tensor)
                views = self._copy.copy_tensor(piece.values)
                held.append(Held(part, name, piece.shape, piece.start, piece.stop_index, piece.values.dtype, views))
                finite[f"{part}/{name}"] = is_finite(piece.values)
        if wrong := names_not_finite(finite):
            remedy = "resume with a lower drafter.learning_rate" if wrong[0].startswith("drafter/") else LOWER_RATE
            raise CheckpointError(
                f"{wrong[0]!r} holds values that are not finite, so no checkpoint was written; {remedy}"
            )
        return held

    def poll_save_state(self) -> Report | None:
        """Return the state of this rank's save; None, on all ranks, if nothing is being saved."""
        return None if self._save is None else self._save.poll_save_state()

    def end_save_if_all_done(self, reports: Sequence[Report | None]) -> None:
        """End the save in progress if all ranks' ``reports`` say that it is written, or that one has failed.

        Raises:
            CheckpointError: on all ranks, if one could not write; earlier checkpoints are unchanged.
        """
        found = [report for report in reports if report is not None]
        assert len(found) == (0 if self._save is None else len(reports)), "ranks disagree on whether anything is saved"
        if self._save is None:
            return
        if failure := next((report.failure for report in found if report.failure), ""):
            failed, self._save, self._is_clear = self._save, None, False
            failed.given_up.set()
            failed.join()
            raise CheckpointError(
                f"cannot write checkpoint {failed.final}: {failure} or choose another run.folder "
                "(earlier checkpoints are untouched)"
            )
        if all(report.is_done for report in found):
            self._save = None

    def wait_for_save(self, world: World) -> None:
        """Collective. Wait until nothing is being saved.

        Raises:
            CheckpointError: as ``end_save_if_all_done``.
        """
        with BEAT.in_save_polling():
            while self._save is not None:
                self._save.join(ASK_EVERY_SECONDS)
                self.end_save_if_all_done(world.allgather(self.poll_save_state()))

    def abandon_save(self) -> None:
        """Stop waiting for the save in progress, before the process ends; on all ranks together.

        It becomes a checkpoint if it was written all the same, and else is removed by the next start.
        """
        assert self._save is not None, "nothing is being saved"
        self._save.given_up.set()
        self._save = None
        self._is_abandoned = True

    def save(self, step: int, world: World, shards: Mapping[str, Shard], state: Mapping[str, JSON]) -> Path:
        """Collective. ``begin_save_all_ranks`` and ``wait_for_save``; return the folder of the checkpoint.

        An undamaged checkpoint of the step is left as it is: a run's state at a step is one and the same.

        Raises:
            UserError: as ``begin_save_all_ranks`` and ``end_save_if_all_done``.
        """
        self.wait_for_save(world)
        self.begin_save_all_ranks(step, world, shards, state)
        self.wait_for_save(world)
        return self._folder / f"step-{step:06d}"

    def _remove_unfinished_saves(self) -> None:
        try:
            clear_leftovers(self._folder)
        except OSError as error:
            why = f"{error.filename or self._folder}: {error.strerror or error}"
            raise CheckpointError(f"cannot remove leftovers: {why}; remove {self._folder}/*.part") from None

    # -- finding ------------------------------------------------------------------------------------------------

    def open_newest(self) -> Checkpoint | None:
        """Return the newest undamaged checkpoint, None if there is none at all; warn of damaged ones.

        Reads up to 32 MiB of each file, so call it on one rank and broadcast what it returns.

        Raises:
            CheckpointError: there are checkpoints, but all are damaged, or another version of this program wrote one.
            UnreadableCheckpointError: the disk refuses to read one now.
        """
        found = list_checkpoints(self._folder)
        for step, folder in reversed(found):
            if checkpoint := try_open(folder, step, "skipping"):
                return checkpoint
        if found:
            raise CheckpointError(
                f"none of the {len(found)} checkpoints in {self._folder} is in good order: restore one of them, or "
                "remove them all to start afresh"
            )
        return None

    def open_checkpoints_within(self, first: int, last: int) -> dict[int, Checkpoint]:
        """Return the undamaged checkpoints of steps ``first`` to ``last``, by step; reads each as ``open_newest``."""
        steps = [(step, folder) for step, folder in list_checkpoints(self._folder) if first <= step <= last]
        return {step: found for step, folder in steps if (found := try_open(folder, step, "skipping"))}

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, which are about to be made again; for one rank.

        Raises:
            CheckpointError: one cannot be removed.
        """
        for later, folder in list_checkpoints(self._folder):
            if later > step:
                try:
                    folder.rename(part_path(folder))
                    sync(self._folder)  # or a power failure could bring it back, whole or damaged
                    shutil.rmtree(part_path(folder))
                except OSError as error:
                    raise CheckpointError(f"cannot remove {folder}: {error.strerror}; remove it by hand") from None

    def open_step(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step; reads as much as ``open_newest``.

        Raises:
            CheckpointError: there is none, or it is not in good order.
        """
        folders = dict(list_checkpoints(self._folder))
        if step not in folders:
            there = f"step{'s' * (len(folders) > 1)} {', '.join(map(str, folders))}" if folders else "none"
            raise CheckpointError(f"no such checkpoint in {self._folder}, which has {there}; use one that is there")
        try:
            return open_checkpoint(folders[step], step)
        except OtherVersionError:
            raise
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {folders[step]} is damaged ({error}); use another one") from None


def check_memory_all_ranks(world: World, num_bytes: int) -> None:
    """Collective. Refuse copies, of ``num_bytes`` on this rank, for which the ranks of a node have no host memory.

    Raises:
        CheckpointError: on all ranks.
    """
    available = world.run_on_all_ranks(available_bytes)
    ranks = world.allgather((world.node, world.hostname, num_bytes, available))
    wanted: Counter[int] = Counter()
    for node, _, count, _ in ranks:
        wanted[node] += count
    for node, hostname, _, room in ranks:
        if wanted[node] > room:
            raise CheckpointError(
                f"{hostname} has {room / 1e9:.1f} GB of host memory left, and to save a checkpoint its ranks copy "
                f"{wanted[node] / 1e9:.1f} GB of training state there; ask for more memory per node, or more nodes"
            )
