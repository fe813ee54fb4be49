"""``tlt submit``: members, what the batch script asks for, the checks before it, and states."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tlt_hpc.cli.main import main
from tlt_hpc.cli.submissions import LATER, rows_of
from tlt_hpc.cli.submit import _DEFAULTS
from tlt_hpc.cluster import executor, status
from tlt_hpc.cluster.local import given_job
from tlt_hpc.cluster.request import SlurmRequest
from tlt_hpc.cluster.slurm import Allocation, parse_queue, read_queue
from tlt_hpc.cluster.stopping import AGAIN
from tlt_hpc.cluster.submission import Submission, expand, load, make_members, parameters, save
from tlt_hpc.config import ConfigError, UserError, load_config
from tlt_hpc.config.reading import to_toml
from tlt_hpc.extras.preflight import job_checks
from tlt_hpc.extras.preflight.program import ask
from tlt_hpc.extras.preflight.results import failure
from tlt_hpc.look.collect import RunRow, as_csv, as_table
from tlt_hpc.storage.records import CurvePoint, DrafterFacts, write_json
from tlt_hpc.storage.step_lines import add_line

ROOT = Path(__file__).resolve().parent.parent
TINY = str(ROOT / "jobs" / "tiny.toml")


@pytest.fixture
def submit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The command without preflight, called by its script in an empty folder."""
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(ROOT / "jobs" / "submit.py"))["main"]
    return lambda words: main([*words, *["--no-preflight"] * (words[0] not in LATER)])


# --- members ---


