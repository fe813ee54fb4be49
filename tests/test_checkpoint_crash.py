"""Checkpoints of real ranks that are killed while they save, and on a real disk that is full."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from fake_world import OneRank, on_threads
from launch_ranks import run_on_ranks
from small_disk import fill, mounted_disk

from tlt_hpc.checkpoint.manifest import CheckpointError
from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.models.piece import own_pieces
from tlt_hpc.mpi.world import World

NUM_WEIGHTS = 1_500_000


def save_until_killed(folder: str, seconds: float) -> None:
    """Save step after step, every weight being its step; rank 1 dies so long after the first is whole.

    ``done`` has a byte for each save that is known to have ended.
    """
    world, weights = World.connect(), torch.zeros(NUM_WEIGHTS)
    store = CheckpointStore(Path(folder) / "checkpoints", keep=2)
    for step in range(1, 10_000):
        weights.fill_(step)
        store.begin(step, world, {"policy": own_pieces([("weights", weights)], world.rank, world.size)}, {"step": step})
        store.finish(world)
        if world.rank == 0:
            with (Path(folder) / "done").open("ab") as file:
                file.write(b".")
        if world.rank == 1 and step == 1:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


@pytest.mark.mpi
@pytest.mark.ci
def test_kill_9_of_one_of_two_ranks_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    num_broken_off = 0
    for seconds in (0.05, 0.13, 0.21, 0.34):
        folder = tmp_path / str(seconds)
        folder.mkdir()
        with pytest.raises(AssertionError, match="ended with status"):
            run_on_ranks(2, save_until_killed, str(folder), seconds)
        num_broken_off += len(list((folder / "checkpoints").glob("*.part")))
        store = CheckpointStore(folder / "checkpoints", keep=2)
        found, num_done = store.newest(), (folder / "done").stat().st_size
        assert found is not None and found.step >= num_done > 0
        weights = found.read("policy", "weights")
        assert weights.numel() == NUM_WEIGHTS and (weights == found.step).all() and found.state["step"] == found.step
        store.save(20_000, OneRank(), {"policy": {"weights": torch.zeros(1)}}, {})  # the next start's
        assert not list((folder / "checkpoints").glob("*.part"))
    assert num_broken_off, "no kill came while a checkpoint was being written"


def test_a_full_disk_is_told_on_all_ranks_and_the_earlier_checkpoint_stays(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", "1m") as disk:
        stores = [CheckpointStore(disk / "checkpoints", keep=2) for _ in range(2)]

        def save(step: int) -> list[object]:
            shard = {"policy": {"weights": torch.full((30_000,), float(step))}}
            return on_threads(
                2, lambda world: stores[world.rank].save(step, world, shard if world.rank == 1 else {}, {})
            )

        save(2)
        filling = fill(disk)
        for error in save(4):
            assert isinstance(error, CheckpointError)
            assert "step-000004: rank" in str(error) and "No space left on device; free space there" in str(error)
        found = stores[0].newest()
        assert found is not None and found.step == 2 and (found.read("policy", "weights") == 2).all()
        filling.unlink()
        save(4)
        found = stores[0].newest()
        assert found is not None and found.step == 4 and (found.read("policy", "weights") == 4).all()
