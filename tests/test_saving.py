"""A save that a stop leaves no time for is given up, wherever the run waits for it, and nothing is begun after it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_world import OneRank

from tlt_hpc.checkpoint.save import Save
from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.cluster.stopping import Stop, StopFlag
from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.config import UserError
from tlt_hpc.mpi.owner import claim_owner
from tlt_hpc.run import saving


class AloneWorld(OneRank):
    def __init__(self) -> None:
        self.flag = StopFlag()

    def allgather_with_stop_vote(self, value: Any) -> tuple[list[Any], Stop]:
        return [value], self.flag.kind


@pytest.fixture
def disk(monkeypatch) -> Iterator[threading.Event]:
    """A disk that writes nothing before the event is set."""
    ready, true_write = threading.Event(), Save.write

    def write(save: Save) -> None:
        assert ready.wait(20)
        true_write(save)

    monkeypatch.setattr(Save, "write", write)
    yield ready
    ready.set()


def job_in(folder) -> Any:
    shard = {"weight": torch.arange(4.0)}
    claim_owner(folder, BEAT.start_name)
    policy = SimpleNamespace(state_shard=lambda: shard, optimizer_step_count=1)
    return SimpleNamespace(
        world=AloneWorld(), folder=SimpleNamespace(status=folder),
        checkpoints=CheckpointStore(folder, 2), drafting=None, policy=policy,
        engine=SimpleNamespace(chooser=SimpleNamespace(acceptance=SimpleNamespace(state=dict))),
        config=SimpleNamespace(run=SimpleNamespace(seed=0)),
    )  # fmt: skip


def test_a_save_that_no_time_is_left_for_is_given_up(tmp_path, disk, caplog, monkeypatch):
    job = job_in(tmp_path)
    assert saving.save_checkpoint(job, 1, saved=0) == 1  # begun, and not waited for
    monkeypatch.setattr("tlt_hpc.cluster.stopping.KILL_SECONDS", 0.0)
    job.world.flag.request(Stop.KILL, "SIGTERM")
    assert saving.save_checkpoint(job, 2, saved=1) == 1  # the wait for the one before is what there is no time for
    assert "no time is left to save" in caplog.text
    assert saving.save_at_end(job, saved=0, step=2) == (Stop.KILL, False)
    assert not job.checkpoints.is_saving


def test_with_time_left_it_is_waited_for(tmp_path, disk):
    job = job_in(tmp_path)
    threading.Timer(0.2, disk.set).start()
    assert saving.save_checkpoint(job, 1, saved=0) == 1
    assert job.checkpoints.is_saving
    assert saving.save_checkpoint(job, 2, saved=1) == 2
    assert saving.save_at_end(job, saved=2, step=2) == (Stop.NONE, True)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000001", "step-000002"]


def test_at_the_end_nothing_is_begun_once_it_is_late(tmp_path, disk):
    job = job_in(tmp_path)
    job.world.flag.request(Stop.TIME, "SIGUSR2")
    assert not job.world.flag.is_late
    disk.set()
    assert saving.save_at_end(job, saved=0, step=1) == (Stop.TIME, True)
    assert (tmp_path / "step-000001").is_dir()
    job.world.flag._ends_at = 0.0  # the allocation's end
    job.world.flag.request(Stop.TIME, "the time limit")
    job.world.flag._asked.pop(0)
    assert saving.save_at_end(job, saved=1, step=2) == (Stop.TIME, False)
    assert not (tmp_path / "step-000002").exists() and not job.checkpoints.is_saving


def test_after_sigterm_nothing_is_begun_though_seconds_are_left(tmp_path, disk):
    """SIGKILL comes at a time that nobody tells; the next start repeats the step from its log."""
    job = job_in(tmp_path)
    disk.set()
    job.world.flag.request(Stop.KILL, "SIGTERM")
    assert not job.world.flag.is_late
    assert saving.save_at_end(job, saved=0, step=1) == (Stop.KILL, False)
    assert not any(tmp_path.glob("step-*")) and not job.checkpoints.is_saving


def test_a_start_that_has_lost_its_folder_saves_nothing(tmp_path, disk):
    job = job_in(tmp_path)
    disk.set()
    claim_owner(tmp_path, "later")
    with pytest.raises(UserError, match="another start has taken over"):
        saving.save_checkpoint(job, 1, saved=0)
    assert not list(tmp_path.glob("step-*"))
