"""The garbage collector's full rounds, which would stop a rank in the middle of a rollout."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from launch_ranks import ROOT, run_on_ranks
from test_resume import Silent

from tlt_hpc.common.host_memory import without_garbage_collection
from tlt_hpc.config import load_config
from tlt_hpc.mpi.world import World
from tlt_hpc.rl.distributed import leave_process_group
from tlt_hpc.rl.policy import Policy
from tlt_hpc.run import job
from tlt_hpc.train import run_training


@pytest.fixture
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_is_imported_is_out_of_the_collectors_rounds(thawed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with without_garbage_collection():
        assert not gc.isenabled()
        import colorsys  # noqa: F401
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000 and len(gc.get_objects()) < 1_000


def test_where_nothing_is_imported_all_remains_collectable(thawed: None) -> None:
    """A later call, when there is an engine, must not exclude it."""
    with without_garbage_collection():
        import sys as again  # noqa: F401
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("change", ["lora.rank=0", "lora.rank=4"])
def test_an_engine_ends_with_its_process_group(tmp_path: Any, change: str) -> None:
    """It is full of cycles: reachable from what is excluded it would stay, and its threads crash Python's exit."""
    assert run_on_ranks(1, is_engine_left, str(tmp_path), change, own=True) == [False]


def is_engine_left(folder: str, change: str) -> bool:
    engines = []

    class Watched(Policy):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            engines.append(weakref.ref(self.engine))

    job.Policy = Watched  # type: ignore[misc]
    small = ["rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=16", "run.num_steps=1"]
    config = load_config(ROOT / "jobs" / "tiny.toml", [f"run.folder={folder}", "run.ranks=1", change, *small])
    run_training(config, World.connect(), Silent())
    leave_process_group()
    (engine,) = engines
    return engine() is not None
