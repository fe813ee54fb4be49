"""Two starts of one run: the second waits or is refused, and a start that was taken for dead commits nothing."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from launch_ranks import ROOT, run_on_ranks
from test_resume import Silent
from test_watch_verdict import record

from tlt_hpc import train as run
from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.cluster.watch.record import HEARTBEAT_SECONDS, write_record
from tlt_hpc.config import UserError, load_config
from tlt_hpc.mpi import owner
from tlt_hpc.mpi.owner import Owner, check_owner, claim_owner, read_running_owner
from tlt_hpc.mpi.world import World
from tlt_hpc.rl.distributed import leave_process_group
from tlt_hpc.run import saving
from tlt_hpc.storage.step_lines import read_lines


class Clock:
    """Stands for ``time`` of the module: passes in its sleeps alone, and what is to happen meanwhile does."""

    def __init__(self) -> None:
        self.now = 0.0
        self.meanwhile: list[Callable[[], None]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for each in self.meanwhile:
            each()


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(owner, "time", clock)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return clock


class Living:
    """Rank 0 of an earlier start on another node, whose heartbeat moves until it ends, or is left."""

    def __init__(self, folder, clock: Clock, ending: str = "", ends_at: float = math.inf) -> None:
        self._folder, self._clock, self._ending, self._ends_at = folder, clock, ending, ends_at
        self._record = record(0, start="first", host="elsewhere", pid=4711, part="7 sequences left")
        write_record(folder, self._record)

    def _beat(self) -> None:
        is_over = self._clock.now >= self._ends_at
        beats = int(min(self._clock.now, self._ends_at) / HEARTBEAT_SECONDS)
        ending = self._ending if is_over else ""
        write_record(self._folder, replace(self._record, heartbeat=beats, ending=ending))

    def __enter__(self) -> Living:
        self._clock.meanwhile.append(self._beat)
        return self

    def __exit__(self, *_: object) -> None:
        self._clock.meanwhile.remove(self._beat)


def test_a_start_that_lives_is_not_run_over(tmp_path, caplog, clock):
    claim_owner(tmp_path, "first")
    assert clock.now == 0, "an empty folder is claimed at once"
    with Living(tmp_path, clock), pytest.raises(UserError) as caught:
        claim_owner(tmp_path, "second")
    said = r"this run is already running \(process \d+ on \S+\) in \S+; wait for it or end it first"
    assert re.search(said, str(caught.value)) and "\n" not in str(caught.value)
    assert caplog.text.count("waiting up to 60 s for its end") == 1 and clock.now == owner.MAX_WAIT_SECONDS
    check_owner(tmp_path, "first")


def test_a_start_at_work_is_found_and_one_that_stands_still_is_not(tmp_path, clock):
    assert read_running_owner(tmp_path) == ""
    claim_owner(tmp_path, "first")
    with Living(tmp_path, clock):
        assert re.fullmatch(r"process \d+ on \S+", read_running_owner(tmp_path))
    assert clock.now <= HEARTBEAT_SECONDS + 0.25, "the first movement is enough"
    assert read_running_owner(tmp_path) == ""


def test_one_that_is_ending_is_waited_for(tmp_path, clock):
    claim_owner(tmp_path, "first")
    with Living(tmp_path, clock, "stopped early", ends_at=30.0):
        claim_owner(tmp_path, "second")
    assert clock.now == 30.0
    check_owner(tmp_path, "second")


def test_a_killed_ones_record_stands_still_and_on_its_own_host_the_process_itself_is_looked_at(tmp_path, clock):
    claim_owner(tmp_path, "first")
    write_record(tmp_path, record(0, start="first", host="elsewhere"))
    claim_owner(tmp_path, "second")
    assert clock.now == owner.QUIET_SECONDS
    dead = subprocess.Popen(["true"])
    dead.wait()
    write_record(tmp_path, record(0, start="second", host=os.uname().nodename, pid=dead.pid))
    claim_owner(tmp_path, "third")
    assert clock.now == owner.QUIET_SECONDS, "nobody waits for it"
    check_owner(tmp_path, "third")


def test_slurm_has_ended_what_the_same_job_began(tmp_path, monkeypatch, clock):
    for name, value in {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "76", "SLURM_ARRAY_TASK_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    claim_owner(tmp_path, "first")
    with Living(tmp_path, clock):
        with pytest.raises(UserError, match=r"this run is already running \(job 76_0, process"):
            claim_owner(tmp_path, "beside it, in one allocation")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        claim_owner(tmp_path, "second")  # its node was lost, and comes back
    check_owner(tmp_path, "second")
    with pytest.raises(UserError, match=r"another start has taken over .* \(job 76_0, process \d+ on \S+\): this one"):
        check_owner(tmp_path, "first")


def test_one_that_has_just_begun_is_given_time_for_its_first_sign_of_life(tmp_path, clock):
    (tmp_path / "owner").write_text(json.dumps(asdict(Owner("first", "elsewhere", 4711, "", ""))))
    first = record(0, start="first", host="elsewhere", heartbeat=1)
    clock.meanwhile.append(lambda: clock.now >= 5 and write_record(tmp_path, first))
    claim_owner(tmp_path, "second")  # for nothing came after that
    assert clock.now == 5 + owner.QUIET_SECONDS


@pytest.mark.parametrize("content", [None, "", "[]", '{"start": 3}'])
def test_a_folder_that_was_taken_away_takes_no_commit(tmp_path, content):
    claim_owner(tmp_path, "first")
    (tmp_path / "owner").unlink()
    if content is not None:
        (tmp_path / "owner").write_text(content)
    with pytest.raises(UserError, match="owner is gone or damaged: the run's folder was deleted or moved"):
        check_owner(tmp_path, "first")
    claim_owner(tmp_path, "second")
    check_owner(tmp_path, "second")


# -- in a run -------------------------------------------------------------------------------------------------------


def lose_the_folder(folder: str) -> dict[str, Any]:
    """What two ranks leave of a run whose folder another start has claimed after its first step."""
    overrides = ["rollout.prompts_per_step=4", "rollout.max_new_tokens=40"]
    config = load_config(ROOT / "jobs" / "tiny.toml", [*overrides, f"run.folder={folder}", "run.num_steps=9"])
    job = run.build_job(config, World.connect())
    saving.resume(job, lambda step: None)
    run.take_step(job, 0, Silent())
    own = BEAT.start_name
    if job.world.rank == 0:
        claim_owner(job.folder.status, "later")
    job.world.barrier()
    said = []
    for action in (lambda: run.take_step(job, 1, Silent()), lambda: saving.save_checkpoint(job, 1, 0)):
        with pytest.raises(UserError) as caught:
            action()
        said.append(str(caught.value))
    job.world.barrier()
    left = sorted(str(path.relative_to(job.folder.path)) for path in job.folder.path.rglob("step-*/*"))
    lines = list(read_lines(job.folder.metrics))
    job.close()
    leave_process_group()
    return {"said": said, "left": left, "lines": lines, "own": own}


@pytest.mark.mpi
@pytest.mark.ci
def test_of_a_run_that_was_taken_over_no_rank_writes_anything(tmp_path):
    for told in run_on_ranks(2, lose_the_folder, str(tmp_path)):
        assert all(f"another start has taken over {tmp_path}" in line for line in told["said"]), told
        kept = [path for path in told["left"] if not path.startswith(("cache", "kept"))]
        assert kept == ["rollouts/step-000001/rank-0000.h5", "rollouts/step-000001/rank-0001.h5"], told
        assert told["lines"] == [0]
