"""Two starts of one run: the second waits or is refused, and whoever was taken for dead commits nothing."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from dataclasses import replace

import pytest
from test_watch_verdict import record

from tlt_hpc import owner
from tlt_hpc.config import UserError
from tlt_hpc.owner import check_owner, claim_owner
from tlt_hpc.watch.record import write_record


@pytest.fixture(autouse=True)
def quickly(monkeypatch) -> None:
    monkeypatch.setattr(owner, "QUIET_SECONDS", 0.4)
    monkeypatch.setattr(owner, "PATIENCE_SECONDS", 1.2)
    monkeypatch.setattr(owner, "_LOOK_SECONDS", 0.02)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


class Living:
    """Rank 0 of an earlier start on another node, whose heartbeat moves until it is left."""

    def __init__(self, folder, ending: str = "") -> None:
        self._folder, self._ending, self._over = folder, ending, threading.Event()
        self._record = record(0, start="first", host="elsewhere", pid=4711, part="7 sequences left")
        write_record(folder, self._record)
        self._thread = threading.Thread(target=self._beat)

    def _beat(self) -> None:
        count = 0
        while not self._over.wait(0.1):
            count += 1
            write_record(self._folder, replace(self._record, heartbeat=count))
        write_record(self._folder, replace(self._record, heartbeat=count + 1, ending=self._ending))

    def __enter__(self) -> Living:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def test_an_empty_folder_is_claimed_at_once_and_kept(tmp_path):
    started = time.monotonic()
    claim_owner(tmp_path, "first")
    assert time.monotonic() - started < 0.3
    check_owner(tmp_path, "first")


def test_a_start_that_lives_is_not_run_over(tmp_path, caplog):
    claim_owner(tmp_path, "first")
    with Living(tmp_path), pytest.raises(UserError) as caught:
        claim_owner(tmp_path, "second")
    said = r"another start .* at work in \S+: rank 0 on elsewhere, process 4711, in rollout of step 12 .*; wait for"
    assert re.search(said, str(caught.value)) and "\n" not in str(caught.value)
    assert caplog.text.count("waiting for its end") == 1
    check_owner(tmp_path, "first")


def test_one_that_is_ending_is_waited_for(tmp_path):
    claim_owner(tmp_path, "first")
    with Living(tmp_path, "stopped early") as living:
        threading.Timer(0.5, living.end).start()
        claim_owner(tmp_path, "second")
    check_owner(tmp_path, "second")


def test_a_killed_ones_record_stands_still_and_holds_nobody_up_for_long(tmp_path):
    claim_owner(tmp_path, "first")
    write_record(tmp_path, record(0, start="first", host="elsewhere"))
    started = time.monotonic()
    claim_owner(tmp_path, "second")
    assert 0.4 <= time.monotonic() - started < 1


def test_on_its_own_host_the_process_itself_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "QUIET_SECONDS", 60.0)
    dead = subprocess.Popen(["true"])
    dead.wait()
    write_record(tmp_path, record(0, start="first", host=os.uname().nodename, pid=dead.pid))
    claim_owner(tmp_path, "second")
    check_owner(tmp_path, "second")


def test_slurm_has_ended_what_the_same_job_began(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    claim_owner(tmp_path, "first")
    with Living(tmp_path):
        claim_owner(tmp_path, "second")  # its node was lost, and comes back
    check_owner(tmp_path, "second")
    with pytest.raises(UserError, match=r"a later start has taken over .* \(job 77, on \S+, process \d+\)"):
        check_owner(tmp_path, "first")


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