def test_a_sweep_is_a_grid_of_named_runs(submit: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sweep = ["--sweep", "run.seed=0,1", "--sweep", "drafter.init=random,embedded:tiny", "--dry-run"]
    assert submit([TINY, "rollout.top_p=0.9", *sweep, "--ranks-per-node", "4", "--nodes", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "asks Slurm for 8 ranks: --nodes=2 --ranks-per-node=4 --cpus-per-rank=1 --time=24:00:00"
    assert [line.partition(":")[0] for line in lines[1:5]] == [
        "runs/tiny-seed0-initrandom",
        "runs/tiny-seed0-initembedded_tiny",
        "runs/tiny-seed1-initrandom",
        "runs/tiny-seed1-initembedded_tiny",
    ]
    assert "rollout.top_p=0.9 run.seed=1 drafter.init=embedded:tiny" in lines[4]
    assert lines[5:] == ["nothing was submitted (--dry-run)"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('["off", "ngram-4"],["drafter-4"]', ['["off", "ngram-4"]', '["drafter-4"]']),
        ('"a,]",b', ['"a,]"', "b"]),
        ("0, 1", ["0", "1"]),
    ],
)
def test_commas_within_brackets_and_quotes_do_not_separate(text: str, values: list[str]) -> None:
    assert expand(f"a.b={text}") == [f"a.b={value}" for value in values]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sweep", "run.seed=0,x"], "run.seed = 'x'"),
        (["--sweep", "run.seed=0,0"], "two members have run.name = 'tiny-seed0'"),
        (["--sweep", "run.seed=1,,2"], "section.key=A,B"),
        (["--sweep", "run.seed=0", "--sweep", "run.seed=1"], "run.seed is given twice; give all its values in one"),
        (["--sweep", "rollout.prompts_per_step=16,15", "--ranks-per-node", "4"], "not divisible by 4"),
        (["rollout.temprature=1"], "did you mean"),
        (
            ["run.seed=0,1"],
            f"'0,1': use a whole number from 0 to {2**63 - 1}, or for a run of each --sweep run.seed=0,1",
        ),
    ],
)
def test_nothing_is_submitted_if_one_member_is_wrong(
    arguments: list[str], words: str, submit: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert submit([TINY, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("tlt: ") and err.count("\n") == 1 and words in err
    assert list(tmp_path.iterdir()) == []


def test_a_job_file_of_another_folder_is_told_where_paths_are_read(
    submit: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert submit([TINY, "model.path=models/none"]) == 2
    assert capsys.readouterr().err.endswith(f" (relative paths are read from {tmp_path})\n")
    shutil.copy(TINY, tmp_path / "own.toml")
    assert submit(["own.toml", "model.path=models/none"]) == 2
    assert "relative paths" not in capsys.readouterr().err


# --- the batch script ---


def make(folder: Path, points: Sequence[str], config: str = TINY, made: float = 0.0, **asked: str) -> Submission:
    """A submission of the embedded job; ``points`` are swept, and its members are the jobs 100_0, 100_1, .."""
    members = make_members("train", config, config, [], points)
    submission = Submission(
        folder / "sub", folder, ROOT, "tiny", config, SlurmRequest(_DEFAULTS | asked), members, made
    )
    return submission.with_jobs({member.name: f"100_{index}" for index, member in enumerate(members)})


def test_a_submission_is_read_back_as_it_was(tmp_path: Path) -> None:
    submission = make(tmp_path, ["run.seed=0,1"], nodes="4", qos="long")
    save(submission)
    assert load(submission.folder) == submission
    (submission.folder / "submission.json").write_text('{"batch": {}}')
    with pytest.raises(ConfigError, match="is damaged or of an earlier version"):
        load(submission.folder)


def test_ranks_receive_their_job_file_and_the_command_that_resumes_it(tmp_path: Path) -> None:
    """The batch script's shell reads the job file into the environment, where a rank finds it."""
    (tmp_path / "a b.toml").write_text(Path(TINY).read_text())
    config = str(tmp_path / "a b.toml")
    submission = dataclasses.replace(make(tmp_path, ["run.seed=0,1"], config), folder=tmp_path / "my sub")
    shell = [line for line in parameters(submission)["setup"] if not line.startswith("source ")]
    function = (ROOT / "sbatch" / "env.sh").read_text().partition("read_job() {")[2].partition("\n}")[0]
    program = "\n".join([f"read_job() {{{function}\n}}", "TLT_SRUN_MPI=pmi2", *shell, "env -0"])
    out = subprocess.run(["bash", "-c", program], capture_output=True, check=True, env={}).stdout.decode()
    found = dict(line.partition("=")[::2] for line in out.split("\0"))
    assert found[AGAIN] == f"tlt submit resubmit '{tmp_path}/my sub'", "as it can be typed"
    assert found["SLURM_MPI_TYPE"] == "pmi2" and found["PWD"] == str(tmp_path)
    assert given_job({**found, "PMI_RANK": "0"}, config) == Path(config).read_bytes().rstrip()


@pytest.mark.parametrize(("end", "kept"), [("exit 5", "5\n"), ("exit 0", None), ("kill -TERM $$; sleep 5", None)])
def test_a_job_whose_ranks_leave_no_status_leaves_its_own(end: str, kept: str | None, tmp_path: Path) -> None:
    """But no 0, which bash also reports where a signal ends it, and nothing over what a rank has written."""
    submission = make(tmp_path, ["run.seed=0,1"])
    submission.jobs_folder.mkdir(parents=True)
    setup = [line for line in parameters(submission)["setup"] if not line.startswith(("source ", "[[ $", "read_job"))]
    place = {"SLURM_ARRAY_JOB_ID": "100", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "101", "SLURM_RESTART_COUNT": "2"}
    program = "\n".join(["TLT_SRUN_MPI=pmi2", *setup, end])
    subprocess.run(["bash", "-c", program], check=False, env={"PATH": os.environ["PATH"], **place}, timeout=60)
    found = {path.name: path.read_text() for path in submission.jobs_folder.iterdir()}
    assert found == ({} if kept is None else {"100_1-start-002.status": kept})
    leave_status(submission, "100_1", "75\n", start=2)
    subprocess.run(["bash", "-c", program], check=False, env={"PATH": os.environ["PATH"], **place}, timeout=60)
    assert executor.read_status(submission.jobs_folder, "100_1") == 75


def test_options_of_a_script_are_read_however_they_are_written(
    submit: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH -A acc -p gpu -N 2 -t 1:00:00\n#SBATCH --gres gpu:4 --exclusive -C=a100\n")
    assert submit([TINY, "--script", str(script), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "asks Slurm for 8 ranks: --nodes=2 --ranks-per-node=4 --cpus-per-rank=1 --partition=gpu --account=acc "
        "--time=1:00:00 --gres=gpu:4 --exclusive --constraint=a100"
    )
    for line, word in (
        ("--nodes=1-2", "--nodes=1-2 is no whole number"),
        ("-Z 3", "'-Z' is not understood as an option of sbatch"),
        ("-n 8", "the script asks for --ntasks=8; write --ntasks-per-node"),
    ):
        script.write_text(f"#SBATCH {line}\n")
        assert submit([TINY, "--script", str(script), "--dry-run"]) == 2
        assert word in capsys.readouterr().err


def test_further_options_of_sbatch_count_however_they_are_written(
    submit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, shown in (
        (["--sbatch=-q long", "--sbatch=-Ca100", "--sbatch=exclusive"], "--qos=long --constraint=a100 --exclusive"),
        (["--sbatch=--comment=for a friend"], "--comment=for a friend"),
    ):
        assert submit([TINY, "--dry-run", "--nodes=2", *given]) == 0
        assert capsys.readouterr().out.splitlines()[0].endswith(f" --time=24:00:00 {shown}")
    for gpus in ("--gres=gpu:a100:4", "--gpus-per-node=4", "--gpus-per-node=a100:4"):
        assert submit([TINY, "--dry-run", f"--sbatch={gpus}"]) == 0
        ranks = gpus if gpus == "--gpus-per-node=4" else "--ranks-per-node=4"
        assert capsys.readouterr().out.startswith(f"asks Slurm for 4 ranks: --nodes=1 {ranks} ")
    assert submit([TINY, "--dry-run", "--ranks-per-node=2", "--sbatch=--gres=gpu:4"]) == 0
    assert capsys.readouterr().out.startswith("asks Slurm for 2 ranks: ")


def fake_program(folder: Path, name: str, body: str) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def test_slurms_answers_do_not_depend_on_the_users_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQUEUE_PARTITION would hide jobs; SLURM_TIME_FORMAT, or a name that is no UTF-8, would end a preempted run."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SQUEUE_PARTITION", "cpu")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "%a %H:%M")
    fake_program(tmp_path, "squeue", '[[ -v SQUEUE_PARTITION ]] || echo "5|RUNNING|None"')
    shown = r"JobId=5 JobName=l\344uft PreemptTime=${SLURM_TIME_FORMAT:-2026-11-27T10:00:00}\n"
    fake_program(tmp_path, "scontrol", f'printf "{shown}"')
    assert read_queue()["5"].is_live
    assert Allocation("5", 0).is_preempted()
    assert ask(["scontrol"], 10).out.startswith("JobId=5 JobName=l\ufffduft")


def fake_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str) -> None:
    for name, body in (("srun", "true"), ("sbatch", sbatch)):
        fake_program(folder, name, body)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin")


def test_members_are_an_array_and_those_that_failed_are_submitted_again(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_slurm(tmp_path, monkeypatch, f"cp $1 {tmp_path}/submitted.sh; echo Submitted batch job 4321")
    arguments = ["--nodes", "2", "--gpus-per-node", "8", "--partition", "gpu", "--folder", "sub"]
    assert submit([TINY, *arguments, "--sweep", "run.seed=0,1,2", "--sbatch=--qos=long", "--time", "2-00:00:00"]) == 0
    text = (tmp_path / "submitted.sh").read_text()
    for line in ("array=0-2%3", "nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "partition=gpu", "qos=long",
                 "signal=USR2@120", "requeue", "time=2-00:00:00", "open-mode=append"):  # fmt: skip
        assert f"#SBATCH --{line}\n" in text
    assert "--wckey" not in text and "--mem" not in text
    run = next(line for line in text.splitlines() if line.startswith("srun "))
    assert "--kill-on-bad-exit=1 --cpus-per-task=1 --output=all $TLT_CONTAINER python -P -u -m submitit" in run
    assert "job 4321_2: tiny-seed2" in capsys.readouterr().out
    assert [member.jobs for member in load(tmp_path / "sub").members] == [("4321_0",), ("4321_1",), ("4321_2",)]
    assert submit([TINY, "--folder", "sub"]) == 2
    assert "has a submission" in capsys.readouterr().err
    fake_program(tmp_path, "squeue", "echo '4321_1|RUNNING|None'")
    (tmp_path / "sub" / "jobs" / "4321_0-start-000.status").write_text("0\n")
    assert submit(["resubmit", "sub"]) == 0
    assert "--array" not in (tmp_path / "submitted.sh").read_text()
    again = load(tmp_path / "sub")
    assert [member.jobs for member in again.members] == [("4321_0",), ("4321_1",), ("4321_2", "4321")]


def test_what_the_options_leave_open_comes_from_a_batch_script(
    submit: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its lines for account and partition that nobody has edited count as nothing; options go before it."""
    fake_slurm(tmp_path, monkeypatch, f"cp $1 {tmp_path}/submitted.sh; echo Submitted batch job 4321")
    fake_program(tmp_path, "squeue", "exit 0")
    script = tmp_path / "job.sh"
    lines = (
        (ROOT / "sbatch" / "train_qwen7b.sh").read_text().replace("#SBATCH --exclusive", "#SBATCH --constraint=a100")
    )
    script.write_text(lines)
    job = ["run.ranks=1", "rollout.prompts_per_step=64", "--script", str(script), "--time=1:00:00", "-p", "gpu"]
    assert submit([TINY, *job]) == 0
    text = (tmp_path / "submitted.sh").read_text()
    for line in ("nodes=1", "ntasks-per-node=8", "gpus-per-node=8", "cpus-per-task=8", "mem=0", "time=1:00:00",
                 "partition=gpu", "constraint=a100", "signal=USR2@120", "requeue", "job-name=tiny"):  # fmt: skip
        assert f"#SBATCH --{line}\n" in text
    assert "YOUR_" not in text and "--exclusive" not in text
    script.write_text(
        lines.replace("gpus-per-node=8", "gpus-per-node=a100:4").replace("#SBATCH --ntasks", "# --ntasks")
    )
    assert submit([TINY, *job, "--folder=typed"]) == 0
    text = (tmp_path / "submitted.sh").read_text()
    assert "#SBATCH --gpus-per-node=a100:4\n" in text and "#SBATCH --ntasks-per-node=4\n" in text
    script.write_text(lines)
    assert submit([TINY, *job, "--gpus-per-node=2", "--nodes=1", "--folder=other"]) == 0
    assert "#SBATCH --ntasks-per-node=2\n" in (tmp_path / "submitted.sh").read_text()
    script.write_text(lines.replace("gpus-per-node=8", "gres=lscratch:200,gpu:a100:8"))
    assert submit([TINY, *job, "--gpus-per-node=2", "--ranks-per-node=4", "--folder=both"]) == 0
    text = (tmp_path / "submitted.sh").read_text()
    assert "#SBATCH --gres=lscratch:200\n" in text and "#SBATCH --gpus-per-node=2\n" in text


def test_commands_that_are_printed_can_be_typed(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Names with blanks, and values with brackets."""
    fake_slurm(tmp_path, monkeypatch, "echo Submitted batch job 4321")
    assert submit([TINY, 'speculation.strategies=["ngram-4"]', "--folder", "my sub"]) == 0
    out = capsys.readouterr().out
    assert """ 'speculation.strategies=["ngram-4"]'\n""" in out and "tlt submit status 'my sub'\n" in out
    (tmp_path / "my run" / "training").mkdir(parents=True)
    assert main(["report", "my run"]) == 2
    assert "see `tlt watch 'my run'`" in capsys.readouterr().err


def test_what_is_asked_for_is_not_overruled_by_variables_of_sbatch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They go before a script's lines, also of what ``--test-only`` is asked about; what is left open they decide."""
    values = {"PARTITION": "cpu", "TIMELIMIT": "1", "ARRAY_INX": "0-99", "NO_REQUEUE": "1", "OUTPUT": "x"}
    values |= {"MEM_PER_CPU": "1G", "GRES": "gpu:8"}  # beside what is asked for by another option
    for name, value in {**values, "ACCOUNT": "mine"}.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "17")  # as in a job of an array, which submits the next one
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")  # after it was queued again
    fake_slurm(tmp_path, monkeypatch, f"env >{tmp_path}/seen; echo Submitted batch job 4321")
    asked = parameters(make(tmp_path, ["run.seed=0,1"], partition="gpu", mem="64G", **{"gpus-per-node": "4"}))
    assert executor.send(tmp_path / "jobs", asked, [["train"], ["train"]], os.environ.copy()) == ["4321_0", "4321_1"]
    seen = [line for line in (tmp_path / "seen").read_text().splitlines() if re.match("SBATCH_|SLURM_[AR]", line)]
    assert seen == ["SBATCH_ACCOUNT=mine"]


def test_a_submission_waits_for_another(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_slurm(tmp_path, monkeypatch, f"cp $1 {tmp_path}/submitted.sh; echo Submitted batch job 4321")
    queue = "echo '4321_0|RUNNING|None'; echo '4321_1|PENDING|Priority'; echo '17|RUNNING|None'"
    fake_program(tmp_path, "squeue", queue)
    assert submit([TINY, "--command=warmup", "--sweep", "run.seed=0,1", "--folder", "first"]) == 0
    assert "for the runs after it: drafter.init=runs/tiny-seed0-warmup/drafter" in capsys.readouterr().out
    first = load(tmp_path / "first").members[0]
    assert (first.arguments[0], first.run) == ("warmup", "runs/tiny-seed0-warmup")
    assert submit([TINY, "--after", "first", "--after", "17", "--folder", "second"]) == 0
    assert "#SBATCH --dependency=afterok:4321_0:4321_1:17\n" in (tmp_path / "submitted.sh").read_text()
    blocked = "echo '4321_0|RUNNING|None'; echo '4321_1|PENDING|None'; echo '4321|PENDING|DependencyNeverSatisfied'"
    fake_program(tmp_path, "squeue", blocked)
    fake_program(tmp_path, "scancel", f"echo $* > {tmp_path}/cancelled")
    capsys.readouterr()
    assert submit(["status", "second"]) == 1 and "blocked: a job before it has failed" in capsys.readouterr().out
    assert submit(["cancel", "second"]) == 0 and (tmp_path / "cancelled").read_text() == "4321\n"
    (tmp_path / "cancelled").unlink()
    assert submit(["resubmit", "second"]) == 0
    assert "#SBATCH --dependency=afterok:4321_0:4321_1\n" in (tmp_path / "submitted.sh").read_text(), "17 is gone since"
    assert (tmp_path / "cancelled").read_text() == "4321\n"
    assert submit(["cancel", "first"]) == 0 and (tmp_path / "cancelled").read_text() == "4321_0 4321_1\n"
    capsys.readouterr()
    assert submit([TINY, "--after", "99", "--folder", "third"]) == 2
    assert capsys.readouterr().err.startswith("tlt: --after 99: no such job in squeue; ")
    leave_status(load(tmp_path / "first"), "4321_1", "1\n")
    fake_program(tmp_path, "squeue", "exit 0")
    capsys.readouterr()
    assert submit([TINY, "--after", "first", "--folder", "third"]) == 2
    assert capsys.readouterr().err == "tlt: --after first: tiny-seed0-warmup cancelled; resubmit it first\n"


def test_nothing_is_submitted_that_preflight_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Slurm is asked about the very script that it would get; a drafter may be made by the job before."""
    fake_slurm(tmp_path, monkeypatch, f"cp $2 {tmp_path}/tested.sh; echo sbatch: error: no such QOS >&2; exit 1")
    for name, body in (("sinfo", "echo 'gpu*|up|1-00:00:00|64000|(null)'"), ("scontrol", "echo JobRequeue = 1")):
        fake_program(tmp_path, name, body)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tlt_hpc.extras.preflight.checklist.CHECKS", {"drafter": job_checks.check_drafter})
    fake_program(tmp_path, "squeue", "echo '100_0|RUNNING|None'")
    warmup = make(tmp_path, [])
    save(replace(warmup, members=(replace(warmup.members[0], run="runs/warmup", arguments=("warmup", TINY)),)))
    shutil.move(warmup.folder, tmp_path / "warm")
    given = [TINY, "--sbatch=--qos=long", "-p", "gpu", "--folder", "sub"]
    right, wrong = "drafter.init=runs/warmup/drafter", "drafter.init=runs/warm/drafter"
    for after, failures in (([right], 2), ([right, "--after=warm"], 1), ([wrong, "--after=warm"], 2)):
        assert main(["submit", *given, *after]) == 2
        out, err = capsys.readouterr()
        assert "failure  sbatch       sbatch would refuse the job: sbatch: error: no such QOS" in out
        assert ("failure  drafter" in out) == (failures == 2)
        assert err.startswith(f"tlt: nothing was submitted: {failures} failure") and "--no-preflight" not in err
    text = (tmp_path / "tested.sh").read_text()
    assert "#SBATCH --qos=long\n" in text and "\nsrun " in text and not (tmp_path / "sub").exists()
    assert main(["submit", *given, right, "--after=warm", "--time=2-00:00:00"]) == 2
    out = capsys.readouterr().out
    assert "failure  partition    time 2-00:00:00 is asked for" in out and "sbatch" not in out
    assert main(["submit", *given, right, "--after=warm", "-p", "man"]) == 2
    assert (
        "failure  partition    no partition man is up; give one of sinfo with --partition: gpu\n"
        in capsys.readouterr().out
    )
    no_room: Any = {"disk": lambda job: failure("no room", "make some")}
    monkeypatch.setattr("tlt_hpc.extras.preflight.checklist.CHECKS", no_room)
    monkeypatch.setattr("tlt_hpc.extras.preflight.checklist.SLURM_CHECKS", {})
    assert main(["submit", *given]) == 2
    assert capsys.readouterr().err == (
        "tlt: nothing was submitted: 1 failure; correct it, or add --no-preflight if it is of this machine alone\n"
    )
    fake_program(tmp_path, "sinfo", "echo no controller >&2; exit 1")
    assert main(["submit", *given]) == 2
    assert capsys.readouterr().err.startswith("tlt: `sinfo -h -o %P` failed: no controller; call this on a login node")


def test_a_run_that_waits_or_is_at_work_is_not_submitted_again(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_slurm(tmp_path, monkeypatch, "echo Submitted batch job 4321")
    fake_program(tmp_path, "squeue", "exit 0")
    assert submit([TINY]) == 0
    assert "asks Slurm for 2 ranks: --nodes=1 --ranks-per-node=2" in capsys.readouterr().out, "as run.ranks has it"
    fake_program(tmp_path, "squeue", "echo '4321|PENDING|Priority'")
    assert submit([TINY, "--folder=other"]) == 2
    assert re.fullmatch(
        r"tlt: runs/tiny: job 4321 of runs/submitted/tiny-[\d-]+ is pending; wait for it, add --after 4321, or give "
        r"another run.name\n",
        capsys.readouterr().err,
    )
    add_line(made(tmp_path / "runs/tiny") / "metrics.jsonl", line_of(0))
    assert submit([TINY, "--after=4321", "run.num_steps=3", "--folder=other", "--dry-run", "run.name=b"]) == 0
    fake_program(tmp_path, "squeue", "exit 0")
    assert submit([TINY, "--folder=other", "--dry-run"]) == 0
    assert "(is there with 1 step, and resumes)" in capsys.readouterr().out


def test_a_run_may_be_continued_by_a_job_that_waits_for_the_first(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The remedy that the refusal names; the first may then be submitted again, for the other waits for it."""
    fake_slurm(tmp_path, monkeypatch, "echo Submitted batch job $((4000 + $(ls -d sub* | wc -l)))")
    fake_program(tmp_path, "squeue", "exit 0")
    assert submit([TINY, "run.num_steps=2", "--folder=sub1"]) == 0
    fake_program(tmp_path, "squeue", "echo '4001|PENDING|Priority'")
    assert submit([TINY, "run.num_steps=4", "--folder=sub2"]) == 2
    assert "add --after 4001" in capsys.readouterr().err
    assert submit([TINY, "run.num_steps=4", "--after=4001", "--folder=sub2"]) == 0
    blocked = "echo '4001|FAILED|x'; echo '4002|PENDING|DependencyNeverSatisfied'"
    fake_program(tmp_path, "squeue", blocked)
    capsys.readouterr()
    assert submit(["status", "sub2"]) == 1
    assert re.findall(r"^submission .*/(\w+)$", capsys.readouterr().out, re.MULTILINE) == ["sub1", "sub2"]
    assert submit(["resubmit", "sub1"]) == 0


def test_the_steps_of_a_later_submission_are_its_own(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And what it has continued, an earlier one neither shows nor starts again."""
    fake_slurm(tmp_path, monkeypatch, "echo Submitted batch job $((4000 + $(ls -d runs/submitted/* | wc -l)))")
    fake_program(tmp_path, "squeue", "exit 0")

    def reached(name: str, *further: str) -> str:
        capsys.readouterr()
        assert submit(["collect", f"runs/submitted/{name}", *further]) == 0
        return str(re.findall(r" (\d+)/\d+ ", capsys.readouterr().out)[0])

    def go_on(steps: range) -> None:
        for step in steps:
            add_line(made(tmp_path / "runs/tiny") / "metrics.jsonl", line_of(step))

    assert submit([TINY, "run.num_steps=9", "--folder=runs/submitted/b"]) == 0
    go_on(range(2))
    assert submit([TINY, "run.num_steps=5", "--folder=runs/submitted/a"]) == 0
    go_on(range(2, 5))
    assert [reached("b"), reached("a")] == ["2", "5"], "by the step at which the other has started"
    go_on(range(5, 7))
    assert [reached("b"), reached("a")] == ["2", "5"], "by its own run.num_steps"
    capsys.readouterr()
    assert submit(["resubmit", "runs/submitted/b"]) == 2
    assert capsys.readouterr().err == (
        "tlt: runs/tiny: runs/submitted/a has continued it since; `tlt submit resubmit runs/submitted/a`\n"
    )
    for name, age in (("a", 60), ("b", 0)):  # which copying them may do
        os.utime(tmp_path / "runs/submitted" / name / "submission.json", (time.time() - age,) * 2)
    assert submit(["status"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"submission  {tmp_path}/runs/submitted/a"


def test_a_damaged_submission_stops_no_other(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_slurm(tmp_path, monkeypatch, "echo Submitted batch job 4321")
    fake_program(tmp_path, "squeue", "exit 0")
    path = made(tmp_path / "runs/submitted/broken") / "submission.json"
    path.write_text("{")
    assert submit([TINY, "--folder=runs/submitted/whole"]) == 0
    warned = capsys.readouterr().err
    assert warned.startswith(f"tlt: left out: {path} is damaged or of an earlier version (") and warned.count("\n") == 1
    assert submit(["status"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith(f"submission  {tmp_path}/runs/submitted/whole\n") and err == warned
    assert submit(["status", "runs/submitted/broken"]) == 2
    assert capsys.readouterr().err.startswith("tlt: runs/submitted/broken/submission.json is damaged")


def test_after_the_readmes_third_step_status_shows_the_warm_up_and_the_run(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_slurm(tmp_path, monkeypatch, "echo Submitted batch job $((4000 + $(ls -d runs/submitted/* | wc -l)))")
    fake_program(tmp_path, "squeue", "exit 0")
    assert submit([TINY, "--folder=runs/submitted/other", "run.name=other"]) == 0
    assert submit([TINY, "--command=warmup", "--folder", "runs/submitted/warm"]) == 0
    fake_program(tmp_path, "squeue", "echo '4002|RUNNING|None'; echo '4003|PENDING|Dependency'")
    assert submit([TINY, "--after", "runs/submitted/warm", "drafter.init=random"]) == 0
    capsys.readouterr()
    assert submit(["status"]) == 0
    first, _, warmup, second, _, run = capsys.readouterr().out.splitlines()
    assert first.endswith("/warm") and warmup.split()[:2] == ["tiny-warmup", "running"]
    assert "/tiny-2" in second and run.split()[:3] == ["tiny", "pending", "(Dependency)"]
    assert load(tmp_path / "runs/submitted/warm").name == "tiny-warmup", "of the job in squeue"


def test_a_mistyped_command_is_no_job_file(submit: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(["stauts"]) == 2
    assert capsys.readouterr().err == "tlt: no job file and no command 'stauts'; did you mean status?\n"


def test_a_submission_is_meant_by_its_folder_its_name_or_a_job(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_slurm(tmp_path, monkeypatch, "echo Submitted batch job $((4000 + $(ls -d runs/submitted/* | wc -l)))")
    fake_program(tmp_path, "scancel", f"echo $* > {tmp_path}/cancelled")
    fake_program(tmp_path, "squeue", "exit 0")
    assert submit([TINY, "--folder=runs/submitted/sweep", "--sweep", "run.seed=0,1"]) == 0
    assert submit([TINY, "--folder=runs/submitted/other"]) == 0
    fake_program(tmp_path, "squeue", "echo '4001_0|RUNNING|x'; echo '4001_1|PENDING|None'; echo '4002|RUNNING|None'")

    def said(*words: str, code: int = 0) -> list[str]:
        capsys.readouterr()
        assert submit(list(words)) == code
        return "".join(capsys.readouterr()).splitlines()

    first = f"submission  {tmp_path}/runs/submitted/sweep"
    for word in ("runs/submitted/sweep", "sweep", "4001"):
        for command in ("status", "collect", "resubmit"):
            assert said(command, word)[0] == first
    assert [line.split()[0] for line in said("status", "4001_1")[2:]] == ["tiny-seed1"]
    assert said("list")[1:] == [
        f"{name:<20}  {time.strftime('%Y-%m-%d %H:%M', time.localtime(load(Path(name)).made))}  {runs:<4}  {states}"
        for name, runs, states in (
            ("runs/submitted/sweep", 2, "1 running, 1 pending"), ("runs/submitted/other", 1, "1 running"),
        )
    ]  # fmt: skip
    assert "--dependency=afterok:4001_0:4001_1" in said(TINY, "run.name=new", "--after=sweep", "--dry-run")[0]
    assert said("cancel", code=2) == [
        "tlt: jobs of an earlier submission wait or run; give one of runs/submitted/sweep, runs/submitted/other"
    ]
    assert not (tmp_path / "cancelled").exists()
    assert said("status", "none", code=2) == [
        "tlt: no submission none; there are runs/submitted/sweep, runs/submitted/other (all: tlt submit list)"
    ]
    assert said("cancel", "4001_1") == [first, "cancelled: 4001_1"]
    assert (tmp_path / "cancelled").read_text() == "4001_1\n"
    fake_program(tmp_path, "squeue", "echo '4001_0|RUNNING|None'")
    assert said("cancel", code=2) == [
        "tlt: jobs of an earlier submission wait or run; give one of runs/submitted/sweep"
    ], "not the newest, which one would mean"
    fake_program(tmp_path, "squeue", "echo '4002|RUNNING|None'")
    assert said("cancel")[-1] == "cancelled: 4002"
    later = load(tmp_path / "runs/submitted/sweep").with_jobs({"tiny-seed0": "5000_0"})
    assert later.members_of("4001_0") == later.members_of("5000") == {"tiny-seed0"}, "by the number before, too"
    save(later)
    assert said("cancel", "4001_0", code=2) == ["tlt: job 4001_0 was submitted again since; give the newest: 5000_0"]


def test_where_squeue_does_not_answer_the_files_are_shown(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_slurm(tmp_path, monkeypatch, "echo Submitted batch job 4321")
    fake_program(tmp_path, "squeue", "exit 0")
    assert submit([TINY, "--folder=sub", "--sweep=run.seed=0,1,2"]) == 0
    fake_program(tmp_path, "squeue", "echo down >&2; exit 1")
    leave_status(load(tmp_path / "sub"), "4321_0", "0")
    add_line(made(tmp_path / "runs/tiny-seed1") / "metrics.jsonl", line_of(0))
    capsys.readouterr()
    assert submit(["status", "sub"]) == 0, "nothing is known to have failed"
    out, err = capsys.readouterr()
    assert err.startswith("tlt: `squeue ") and "failed: down; what follows is" in err and err.count("\n") == 1
    assert [line.split("  ")[1].split()[:2] for line in out.splitlines()[2:]] == [
        ["finished"], ["no", "sign"], ["not", "known"],
    ]  # fmt: skip
    assert submit(["cancel", "sub"]) == 2


def test_jobs_of_another_users_submission_are_asked_for(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As where a group shares a clone; squeue names the jobs of the users that it is asked for alone."""
    fake_slurm(tmp_path, monkeypatch, "echo Submitted batch job 4321")
    fake_program(tmp_path, "squeue", "exit 0")
    assert submit([TINY, "--folder=sub"]) == 0
    monkeypatch.setattr(Submission, "user", 2**32 - 2)
    asked = f"--user={os.geteuid()},{2**32 - 2}"
    fake_program(tmp_path, "squeue", f"[[ $* != *{asked}* ]] || echo '4321|RUNNING|None'")
    capsys.readouterr()
    assert submit(["status", "sub"]) == submit(["collect", "sub"]) == 0
    assert capsys.readouterr().out.count("tiny  running") == 2
    assert submit(["resubmit", "sub"]) == 0
    assert capsys.readouterr().out.endswith(
        "nothing has failed; nothing was submitted; 4321 is in the queue: to ask for something else, "
        "`tlt submit cancel sub` first\n"
    )
    assert submit([TINY, "--folder=again"]) == 2 and "job 4321 of sub is running" in capsys.readouterr().err
    assert submit([TINY, "--folder=next", "--after=sub"]) == 0


def test_a_run_whose_job_has_not_begun_is_no_mistake(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_slurm(tmp_path, monkeypatch, "echo Submitted batch job 4321")
    assert submit([TINY, "--folder=runs/submitted/sub"]) == 0
    for queue, said in (
        (
            "echo '4321|PENDING|Resources'",
            "does not exist yet: job 4321 of sub is pending (Resources); it is made once",
        ),
        ("exit 0", "does not exist; give"),
        ("exit 1", "does not exist; give"),
    ):
        fake_program(tmp_path, "squeue", queue)
        capsys.readouterr()
        assert main(["watch", "--once", "runs/tiny"]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"tlt: runs/tiny {said}") and told.count("\n") == 1
    for each in ("a", "b"):
        (tmp_path / "runs" / each / "rollouts").mkdir(parents=True)
    assert main(["watch", "--once", "a"]) == 2
    assert capsys.readouterr().err == "tlt: a does not exist; runs in runs: a, b\n"


def test_status_shows_what_a_warm_up_has_reached_and_how_often_a_job_was_queued_again(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_slurm(tmp_path, monkeypatch, "echo Submitted batch job 4321")
    fake_program(tmp_path, "squeue", "exit 0")
    assert submit([TINY, "--command=warmup", "--folder=sub"]) == 0
    fake_program(tmp_path, "squeue", "echo '4321|RUNNING|None'")
    place = tmp_path / "runs/tiny-warmup"
    for name in ("rollouts", "training", "drafter", "status"):
        made(place / name)
    curve = (CurvePoint(100, 9, 1.0, 0.5, 2.25),)
    facts = DrafterFacts("tiny", "gcd", 4, 9, 100, 2.25, "drafter-5", 1.0, 4, curve)
    write_json(place / "drafter" / "facts.json", dataclasses.asdict(facts))
    for job, shown in (("4321", True), ("4000", False)):
        owner = {"start": "now", "host": "a", "pid": 1, "job": job, "restarts": "2", "ends_at": None}
        write_json(place / "status" / "owner", owner)
        capsys.readouterr()
        assert submit(["status", "sub"]) == 0
        _, head, row = capsys.readouterr().out.splitlines()
        assert row.startswith("tiny-warmup  running, accept length 2.250")
        assert ("restarts" in head) == shown and (row.split()[-1] == "2") == shown


def test_a_run_that_has_finished_is_not_submitted_again(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """But with more steps, or when it is to be evaluated in another way, it has work to do."""
    fake_slurm(tmp_path, monkeypatch, "echo Submitted batch job 4321")
    fake_program(tmp_path, "squeue", "exit 0")
    place = made(tmp_path / "runs/extra")
    given = [TINY, "run.name=extra", "run.num_steps=3", "--dry-run"]
    (place / "config.toml").write_text(to_toml(load_config(TINY, given[1:3])))
    for step in range(3):
        add_line(place / "metrics.jsonl", line_of(step))
    assert submit(given) == 0
    write_json(place / "finished.json", {"num_steps": 3, "policy_sha256": "ab"})
    capsys.readouterr()
    assert submit(given) == 2
    assert capsys.readouterr().err == (
        "tlt: runs/extra has finished: 3 of 3 steps; raise run.num_steps or give another run.name\n"
    )
    assert submit([*given, "run.num_steps=4"]) == 0
    assert submit([*given, "evaluation.every_steps=1"]) == 0


# --- states ---


def leave_status(submission: Submission, job: str, text: str, start: int = 0) -> Path:
    """Write the exit status that a job's ranks leave behind."""
    submission.jobs_folder.mkdir(parents=True, exist_ok=True)
    path = submission.jobs_folder / f"{job}-start-{start:03}.status"
    path.write_text(text)
    return path


def test_the_table_shows_the_state_of_each_member(tmp_path: Path) -> None:
    submission = make(tmp_path, ["run.seed=0,1,2,3,4,5,6,7"])
    submission = dataclasses.replace(
        submission, members=(*submission.members[:7], dataclasses.replace(submission.members[7], jobs=()))
    )
    leave_status(submission, "100_0", "75\n")
    leave_status(submission, "100_0", "0\n", start=1)
    leave_status(submission, "100_1", "1\n")
    leave_status(submission, "100_2", "75\n")  # of its start before
    leave_status(submission, "100_4", "75\n")
    leave_status(submission, "100_5", "143\n")  # of the batch script, which Slurm has ended
    for step in range(3):
        add_line(made(tmp_path / submission.members[0].run) / "metrics.jsonl", line_of(step))
    for job in range(6):
        (submission.jobs_folder / f"100_{job}_0_log.out").touch()
    queue = "100_2|RUNNING|None\n100_3|PENDING|Resources|more\n100_5|TIMEOUT|TimeLimit\n100_6|FAILED|x\n"
    found = status.read_statuses(submission, parse_queue(queue))
    head, *rows = as_table(rows_of(submission, found), [str(each.log or "") for each in found]).splitlines()
    assert head.split()[:4] == ["run", "state", "steps", "score"] and head.split()[-1] == "log"
    jobs = submission.jobs_folder
    assert [row.split() for row in rows] == [
        ["tiny-seed0", "finished", "3/30", "0.000", "->", "0.500", f"{jobs}/100_0_0_log.out"],
        ["tiny-seed1", "failed", "(status", "1)", "0/30", f"{jobs}/100_1_0_log.out"],
        ["tiny-seed2", "running", "0/30", f"{jobs}/100_2_0_log.out"],
        ["tiny-seed3", "pending", "(Resources|more)", "0/30", f"{jobs}/100_3_0_log.out"],
        ["tiny-seed4", "stopped", "early", "0/30", f"{jobs}/100_4_0_log.out"],
        ["tiny-seed5", "timeout", "0/30", f"{jobs}/100_5_0_log.out"],
        ["tiny-seed6", "failed", "(no", "exit", "status)", "0/30"],
        ["tiny-seed7", "not", "submitted", "0/30"],
    ]
    assert status.unfinished(found) == {f"tiny-seed{index}" for index in (1, 4, 5, 6, 7)}


def test_what_was_cancelled_is_told_from_what_failed_and_from_what_had_finished(tmp_path: Path) -> None:
    """Whatever its exit status, and for long: Slurm forgets a job after minutes."""
    submission = make(tmp_path, ["run.seed=0,1,2,3,4,5"])
    for member, steps in ((0, 30), (1, 29), (3, 30)):
        place = made(tmp_path / submission.members[member].run)
        write_json(place / "finished.json", {"num_steps": steps, "policy_sha256": "ab"})
    for job, text in (("100_0", "75"), ("100_1", "75"), ("100_2", "143"), ("100_3", "1"), ("100_4", "0")):
        leave_status(submission, job, text)

    def states(queue: str) -> list[str]:
        found = status.read_statuses(submission, parse_queue(queue))
        assert not any(each.log for each in found)
        return [each.state for each in found]

    own = "100_0|CANCELLED|None\n100_1|CANCELLED|None\n100_2|CANCELLED|None\n"
    cancelled = ["finished", "cancelled", "cancelled", "failed (status 1)", "finished", "cancelled"]
    for array in ("100", "100_[3-5]"):  # a record of all that have not started
        assert states(f"{own}{array}|CANCELLED|None\n") == cancelled
    forgotten = ["finished", "stopped early", "failed (status 143)", "failed (status 1)", "finished"]
    assert states("") == [*forgotten, "failed (no exit status)"]
    for job in ("100_1", "100_2", "100_5"):
        status.cancelled_file(submission, job).touch()
    assert states("") == cancelled


@pytest.mark.parametrize(("text", "found"), [("75\n", 75), ("", 1), ("0 0", 1), ("\x80", 1), ("9" * 5000, 1)])
def test_a_status_that_is_no_number_counts_as_a_failure(text: str, found: int, tmp_path: Path) -> None:
    submission = make(tmp_path, [])
    path = leave_status(submission, "100", text)
    leave_status(submission, "1000", "9")  # another job
    assert executor.read_status(submission.jobs_folder, "100") == found
    assert executor.read_status(submission.jobs_folder, "10") is None
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="it is not a regular file"):
        executor.read_status(submission.jobs_folder, "100")


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def line_of(step: int) -> dict[str, float]:
    """What a step leaves in metrics.jsonl, as far as the tables read it."""
    return {"training/global_step": step + 1, "critic/score/mean": step / 4}


def test_what_was_reached_is_collected_and_written(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    submission = make(tmp_path, ["run.seed=0,1"])
    save(submission)
    leave_status(submission, "100_0", "0\n")
    cost = {"timing_s/step": 18.0, "perf/total_num_tokens": 500}
    for step in range(4):
        add_line(made(tmp_path / submission.members[0].run) / "metrics.jsonl", {**line_of(step), **cost})
    assert submit(["collect", "sub", "--output", "all.csv"]) == 0
    printed, err = capsys.readouterr()
    assert err.startswith("tlt: there is no squeue on PATH; call this where Slurm's commands are; what follows")
    out = printed.splitlines()
    assert out[0] == f"submission  {submission.folder}"
    assert out[2].split()[:6] == ["tiny-seed0", "finished", "4/30", "0.000", "->", "0.750"]
    assert out[-1] == "written to all.csv"
    rows = (tmp_path / "all.csv").read_text().splitlines()
    assert rows[0] == ("run,run.seed,state,steps,num_steps,score_first,score_last,tokens,rank-hours,tokens_an_hour")
    assert rows[1].startswith("tiny-seed0,0,finished,4,30,0.0,0.75,") and rows[2].startswith("tiny-seed1,1,not known,")
    assert submit(["cancel", "sub"]) == submit(["resubmit", "sub"]) == 2, "jobs may wait or run"
    assert submit(["collect"]) == 2, "no submission in runs/submitted"


def test_a_name_cannot_become_a_formula() -> None:
    assert as_csv([RunRow("=HYPERLINK(1)", "finished", 0, None, None, None, None)]).splitlines()[1][:3] == "'=H"


class Canary:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_no_pickle_of_a_folder_is_read(submit: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder may be another user's, and unpickling its files would run that user's programs."""
    fake_slurm(tmp_path, monkeypatch, "echo Submitted batch job 4321")
    fake_program(tmp_path, "squeue", "exit 0")
    submission = make(tmp_path, [])
    save(submission)
    executed = tmp_path / "executed"
    for name in ("100_0_0_result.pkl", "100_0_submitted.pkl", "100_0-start-000.status"):
        (submission.jobs_folder / name).write_bytes(pickle.dumps(Canary(executed)))
    for command, code in (("status", 1), ("resubmit", 0)):
        assert submit([command, str(submission.folder)]) == code
        assert not executed.exists()
