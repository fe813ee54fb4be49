"""What ``tlt submit`` submits, on a real Slurm: an array of which one member fails, and jobs that are cancelled."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch_ranks import ROOT
from local_slurm import ENDED, LocalSlurm
from shell_slurm import TINY
from slurm_training import wait_for
from whole_run import SMALL

from tlt_hpc.cli.main import main
from tlt_hpc.cluster.executor import submit_jobs
from tlt_hpc.cluster.request import SlurmRequest
from tlt_hpc.cluster.slurm import ask_slurm
from tlt_hpc.cluster.submission import Submission, SubmittedRun, load, save, submitit_parameters
from tlt_hpc.storage.step_lines import add_line

Command = Callable[..., int]
pytestmark = [pytest.mark.slurm, pytest.mark.ci]


@pytest.fixture
def submit(slurm: LocalSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Command]:
    """The command, called in an empty folder on the private cluster; what a failed test leaves there ends."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    yield lambda *words: main(["submit", *words])
    slurm.run("scancel", f"--user={getpass.getuser()}")


def wait_for_all(slurm: LocalSlurm, folder: Path) -> None:
    """Wait until all jobs have ended, as long as one of them gets on, by Slurm's word or by its log."""
    jobs = [job for member in load(folder).members for job in member.jobs]

    def signs() -> str:
        logs = sorted(path for path in folder.glob("jobs/*.out"))
        return "\n".join([*(f"{job} {slurm.state(job)}" for job in jobs), *map(last_line, logs)])

    wait_for(lambda: all(slurm.state(job) in ENDED for job in jobs), signs)


def last_line(log: Path) -> str:
    """Size and last line of a log."""
    text = log.read_text(errors="replace")
    return f"{log.name}, {len(text)} letters: {text.rstrip().rpartition(chr(10))[2]}"


def test_of_six_members_the_failed_one_is_named_and_submitted_again_alone(
    slurm: LocalSlurm, submit: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Members that take a second: the memory plan of a job, which fails where its file is missing."""
    members = tuple(
        SubmittedRun(f"member{i}", f"runs/member{i}", ("plan", "missing.toml" if i == 3 else TINY), (f"run.seed={i}",))
        for i in range(6)
    )
    asked = SlurmRequest({"partition": "main", "time": "5"})
    submission = Submission(tmp_path / "sub", tmp_path, ROOT, "six", TINY, asked, members, 0.0)
    save(submission)
    commands = [member.arguments for member in members]
    jobs = submit_jobs(submission.jobs_folder, submitit_parameters(submission), commands, dict(os.environ))
    save(submission.with_jobs(dict(zip((member.name for member in members), jobs, strict=True))))
    (tmp_path / "runs" / "member0").mkdir(parents=True)
    add_line(tmp_path / "runs" / "member0" / "metrics.jsonl", {"training/global_step": 1})
    wait_for_all(slurm, tmp_path / "sub")

    assert submit("status", "sub") == 1
    _, head, *rows = capsys.readouterr().out.splitlines()
    state = slice(head.index("state"), head.index("steps"))
    assert [row[state].strip() for row in rows[:6]] == [*["finished"] * 3, "failed (status 2)", *["finished"] * 2]
    assert "tlt: config file missing.toml" in Path(rows[3].split()[-1]).read_text()
    assert rows[0].split()[2].partition("/")[0] == "1"

    (tmp_path / "missing.toml").write_text(Path(TINY).read_text())
    assert submit("resubmit", "sub") == 0
    again = load(tmp_path / "sub").members
    assert [len(member.jobs) for member in again] == [1, 1, 1, 2, 1, 1]
    wait_for_all(slurm, tmp_path / "sub")
    assert submit("status", "sub") == 0
    capsys.readouterr()
    assert submit("resubmit", "sub") == 0
    assert "nothing has failed" in capsys.readouterr().out


def test_a_cancelled_run_is_not_taken_for_a_finished_one(
    slurm: LocalSlurm, submit: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = [TINY, "run.num_steps=500", *SMALL, "--partition=main", "--time=10", "--folder=sub", "--no-preflight"]
    assert submit(*job, "--ranks-per-node=1", "--cpus-per-rank=2") == 0
    log = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    wait_for(log.exists, lambda: "\n".join(map(last_line, sorted((tmp_path / "sub").glob("jobs/*.out")))))
    assert submit("cancel", "sub") == 0
    wait_for_all(slurm, tmp_path / "sub")
    capsys.readouterr()
    assert submit("status", "sub") == 1
    row = capsys.readouterr().out.splitlines()[2]
    assert row.split()[:2] == ["tiny", "cancelled"], row
    started = (tmp_path / "runs" / "tiny" / "environment.jsonl").read_text()
    assert re.findall(r'"threads": "(\d+)"', started) == ["2"], "one for each core, and not as on the login node"


def test_an_array_that_is_cancelled_before_it_starts_is_shown_as_cancelled(
    submit: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm keeps one record for all members then; no log is there to name."""
    job = [TINY, *SMALL, "--partition=main", "--time=10", "--folder=sub", "--no-preflight", "--sbatch=--hold"]
    assert submit(*job, "--sweep=run.seed=0,1") == 0
    jobs = [member.jobs[-1] for member in load(Path("sub")).members]
    ask_slurm("scancel", *jobs)  # by hand, so that only Slurm knows
    capsys.readouterr()
    assert submit("status", "sub") == 1
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in rows] == [["tiny-seed0", "cancelled"], ["tiny-seed1", "cancelled"]]
    assert "log" not in head.split()
