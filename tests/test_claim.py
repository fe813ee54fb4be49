"""A run's folder must be one that all ranks see: else a save would wait for the others' files for ever."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tlt_hpc import session as job
from tlt_hpc.config import Config, UserError, load_config
from tlt_hpc.mpi.world import World
from tlt_hpc.storage.folder import RunFolder

TINY = Path(__file__).parents[1] / "jobs" / "tiny.toml"


class ThreadWorld:
    """One rank of two, each a thread and on a host of its own."""

    once = World.once

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.hostname = rank, 2, f"node{rank}"
        self._board, self._barrier = board, barrier

    def allgather(self, item: Any) -> list[Any]:
        self._board[self.rank] = item
        self._barrier.wait(20)
        items = list(self._board)
        self._barrier.wait(20)
        return items

    def broadcast(self, item: Any) -> Any:
        return self.allgather(item)[0]


def claim(*places: Path) -> list[str]:
    """What each of two ranks is told whose ``run.folder`` is that place; empty where it may continue."""
    board, barrier = [None, None], threading.Barrier(2)

    def on_rank(rank: int) -> str:
        config: Config = load_config(TINY, [f"run.folder={places[rank]}"])
        try:
            job.claim_folder(RunFolder(config.folder), config, ThreadWorld(rank, board, barrier))
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(on_rank, range(2)))


def test_a_folder_that_a_node_does_not_share_is_refused_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "NFS_SECONDS", 0.2)
    for message in claim(tmp_path / "a", tmp_path / "b"):
        assert "rank 1 on node1 does not see what rank 0 on node0 wrote there; use a folder that all" in message
        assert message.startswith("run.folder = ") and "\n" not in message


def test_a_shared_folder_is_claimed_and_nothing_of_the_check_stays(tmp_path: Path) -> None:
    assert claim(tmp_path, tmp_path) == ["", ""]
    assert sorted(path.name for path in (tmp_path / "tiny").iterdir()) == [
        "cache", "checkpoints", "config.toml", "rollouts", "status",
    ]  # fmt: skip


def test_a_file_that_nfs_shows_late_is_waited_for(tmp_path: Path) -> None:
    threading.Timer(0.3, (tmp_path / "late").touch).start()
    assert not job.hidden_files(tmp_path, {"late"})


def test_a_folder_that_cannot_be_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    messages = claim(tmp_path / "file", tmp_path / "file")
    assert all("cannot write" in message for message in messages), messages
