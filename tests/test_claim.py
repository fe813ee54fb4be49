"""A run's folder must be one that all ranks see: otherwise a save would wait forever for the others' files."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from fake_world import on_threads

from tlt_hpc.checkpoint.claim import claim_run_folder_all_ranks
from tlt_hpc.config import Config, load_config
from tlt_hpc.storage import folder
from tlt_hpc.storage.folder import RunFolder, wait_for_listed_files

TINY = Path(__file__).parents[1] / "jobs" / "tiny.toml"


def claim(*places: Path) -> list[str]:
    """The error of each of two ranks whose ``run.folder`` is that place; empty if there is none."""

    def on_rank(world: Any) -> None:
        config: Config = load_config(TINY, [f"run.folder={places[world.rank]}"])
        claim_run_folder_all_ranks(RunFolder(config.folder), config, world)

    return [str(error or "") for error in on_threads(2, on_rank)]


def test_a_folder_that_a_node_does_not_share_is_refused_on_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "NFS_SECONDS", 0.2)
    for message in claim(tmp_path / "a", tmp_path / "b"):
        assert "rank 1 on node1 does not see what rank 0 on node0 wrote there; use a folder that all" in message
        assert message.startswith("run.folder = ") and "\n" not in message


def test_a_shared_folder_is_claimed_and_nothing_of_the_check_stays(tmp_path):
    assert claim(tmp_path, tmp_path) == ["", ""]
    assert sorted(path.name for path in (tmp_path / "tiny").iterdir()) == [
        "cache", "checkpoints", "config.toml", "rollouts", "status",
    ]  # fmt: skip


def test_a_file_that_nfs_shows_late_is_waited_for(tmp_path):
    threading.Timer(0.3, (tmp_path / "late").touch).start()
    assert not wait_for_listed_files(tmp_path, {"late"})


def test_a_folder_that_cannot_be_is_one_error_on_all_ranks(tmp_path):
    (tmp_path / "file").touch()
    messages = claim(tmp_path / "file", tmp_path / "file")
    assert all("cannot write" in message for message in messages), messages
