"""``tlt rehearse``: on ranks of this machine, and what it says of runs that lost something."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from launch_ranks import ROOT, run_python
from slurm_training import SETTINGS

from tlt_hpc.cli.main import main
from tlt_hpc.extras.rehearse import faults, rehearse
from tlt_hpc.extras.rehearse.rehearse import Rehearsal, Rehearsed, Start, read_step_digests, with_ended_start
from tlt_hpc.storage.step_lines import STEP, add_line

SHORT = [*SETTINGS, "run.stall_factor=0.05"]


@pytest.mark.mpi
@pytest.mark.ci
@pytest.mark.timeout(900)
def test_every_fault_strikes_and_nothing_is_lost(tmp_path: Path) -> None:
    command = ["-m", "tlt_hpc", "rehearse", "jobs/tiny.toml", *SHORT, f"run.folder={tmp_path}"]
    done = run_python(*command, timeout=800)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    table = re.findall(
        r"^(rank killed|rank hangs|disk full|time limit)[^:\n]*  (\d+)  +(\w+)$", done.stdout, re.MULTILINE
    )
    assert [row[0] for row in table] == ["rank killed", "rank hangs", "disk full", "time limit"], done.stdout
    steps = [int(row[1]) for row in table]
    assert {row[2] for row in table} == {"nothing"} and steps == sorted(steps)
    for said in (
        r"rank killed .*: .*rank 1 on \S+ was killed or crashed",
        r"rank hangs: tlt: the job hangs: rank 1 on \S+ shows no sign",
        r"disk full .*: tlt: cannot write .*File too large", r"time limit: stopped early \(SIGUSR2\)",
        "not started by sbatch/rehearse.sh: Slurm's signal and requeue were not tried",
    ):  # fmt: skip
        assert re.search(rf"^{said}", done.stdout, re.MULTILINE), done.stdout
    place = tmp_path / "tiny-rehearsal"
    assert "the last start ended so: rank 1 on " in (place / "start-2.log").read_text(), "the one that had hung"
    state = json.loads((place / "rehearsal.json").read_text())
    assert [start["status"] for start in state["starts"]] == [9, 71, 2, 75, 0]
    again = run_python(*command)
    assert again.returncode == 2 and "has a finished rehearsal; remove it" in again.stderr


def a_start(place: Path, fault: str, *marks: str, log: str = "") -> Rehearsal:
    """The traces of one start."""
    folder = place / "start-0"
    folder.mkdir(parents=True)
    (folder / "fault").write_text(fault)
    for mark in marks:
        (folder / mark).touch()
    (place / "start-0.log").write_text(log)
    return Rehearsal(place, "job.toml", [], 2)


KILLED = "tlt: rank 1 on h was killed or crashed"


def test_a_line_or_a_log_that_is_not_as_it_was_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rehearsal = a_start(tmp_path, "kill", faults.BEGUN, faults.STRUCK)
    folder = rehearsal.folder
    for step in range(3):
        folder.rollout_log(step, 0).parent.mkdir(parents=True)
        folder.rollout_log(step, 0).write_bytes(b"a log")
        add_line(folder.metrics, {STEP: step + 1, "critic/score/mean": step})
    before = read_step_digests(folder)
    assert with_ended_start(rehearsal, Rehearsed([], before), 9).starts[0].lost == []
    folder.rollout_log(1, 0).write_bytes(b"another")
    add_line(folder.metrics, {STEP: 3, "critic/score/mean": 0.5})
    found = with_ended_start(rehearsal, Rehearsed([], before), 9).starts[0]
    assert (found.lost, found.struck, found.status) == ([1, 2], True, 9)
    kill, end = Start("kill", True, 9, 1.0, 2.0, []), Start("", False, 0, 0.0, 3.0, [1, 2])
    assert rehearse.report_losses(rehearsal, Rehearsed([kill, end])) == 1
    assert "steps 2, 3\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "log", "exit_status", "said"),
    [
        (9, KILLED, 0, f"(SIGKILL): {KILLED}"),
        (9, "Traceback (most recent call last):", 1, "(SIGKILL): the run did not report it (exit status 9)"),
        (0, KILLED, 1, f"{KILLED} (exit status 0)"),
    ],
)
def test_a_fault_that_the_run_does_not_report_fails(
    status: int, log: str, exit_status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rehearsal = a_start(tmp_path, "kill", faults.BEGUN, faults.STRUCK, log=log)
    state = with_ended_start(rehearsal, Rehearsed(), status)
    ended = Rehearsed([*state.starts, Start("", False, 0, 0.0, 3.0, [])])
    assert rehearse.report_losses(rehearsal, ended) == exit_status
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("stopped early (SIGUSR2) after 3\ntlt: job 5 is queued again and will resume", "nothing was otherwise"),
        ("stopped early (the time limit, in 120 s)\ntlt: job 5 is queued again", "SIGUSR2 did not arrive"),
        ("stopped early (SIGUSR2)\ntlt: job 5 is not queued again (denied): submit", "no requeue: tlt: job 5 is not"),
        ("stopped early (SIGUSR2)", "the site: no requeue"),
        ("tlt: job 5 is queued again and will resume", "in the middle of an update at the end of its time"),
    ],
)
def test_what_a_site_does_otherwise_is_said(
    log: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that its time limit has ended, this program with it."""
    monkeypatch.setenv("BASH_FUNC_run_ranks%%", "() { :; }")
    rehearsal = a_start(tmp_path, "limit", faults.BEGUN, log=log)
    state = with_ended_start(rehearsal, Rehearsed(), -1)
    assert state.starts[0].struck and state.next_fault(2) == "kill"
    assert said in "\n".join(rehearse.site_differences(rehearsal, state))


def test_ranks_of_a_job_need_no_mpiexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where srun starts Cray MPICH, there is none."""
    monkeypatch.setattr(rehearse, "find_mpiexec", lambda: pytest.fail("it is looked for"))
    monkeypatch.setenv("BASH_FUNC_run_ranks%%", '() { echo "started $*"; }')
    rehearsal = Rehearsal(tmp_path, str(ROOT / "jobs" / "tiny.toml"), [], 2)
    assert rehearse.run_ranks(rehearsal, "kill", 0) == 0
    assert rehearsal.read_log_lines(0)[0].startswith(
        f"started {sys.executable} -P -m mpi4py -m tlt_hpc.extras.rehearse.rehearsed_rank train"
    )


def ends_at_once(rehearsal: Rehearsal, fault: str, number: int) -> int:
    a_start(rehearsal.place, fault, log="tlt: no such model")
    return 2


def is_interrupted(rehearsal: Rehearsal, fault: str, number: int) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("start_ranks", "status", "said"),
    [
        (ends_at_once, 2, "the run ended before its fault; see the end of {}/tiny-rehearsal/start-0.log"),
        (is_interrupted, 130, "interrupted before it finished"),
    ],
)
def test_a_start_that_does_not_reach_its_fault_is_one_line(
    start_ranks: Any, status: int, said: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(rehearse, "run_ranks", start_ranks)
    assert main(["rehearse", str(ROOT / "jobs" / "tiny.toml"), f"run.folder={tmp_path}"]) == status
    assert (tmp_path / "tiny-rehearsal").is_dir() and capsys.readouterr().err == f"tlt: {said.format(tmp_path)}\n"
