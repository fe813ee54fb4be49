"""A feature cache on each node's own disk: whose files it holds, what it is called, how it is kept tidy."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shell_slurm import TINY

from tlt_hpc.config import UserError, load_config
from tlt_hpc.run.job import gather_cache_placement
from tlt_hpc.storage.folder import RunFolder, node_folder

HOSTNAMES = ["a", "b", "a", "b", "a"]


def place_of(rank: int, folder: str, run: Path, error: str = "") -> tuple[RunFolder, int, int]:
    """Of one of several ranks on two hosts; ``error``: of another."""

    def run_on_all_ranks(work: Any) -> Any:
        result = work()
        if error:
            raise UserError(error)
        return result

    world: Any = SimpleNamespace(rank=rank, size=5, hostname=HOSTNAMES[rank], run_on_all_ranks=run_on_all_ranks)
    world.local_rank, world.allgather = HOSTNAMES[:rank].count(world.hostname), lambda item: HOSTNAMES
    config = load_config(TINY, [f"drafter.cache_folder={folder}"] if folder else [])
    return gather_cache_placement(config.drafter, world, RunFolder(run))


def test_without_a_setting_all_ranks_share_the_runs_folder(tmp_path: Path) -> None:
    folder, rank, num_ranks = place_of(3, "", tmp_path)
    assert (folder.path, rank, num_ranks) == (tmp_path, 3, 5)


def test_ranks_of_a_node_share_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "disk"))
    places = [place_of(rank, "$NODE_DISK/features", tmp_path / "runs" / "x") for rank in range(5)]
    assert [(rank, num_ranks) for _, rank, num_ranks in places] == [(0, 3), (0, 2), (1, 3), (1, 2), (2, 3)]
    paths = [folder.path for folder, _, _ in places]
    assert len(set(paths)) == 2 and paths[0] == paths[2] == paths[4]
    assert paths[0].is_relative_to(tmp_path / "disk" / "features") and paths[0].name == "a"
    assert not (tmp_path / "disk").exists(), "nothing is made until a step begins"


def test_runs_of_one_name_do_not_meet(tmp_path: Path) -> None:
    first, second = (node_folder("~/scratch", tmp_path / parent / "x", "a") for parent in ("one", "two"))
    assert first != second and first.parent.name.startswith("x-")
    assert first.is_relative_to(Path.home() / "scratch")
    assert first == node_folder("~/scratch", Path(os.path.relpath(tmp_path / "one" / "x")), "a"), "however it is named"


def test_a_variable_that_one_node_lacks_is_one_line_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_DISK", raising=False)
    with pytest.raises(UserError, match=r"drafter\.cache_folder = '\$NO_SUCH_DISK/x'.*not set on b; set it") as caught:
        place_of(1, "$NO_SUCH_DISK/x", tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no disk on b"):
        place_of(0, str(tmp_path), tmp_path, "no disk on b")
