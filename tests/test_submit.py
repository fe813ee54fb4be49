"""``tlt submit``: members, what the batch script asks for, the checks before it, and states."""

from __future__ import annotations

import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from launch_ranks import ROOT
from shell_slurm import TINY, Cluster

from tlt_hpc.cli import submit as submit_module
from tlt_hpc.cli.submissions import member_result_rows
from tlt_hpc.cluster import executor, status
from tlt_hpc.cluster.launcher import job_text_from_launcher
from tlt_hpc.cluster.request import SlurmRequest
from tlt_hpc.cluster.slurm import Allocation, parse_queue, read_queue
from tlt_hpc.cluster.stopping import AGAIN
from tlt_hpc.cluster.submission import Submission, expand_sweep, load, make_members, save, submitit_parameters
from tlt_hpc.config import load_config, to_toml
from tlt_hpc.extras.preflight import checklist, job_checks
from tlt_hpc.extras.preflight.program import run_program
from tlt_hpc.extras.preflight.results import failure
from tlt_hpc.look.run_table import RunRow, as_csv, as_table
from tlt_hpc.storage.records import CurvePoint, DrafterFacts, write_json
from tlt_hpc.storage.step_lines import add_line

PREFLIGHT = submit_module.preflight


def make(folder: Path, points: Sequence[str], config: str = TINY, **asked: str) -> Submission:
    """A submission of the embedded job; ``points`` are swept, and its members are the jobs 100_0, 100_1, .."""
    members = make_members("train", config, config, [], points)
    request = SlurmRequest(submit_module._DEFAULTS | asked)
    submission = Submission(folder / "sub", folder, ROOT, "tiny", config, request, members, 0.0)
    return submission.with_jobs({member.name: f"100_{index}" for index, member in enumerate(members)})


def leave_status(submission: Submission, job: str, text: str, start: int = 0) -> Path:
    """Write the exit status that a job's ranks leave behind."""
    submission.jobs_folder.mkdir(parents=True, exist_ok=True)
    path = submission.jobs_folder / f"{job}-start-{start:03}.status"
    path.write_text(text)
    return path


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def leave_steps(run: Path, steps: range, **more: float) -> None:
    """Write what ``steps`` leave in metrics.jsonl, as far as the tables read it."""
    for step in steps:
        line = {"training/global_step": step + 1, "critic/score/mean": step / 4}
        add_line(made(run) / "metrics.jsonl", line | more)


def leave_finished(run: Path, num_steps: int) -> None:
    write_json(made(run) / "finished.json", {"num_steps": num_steps, "policy_sha256": "ab"})


# --- members ---


