"""Checkpoints of real ranks that are killed while they save, and on a real disk that is full."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fake_world import OneRank, on_threads
from launch_ranks import run_on_ranks
from small_disk import fill, mounted_disk

from tlt_hpc.checkpoint import save
from tlt_hpc.checkpoint.manifest import CheckpointError
from tlt_hpc.checkpoint.save import Held
from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.models.piece import own_tensor_pieces
from tlt_hpc.mpi.world import World

NUM_WEIGHTS = 1_500_000


def save_until_killed(folder: str, place: str) -> None:
    """Save step after step, every weight being its step; rank 1 dies before, while or after it writes its part of step
    3, or at no special place.

    ``done`` has a byte for each save that is known to have ended.
    """
    world, weights, write_file, files = (
        World.connect(),
        torch.zeros(NUM_WEIGHTS),
        save.write_safetensors_file,
        list[Path](),
    )

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write(path: Path, held: Sequence[Held]) -> None:
        files.append(path)
        if place in ("while", "later") and len(files) == 3:
            threading.Timer(0.002 if place == "while" else 0.1, die).start()
        if place == "before" and len(files) == 3:
            die()
        write_file(path, held)
        if place == "after" and len(files) == 3:
            die()

    if world.rank == 1:
        save.write_safetensors_file = write
    store = CheckpointStore(Path(folder) / "checkpoints", keep=2)
    for step in range(1, 10_000):
        weights.fill_(step)
        store.begin_save_all_ranks(
            step, world, {"policy": own_tensor_pieces([("weights", weights)], world.rank, world.size)}, {"step": step}
        )
        store.wait_for_save(world)
        if world.rank == 0:
            with (Path(folder) / "done").open("ab") as file:
                file.write(b".")


@pytest.mark.mpi
@pytest.mark.ci
def test_kill_9_of_one_of_two_ranks_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    for place in ("before", "while", "after", "later"):
        folder = tmp_path / place
        folder.mkdir()
        with pytest.raises(AssertionError, match="ended with status"):
            run_on_ranks(2, save_until_killed, str(folder), place)
        assert place != "after" or list((folder / "checkpoints").glob("*.part")), "it was being written"
        store = CheckpointStore(folder / "checkpoints", keep=2)
        found, num_done = store.open_newest(), (folder / "done").stat().st_size
        assert found is not None and found.step >= num_done > 0
        weights = found.read_tensor("policy", "weights")
        assert weights.numel() == NUM_WEIGHTS and (weights == found.step).all() and found.state["step"] == found.step
        store.save(20_000, OneRank(), {"policy": {"weights": torch.zeros(1)}}, {})  # the next start's
        assert not list((folder / "checkpoints").glob("*.part"))


def test_a_full_disk_is_told_on_all_ranks_and_the_earlier_checkpoint_stays(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", "1m") as disk:
        stores = [CheckpointStore(disk / "checkpoints", keep=2) for _ in range(2)]

        def save_on_both(step: int) -> list[object]:
            shard = {"policy": {"weights": torch.full((30_000,), float(step))}}
            return on_threads(
                2, lambda world: stores[world.rank].save(step, world, shard if world.rank == 1 else {}, {})
            )

        save_on_both(2)
        filling = fill(disk)
        for error in save_on_both(4):
            assert isinstance(error, CheckpointError)
            assert "step-000004: rank" in str(error) and "No space left on device; free space there" in str(error)
        found = stores[0].open_newest()
        assert found is not None and found.step == 2 and (found.read_tensor("policy", "weights") == 2).all()
        filling.unlink()
        save_on_both(4)
        found = stores[0].open_newest()
        assert found is not None and found.step == 4 and (found.read_tensor("policy", "weights") == 4).all()