def test_a_sweep_is_a_grid_of_named_runs(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Submitted by the clone's script."""
    submit = runpy.run_path(str(ROOT / "jobs" / "submit.py"))["main"]
    files = sorted(cluster.path.rglob("*"))
    sweep = ["--sweep", "run.seed=0,1", "--sweep", "drafter.init=random,embedded:tiny", "--dry-run"]
    assert submit([TINY, "rollout.top_p=0.9", *sweep, "--ranks-per-node", "4", "--nodes", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "asks Slurm for 8 ranks: --nodes=2 --ranks-per-node=4 --cpus-per-rank=1 --time=24:00:00"
    runs = ("seed0-initrandom", "seed0-initembedded_tiny", "seed1-initrandom", "seed1-initembedded_tiny")
    assert [line.partition(":")[0] for line in lines[1:5]] == [f"runs/tiny-{run}" for run in runs]
    assert "rollout.top_p=0.9 run.seed=1 drafter.init=embedded:tiny" in lines[4]
    assert lines[5:] == ["nothing was submitted (--dry-run)"] and sorted(cluster.path.rglob("*")) == files


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('["off", "ngram-4"],["drafter-4"]', ['["off", "ngram-4"]', '["drafter-4"]']),
        ('"a,]",b', ['"a,]"', "b"]),
        ("0, 1", ["0", "1"]),
    ],
)
def test_commas_within_brackets_and_quotes_do_not_separate(text: str, values: list[str]) -> None:
    assert expand_sweep(f"a.b={text}") == [f"a.b={value}" for value in values]


# --- the batch script ---


def test_a_submission_is_read_back_as_it_was(tmp_path: Path) -> None:
    submission = make(tmp_path, ["run.seed=0,1"], nodes="4", qos="long")
    save(submission)
    assert load(submission.folder) == submission


def test_ranks_receive_their_job_file_and_the_command_that_resumes_it(tmp_path: Path) -> None:
    """The batch script's shell reads the job file into the environment, where a rank finds it."""
    config = str(shutil.copy(TINY, tmp_path / "a b.toml"))
    submission = replace(make(tmp_path, ["run.seed=0,1"], config), folder=tmp_path / "my sub")
    shell = [line for line in submitit_parameters(submission)["setup"] if not line.startswith("source ")]
    function = (ROOT / "sbatch" / "env.sh").read_text().partition("read_job() {")[2].partition("\n}")[0]
    program = "\n".join([f"read_job() {{{function}\n}}", "TLT_SRUN_MPI=pmi2", *shell, "env -0"])
    out = subprocess.run(["bash", "-c", program], capture_output=True, check=True, env={}).stdout.decode()
    found = dict(line.partition("=")[::2] for line in out.split("\0"))
    assert found[AGAIN] == f"tlt submit resubmit '{tmp_path}/my sub'", "as it can be typed"
    assert found["SLURM_MPI_TYPE"] == "pmi2" and found["PWD"] == str(tmp_path)
    assert job_text_from_launcher({**found, "PMI_RANK": "0"}, config) == Path(config).read_bytes().rstrip()


@pytest.mark.parametrize(("end", "kept"), [("exit 5", "5\n"), ("exit 0", None), ("kill -TERM $$; sleep 5", None)])
def test_a_job_whose_ranks_leave_no_status_leaves_its_own(end: str, kept: str | None, tmp_path: Path) -> None:
    """But no 0, which bash also reports where a signal ends it, and nothing over what a rank has written."""
    submission = make(tmp_path, ["run.seed=0,1"])
    submission.jobs_folder.mkdir(parents=True)
    setup = [
        line
        for line in submitit_parameters(submission)["setup"]
        if not line.startswith(("source ", "[[ $", "read_job"))
    ]
    place = {"SLURM_ARRAY_JOB_ID": "100", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "101", "SLURM_RESTART_COUNT": "2"}
    script = ["bash", "-c", "\n".join(["TLT_SRUN_MPI=pmi2", *setup, end])]
    environment = {"PATH": os.environ["PATH"], **place}
    subprocess.run(script, check=False, env=environment, timeout=60)
    found = {path.name: path.read_text() for path in submission.jobs_folder.iterdir()}
    assert found == ({} if kept is None else {"100_1-start-002.status": kept})
    leave_status(submission, "100_1", "75\n", start=2)
    subprocess.run(script, check=False, env=environment, timeout=60)
    assert executor.read_status(submission.jobs_folder, "100_1") == 75


def test_slurms_answers_do_not_depend_on_the_users_settings(cluster: Cluster) -> None:
    """SQUEUE_PARTITION would hide jobs; SLURM_TIME_FORMAT, or a name that is no UTF-8, would end a preempted run."""
    cluster.monkeypatch.setenv("SQUEUE_PARTITION", "cpu")
    cluster.monkeypatch.setenv("SLURM_TIME_FORMAT", "%a %H:%M")
    cluster.program("squeue", '[[ -v SQUEUE_PARTITION ]] || echo "5|RUNNING|None"')
    shown = r"JobId=5 JobName=l\344uft PreemptTime=${SLURM_TIME_FORMAT:-2026-11-27T10:00:00}\n"
    cluster.program("scontrol", f'printf "{shown}"')
    assert read_queue()["5"].is_live and Allocation("5", 0).ask_if_preempted()
    assert run_program(["scontrol"], 10).out.startswith("JobId=5 JobName=l\ufffduft")


def test_members_are_an_array_and_those_that_failed_are_submitted_again(cluster: Cluster) -> None:
    arguments = ["--nodes=2", "--gpus-per-node=8", "--partition=gpu", "--folder=sub", "--time=2-00:00:00"]
    told = cluster.submit(TINY, *arguments, "--sweep", "run.seed=0,1,2", "--sbatch=--qos=long")
    text = (cluster.path / "script").read_text()
    assert cluster.asked == {
        *("array=0-2%3", "nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "partition=gpu", "qos=long"),
        *("cpus-per-task=1", "signal=USR2@120", "requeue", "time=2-00:00:00"),
    }
    assert "#SBATCH --open-mode=append\n" in text
    run = next(line for line in text.splitlines() if line.startswith("srun "))
    assert "--kill-on-bad-exit=1 --cpus-per-task=1 --output=all $TLT_CONTAINER python -P -u -m submitit" in run
    assert "job 4321_2: tiny-seed2" in told
    assert [member.jobs for member in load(Path("sub")).members] == [("4321_0",), ("4321_1",), ("4321_2",)]
    assert "has a submission" in cluster.submit(TINY, "--folder", "sub", status=2)
    cluster.queue("4321_1|RUNNING|None")
    leave_status(load(Path("sub")), "4321_0", "0\n")
    cluster.submit("resubmit", "sub")
    assert not any(line.startswith("array") for line in cluster.asked)
    assert [member.jobs for member in load(Path("sub")).members] == [("4321_0",), ("4321_1",), ("4321_2", "4322")]


def test_what_the_options_leave_open_comes_from_a_batch_script(cluster: Cluster) -> None:
    """Its lines for account and partition that nobody has edited count as nothing; options go before it."""
    lines = (ROOT / "sbatch" / "train_qwen7b.sh").read_text().replace("--exclusive", "--constraint=a100")
    script = cluster.path / "job.sh"

    def asked(text: str, *words: str) -> set[str]:
        script.write_text(text)
        job = ["run.ranks=1", "rollout.prompts_per_step=64", "--script=job.sh", "--time=1:00:00", "-p", "gpu"]
        cluster.submit(TINY, *job, f"--folder=sub{len(list(cluster.path.iterdir()))}", *words)
        return cluster.asked

    rest = {"cpus-per-task=8", "mem=0", "time=1:00:00", "partition=gpu", "constraint=a100"}
    rest |= {"signal=USR2@120", "requeue"}
    assert asked(lines) == rest | {"nodes=1", "ntasks-per-node=8", "gpus-per-node=8"}
    other = lines.replace("gpus-per-node=8", "gpus-per-node=a100:4").replace("#SBATCH --ntasks", "# --ntasks")
    assert asked(other) == rest | {"nodes=1", "ntasks-per-node=4", "gpus-per-node=a100:4"}
    other = lines.replace("gpus-per-node=8", "gres=lscratch:200,gpu:a100:8")
    found = asked(other, "--gpus-per-node=2", "--ranks-per-node=4")
    assert {"gres=lscratch:200", "gpus-per-node=2", "ntasks-per-node=4"} <= found


def test_commands_that_are_printed_can_be_typed(cluster: Cluster) -> None:
    """Names with blanks, values with brackets, and what they are relative to."""
    told = cluster.submit(TINY, 'speculation.strategies=["ngram-4"]', "--folder", "my sub")
    assert """ 'speculation.strategies=["ngram-4"]'\n""" in told and "tlt submit status 'my sub'\n" in told
    told = cluster.submit(TINY, "model.path=models/none", status=2)
    assert told.endswith(f" (relative paths are read from {cluster.path})\n"), "the job's file is of another folder"
    (cluster.path / "my run" / "training").mkdir(parents=True)
    assert "see `tlt watch 'my run'`" in cluster.tlt("report", "my run", status=2)


def test_what_is_asked_for_is_not_overruled_by_variables_of_sbatch(cluster: Cluster) -> None:
    """They go before a script's lines, also of what ``--test-only`` is asked about; what is left open they decide."""
    values = {"PARTITION": "cpu", "TIMELIMIT": "1", "ARRAY_INX": "0-99", "NO_REQUEUE": "1", "OUTPUT": "x"}
    values |= {"MEM_PER_CPU": "1G", "GRES": "gpu:8"}  # beside what is asked for by another option
    for name, value in {**values, "ACCOUNT": "mine"}.items():
        cluster.monkeypatch.setenv(f"SBATCH_{name}", value)
    cluster.monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "17")  # as in a job of an array, which submits the next one
    cluster.monkeypatch.setenv("SLURM_RESTART_COUNT", "2")  # after it was queued again
    asked = submitit_parameters(
        make(cluster.path, ["run.seed=0,1"], partition="gpu", mem="64G", **{"gpus-per-node": "4"})
    )
    sent = executor.submit_jobs(cluster.path / "jobs", asked, [["train"], ["train"]], os.environ.copy())
    assert sent == ["4321_0", "4321_1"]
    seen = (cluster.path / "seen").read_text().split("\0")
    assert [line for line in seen if re.match("SBATCH_|SLURM_[AR]", line)] == ["SBATCH_ACCOUNT=mine"]


def test_a_submission_waits_for_another(cluster: Cluster) -> None:
    cluster.queue("4321_0|RUNNING|None", "4321_1|PENDING|Priority", "17|RUNNING|None")
    told = cluster.submit(TINY, "--command=warmup", "--sweep", "run.seed=0,1", "--folder", "first")
    assert "for the runs after it: drafter.init=runs/tiny-seed0-warmup/drafter" in told
    first = load(Path("first")).members[0]
    assert (first.arguments[0], first.run) == ("warmup", "runs/tiny-seed0-warmup")
    assert load(Path("first")).name == "tiny-warmup", "of the job in squeue"
    cluster.submit(TINY, "--after", "first", "--after", "17", "--folder", "second")
    assert "dependency=afterok:4321_0:4321_1:17" in cluster.asked
    cluster.queue("4321_0|RUNNING|None", "4321_1|PENDING|None", "4322|PENDING|DependencyNeverSatisfied")
    assert "blocked: a job before it has failed" in cluster.submit("status", "second", status=1)
    cluster.submit("cancel", "second")
    assert cluster.cancelled == "4322\n"
    cluster.submit("resubmit", "second")
    assert "dependency=afterok:4321_0:4321_1" in cluster.asked, "17 is gone since"
    assert cluster.cancelled == "4322\n"
    cluster.queue("4321_1|PENDING|None")
    leave_status(load(Path("first")), "4321_0", "0\n")
    told = cluster.submit(TINY, "--after", "first", "run.name=b", "--dry-run")
    assert "--dependency=afterok:4321_1\n" in told, "the other has finished"
    cluster.submit("cancel", "first")
    assert cluster.cancelled == "4321_1\n"
    told = cluster.submit(TINY, "--after", "99", "--folder", "third", status=2)
    assert told.startswith("tlt: --after 99: no such job in squeue; ")
    leave_status(load(Path("first")), "4321_1", "1\n")
    cluster.queue()
    told = cluster.submit(TINY, "--after", "first", "--folder", "third", status=2)
    assert told == "tlt: --after first: tiny-seed1-warmup cancelled; resubmit it first\n"


def test_nothing_is_submitted_that_preflight_refuses(cluster: Cluster) -> None:
    """Slurm is asked about the very script that it would get; a drafter may be made by the job before."""
    patch = cluster.monkeypatch
    patch.setattr(submit_module, "preflight", PREFLIGHT)
    patch.setattr(checklist, "CHECKS", {"drafter": job_checks.check_drafter})
    cluster.program("sbatch", "cp $2 tested.sh; echo sbatch: error: no such QOS >&2; exit 1")
    cluster.program("sinfo", "echo 'gpu*|up|1-00:00:00|64000|(null)'")
    cluster.program("scontrol", "echo JobRequeue = 1")
    cluster.queue("100_0|RUNNING|None")
    warmup = make(cluster.path, [])
    save(replace(warmup, members=(replace(warmup.members[0], run="runs/warmup", arguments=("warmup", TINY)),)))
    warmup.folder.rename("warm")

    def refused(*words: str) -> tuple[str, str]:
        out, _, line = cluster.submit(TINY, "--folder=sub", *words, status=2).rpartition("\ntlt: ")
        return out + "\n", line

    given = ["--sbatch=--qos=long", "-p", "gpu"]
    right, wrong = "drafter.init=runs/warmup/drafter", "drafter.init=runs/warm/drafter"
    for after, failures in (([right], 2), ([right, "--after=warm"], 1), ([wrong, "--after=warm"], 2)):
        out, line = refused(*given, *after)
        assert "failure  sbatch       sbatch would refuse the job: sbatch: error: no such QOS" in out
        assert ("failure  drafter" in out) == (failures == 2)
        assert line.startswith(f"nothing was submitted: {failures} failure") and "--no-preflight" not in line
    text = Path("tested.sh").read_text()
    assert "#SBATCH --qos=long\n" in text and "\nsrun " in text and not Path("sub").exists()
    patch.setattr(checklist, "CHECKS", {"disk": lambda job: failure("no room", "make some")})
    patch.setattr(checklist, "SLURM_CHECKS", {})
    remedy = "correct it, or add --no-preflight if it is of this machine alone\n"
    assert refused(*given)[1] == f"nothing was submitted: 1 failure; {remedy}"
    with patch.context() as without:
        without.setitem(sys.modules, "tlt_hpc.extras.preflight", None)
        without.delitem(sys.modules, "tlt_hpc.extras.preflight.checklist")
        line = refused(*given)[1]
        assert line.endswith("; install the whole package (docs/install.md), or add --no-preflight\n")
    cluster.program("sinfo", "echo no controller >&2; exit 1")
    told = cluster.submit(TINY, "--folder=sub", status=2)
    assert "tlt: `sinfo -h -o %P` failed: no controller; call this on a login node" in told


def test_a_run_that_waits_is_not_submitted_again_but_may_be_continued_after_its_job(cluster: Cluster) -> None:
    told = cluster.submit(TINY)
    assert "asks Slurm for 2 ranks: --nodes=1 --ranks-per-node=2" in told, "as run.ranks has it"
    cluster.queue("4321|PENDING|Priority")
    told = cluster.submit(TINY, "--folder=other", status=2)
    assert re.search(
        r"tlt: runs/tiny: job 4321 of runs/submitted/tiny-[\d-]+ is pending; wait for it, add --after 4321, or give "
        r"another run.name\n$",
        told,
    )
    leave_steps(Path("runs/tiny"), range(1))
    cluster.submit(TINY, "run.num_steps=40", "--after=4321", "--folder=other")
    cluster.queue("4321|FAILED|x", "4322|PENDING|DependencyNeverSatisfied")
    told = cluster.submit("status", "other", status=1)
    assert re.findall(r"^submission .*/(\w+)[\d-]*$", told, re.MULTILINE) == ["tiny", "other"]
    first = load(next(Path("runs/submitted").iterdir())).folder
    cluster.submit("resubmit", str(first))  # the other waits for it
    cluster.queue()
    assert "(is there with 1 step, and resumes)" in cluster.submit(TINY, "--folder=third", "--dry-run")


def test_the_steps_of_a_later_submission_are_its_own(cluster: Cluster) -> None:
    """And what it has continued, an earlier one neither shows nor starts again."""

    def reached(name: str) -> str:
        return str(re.findall(r" (\d+)/\d+ ", cluster.submit("collect", f"runs/submitted/{name}"))[0])

    run = Path("runs/tiny")
    cluster.submit(TINY, "run.num_steps=9", "--folder=runs/submitted/b")
    leave_steps(run, range(2))
    cluster.submit(TINY, "run.num_steps=5", "--folder=runs/submitted/a")
    leave_steps(run, range(2, 5))
    assert [reached("b"), reached("a")] == ["2", "5"], "by the step at which the other has started"
    leave_steps(run, range(5, 7))
    assert [reached("b"), reached("a")] == ["2", "5"], "by its own run.num_steps"
    assert cluster.submit("resubmit", "runs/submitted/b", status=2).endswith(
        "tlt: runs/tiny: runs/submitted/a has continued it since; `tlt submit resubmit runs/submitted/a`\n"
    )
    for name, age in (("a", 60), ("b", 0)):  # which copying them may do
        os.utime(Path("runs/submitted") / name / "submission.json", (time.time() - age,) * 2)
    told = cluster.submit("status", status=1)
    assert told.splitlines()[0] == f"submission  {cluster.path}/runs/submitted/a"


def test_a_damaged_submission_stops_no_other(cluster: Cluster) -> None:
    path = made(cluster.path / "runs/submitted/broken") / "submission.json"
    path.write_text('{"batch": {}}')
    warned = f"tlt: left out: {path} is damaged or of an earlier version ("
    assert warned in cluster.submit(TINY, "--folder=runs/submitted/whole")
    told = cluster.submit("status", status=1)
    assert told.startswith(f"submission  {cluster.path}/runs/submitted/whole\n") and warned in told
    told = cluster.submit("status", "runs/submitted/broken", status=2)
    assert told.startswith("tlt: runs/submitted/broken/submission.json is damaged")


def test_a_submission_is_meant_by_its_folder_its_name_or_a_job(cluster: Cluster) -> None:
    cluster.submit(TINY, "--folder=runs/submitted/sweep", "--sweep", "run.seed=0,1")
    cluster.submit(TINY, "--folder=runs/submitted/other")
    cluster.queue("4321_0|RUNNING|x", "4321_1|PENDING|None", "4322|RUNNING|None")

    def told(*words: str, code: int = 0) -> list[str]:
        return cluster.submit(*words, status=code).splitlines()

    first = f"submission  {cluster.path}/runs/submitted/sweep"
    for word in ("runs/submitted/sweep", "sweep", "4321"):
        for command in ("status", "collect", "resubmit"):
            assert told(command, word)[0] == first
    assert [line.split()[0] for line in told("status", "4321_1")[2:]] == ["tiny-seed1"]
    rows = (("runs/submitted/sweep", 2, "1 running, 1 pending"), ("runs/submitted/other", 1, "1 running"))
    assert told("list")[1:] == [
        f"{name:<20}  {time.strftime('%Y-%m-%d %H:%M', time.localtime(load(Path(name)).made))}  {runs:<4}  {states}"
        for name, runs, states in rows
    ]
    assert "--dependency=afterok:4321_0:4321_1" in told(TINY, "run.name=new", "--after=sweep", "--dry-run")[0]
    wait = "tlt: jobs of an earlier submission wait or run; give one of "
    assert told("cancel", code=2) == [f"{wait}runs/submitted/sweep, runs/submitted/other"] and not cluster.cancelled
    assert told("status", "none", code=2) == [
        "tlt: no submission none; there are runs/submitted/sweep, runs/submitted/other (all: tlt submit list)"
    ]
    assert told("cancel", "4321_1") == [first, "cancelled: 4321_1"] and cluster.cancelled == "4321_1\n"
    cluster.queue("4321_0|RUNNING|None")
    assert told("cancel", code=2) == [f"{wait}runs/submitted/sweep"], "not the newest, which one would mean"
    cluster.queue("4322|RUNNING|None")
    assert told("cancel")[-1] == "cancelled: 4322"
    later = load(cluster.path / "runs/submitted/sweep").with_jobs({"tiny-seed0": "5000_0"})
    assert later.member_names_of_job("4321_0") == later.member_names_of_job("5000") == {"tiny-seed0"}, (
        "by the number before, too"
    )
    save(later)
    given = ["tlt: job 4321_0 was submitted again since; give the newest: 5000_0"]
    assert told("cancel", "4321_0", code=2) == given


def test_jobs_of_another_users_submission_are_asked_for(cluster: Cluster) -> None:
    """As where a group shares a clone; squeue names the jobs of the users that it is asked for alone."""
    cluster.failed()
    cluster.monkeypatch.setattr(Submission, "user", 2**32 - 2)
    asked = f"--user={os.geteuid()},{2**32 - 2}"
    cluster.program("squeue", f"[[ $* != *{asked}* ]] || echo '4321|RUNNING|None'")
    assert all("tiny  running" in cluster.submit(command, "sub") for command in ("status", "collect"))
    assert cluster.submit("resubmit", "sub").endswith(
        "nothing has failed; nothing was submitted; 4321 is in the queue: to ask for something else, "
        "`tlt submit cancel sub` first\n"
    )
    assert "job 4321 of sub is running" in cluster.submit(TINY, "--folder=again", status=2)
    cluster.submit(TINY, "--folder=next", "--after=sub")


def test_a_run_whose_job_has_not_begun_is_no_mistake(cluster: Cluster) -> None:
    cluster.submit(TINY, "--folder=runs/submitted/sub")
    waits = "does not exist yet: job 4321 of sub is pending (Resources); it is made once"
    for queue, told in (
        ("echo '4321|PENDING|Resources'", waits),
        ("exit 0", "does not exist; give"),
        ("exit 1", "does not exist; give"),
    ):
        cluster.program("squeue", queue)
        assert cluster.tlt("watch", "--once", "runs/tiny", status=2).startswith(f"tlt: runs/tiny {told}")
    for each in ("a", "b"):
        made(Path("runs") / each / "rollouts")
    assert cluster.tlt("watch", "--once", "a", status=2) == "tlt: a does not exist; runs in runs: a, b\n"


def test_status_shows_what_a_warm_up_has_reached_and_how_often_a_job_was_queued_again(cluster: Cluster) -> None:
    cluster.submit(TINY, "--command=warmup", "--folder=sub")
    cluster.queue("4321|RUNNING|None")
    place = cluster.path / "runs/tiny-warmup"
    for name in ("rollouts", "training", "drafter", "status"):
        made(place / name)
    curve = (CurvePoint(100, 9, 1.0, 0.5, 2.25),)
    facts = DrafterFacts("tiny", "gcd", 4, 9, 100, 2.25, "drafter-5", 1.0, 4, curve)
    write_json(place / "drafter" / "facts.json", asdict(facts))
    for job, shown in (("4321", True), ("4000", False)):
        owner = {"start": "now", "host": "a", "pid": 1, "job": job, "restarts": "2", "ends_at": None}
        write_json(place / "status" / "owner", owner)
        _, head, row = cluster.submit("status", "sub").splitlines()
        assert row.startswith("tiny-warmup  running, accept length 2.250")
        assert ("restarts" in head) == shown and (row.split()[-1] == "2") == shown


def test_a_run_that_has_finished_is_not_submitted_again(cluster: Cluster) -> None:
    """But with more steps, or when it is to be evaluated in another way, it has work to do."""
    place = made(cluster.path / "runs/extra")
    given = [TINY, "run.name=extra", "run.num_steps=3", "--dry-run"]
    (place / "config.toml").write_text(to_toml(load_config(TINY, given[1:3])))
    leave_steps(place, range(3))
    cluster.submit(*given)
    leave_finished(place, 3)
    told = cluster.submit(*given, status=2)
    assert told == "tlt: runs/extra has finished: 3 of 3 steps; raise run.num_steps or give another run.name\n"
    cluster.submit(*given, "run.num_steps=4")
    cluster.submit(*given, "evaluation.every_steps=1")


# --- states ---


def test_the_table_shows_the_state_of_each_member(tmp_path: Path) -> None:
    submission = make(tmp_path, ["run.seed=0,1,2,3,4,5,6,7"])
    submission = replace(submission, members=(*submission.members[:7], replace(submission.members[7], jobs=())))
    leave_status(submission, "100_0", "75\n")
    leave_status(submission, "100_0", "0\n", start=1)
    leave_status(submission, "100_1", "1\n")
    leave_status(submission, "100_2", "75\n")  # of its start before
    leave_status(submission, "100_4", "75\n")
    leave_status(submission, "100_5", "143\n")  # of the batch script, which Slurm has ended
    leave_steps(tmp_path / submission.members[0].run, range(3))
    jobs = submission.jobs_folder
    for job in range(6):
        (jobs / f"100_{job}_0_log.out").touch()
    queue = "100_2|RUNNING|None\n100_3|PENDING|Resources|more\n100_5|TIMEOUT|TimeLimit\n100_6|FAILED|x\n"
    found = status.read_statuses(submission, parse_queue(queue))
    head, *rows = as_table(member_result_rows(submission, found), [str(each.log or "") for each in found]).splitlines()
    assert head.split()[:4] == ["run", "state", "steps", "score"] and head.split()[-1] == "log"
    states = ["failed (status 1)", "running", "pending (Resources|more)", "stopped early", "timeout"]
    assert [" ".join(row.split()) for row in rows] == [
        f"tiny-seed0 finished 3/30 0.000 -> 0.500 {jobs}/100_0_0_log.out",
        *(f"tiny-seed{job} {state} 0/30 {jobs}/100_{job}_0_log.out" for job, state in enumerate(states, start=1)),
        "tiny-seed6 failed (no exit status) 0/30",
        "tiny-seed7 not submitted 0/30",
    ]
    assert status.unfinished_member_names(found) == {f"tiny-seed{index}" for index in (1, 4, 5, 6, 7)}


def test_what_was_cancelled_is_told_from_what_failed_and_from_what_had_finished(tmp_path: Path) -> None:
    """Whatever its exit status, and for long: Slurm forgets a job after minutes."""
    submission = make(tmp_path, ["run.seed=0,1,2,3,4,5"])
    for member, steps in ((0, 30), (1, 29), (3, 30)):
        leave_finished(tmp_path / submission.members[member].run, steps)
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
    leave_status(submission, "100", text)
    leave_status(submission, "1000", "9")  # another job
    assert executor.read_status(submission.jobs_folder, "100") == found
    assert executor.read_status(submission.jobs_folder, "10") is None


def test_what_was_reached_is_collected_and_written_also_without_squeue(cluster: Cluster) -> None:
    submission = make(cluster.path, ["run.seed=0,1,2"])
    save(submission)
    leave_status(submission, "100_0", "0\n")
    cost = {"timing_s/step": 18.0, "perf/total_num_tokens": 500}
    leave_steps(cluster.path / submission.members[0].run, range(4), **cost)
    leave_steps(cluster.path / submission.members[1].run, range(1))
    cluster.program("squeue", "echo down >&2; exit 1")
    *lines, warned = cluster.submit("status", "sub").splitlines()
    assert warned.startswith("tlt: `squeue ") and "failed: down; what follows is" in warned
    states = [line.split("  ")[1].split()[:2] for line in lines[2:]]
    assert states == [["finished"], ["no", "sign"], ["not", "known"]], "nothing is known to have failed"
    cluster.monkeypatch.setenv("PATH", "/nowhere")
    *out, warned = cluster.submit("collect", "sub", "--output", "all.csv").splitlines()
    assert warned.startswith("tlt: there is no squeue on PATH; call this where Slurm's commands are; what follows")
    assert out[0] == f"submission  {submission.folder}" and out[-1] == "written to all.csv"
    assert out[2].split()[:6] == ["tiny-seed0", "finished", "4/30", "0.000", "->", "0.750"]
    head, first, _, third = Path("all.csv").read_text().splitlines()
    assert head == "run,run.seed,state,steps,num_steps,score_first,score_last,tokens,rank-hours,tokens_an_hour"
    assert first.startswith("tiny-seed0,0,finished,4,30,0.0,0.75,") and third.startswith("tiny-seed2,2,not known,")
    for words in (["cancel", "sub"], ["resubmit", "sub"], ["collect"]):  # no submission in runs/submitted
        cluster.submit(*words, status=2)


def test_a_name_cannot_become_a_formula() -> None:
    assert as_csv([RunRow("=HYPERLINK(1)", "finished", 0, None, None, None, None)]).splitlines()[1][:3] == "'=H"


class Canary:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_no_pickle_of_a_folder_is_read(cluster: Cluster) -> None:
    """A folder may be another user's, and unpickling its files would run that user's programs."""
    submission = make(cluster.path, [])
    save(submission)
    executed = cluster.path / "executed"
    for name in ("100_0_0_result.pkl", "100_0_submitted.pkl", "100_0-start-000.status"):
        (submission.jobs_folder / name).write_bytes(pickle.dumps(Canary(executed)))
    for command, code in (("status", 1), ("resubmit", 0)):
        cluster.submit(command, str(submission.folder), status=code)
        assert not executed.exists()
