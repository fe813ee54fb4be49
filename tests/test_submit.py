"""jobs/submit.py: members, what waits for what, the scripts that Slurm gets, states and results."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import pickle
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tlt_hpc.cluster import executor, status
from tlt_hpc.cluster.batch import Batch, Folders, render
from tlt_hpc.cluster.collect import collect, results_table, write_results
from tlt_hpc.cluster.local import given_job
from tlt_hpc.cluster.slurm import QueuedJob, parse_queue
from tlt_hpc.cluster.submission import WARMUP_SUFFIX, Key, Submission, Task, load, make_tasks, save, send_all
from tlt_hpc.cluster.sweep import grid, make_members, read_list, split_values
from tlt_hpc.cluster.time_limit import AGAIN, LINKS_LEFT
from tlt_hpc.config import ConfigError, UserError, load_config
from tlt_hpc.storage.step_lines import add_line
from tlt_hpc.studies.warmup import plan as warmup_plan

ROOT = Path(__file__).resolve().parent.parent
TINY = str(ROOT / "jobs" / "tiny.toml")


@pytest.fixture
def submit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The script's main, called in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return runpy.run_path(str(ROOT / "jobs" / "submit.py"))["main"]


# --- members ---


def test_a_sweep_is_a_grid_of_named_runs(submit: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sweep = ["--sweep", "run.seed=0,1", "--sweep", "drafter.init=random,embedded:tiny", "--dry-run"]
    assert submit([TINY, "rollout.top_p=0.9", *sweep, "--ranks-per-node", "4", "--nodes", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:4]] == [
        "train    runs/tiny-seed0-initrandom",
        "train    runs/tiny-seed0-initembedded_tiny",
        "train    runs/tiny-seed1-initrandom",
        "train    runs/tiny-seed1-initembedded_tiny",
    ]
    assert "rollout.top_p=0.9 run.seed=1 drafter.init=embedded:tiny" in lines[3]
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=4", "#SBATCH --array=0-3%4"} <= set(lines)
    assert list(tmp_path.iterdir()) == []


def test_a_list_has_a_member_for_each_line(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text(
        "run.seed=1  # one\n\n# none\nrun.seed=2 optimizer.learning_rate=1e-4\nrun.seed=3 run.name='mine'\n"
    )
    members = make_members(TINY, ["run.num_steps=2"], read_list(path))
    assert [member.name for member in members] == ["tiny-seed1", "tiny-seed2-learning_rate1e-4", "mine"]
    assert [member.config.run.seed for member in members] == [1, 2, 3]
    assert members[1].own == ("run.seed=2", "optimizer.learning_rate=1e-4")


@pytest.mark.parametrize("text", ["", "# nothing\n", "run.seed='1\n"])
def test_a_list_that_names_no_run_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "list").write_text(text)
    with pytest.raises(ConfigError, match=r"^--list .* on each line"):
        read_list(tmp_path / "list")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2", ["1", "2"]),
        ('["off", "ngram-4"],["drafter-4"]', ['["off", "ngram-4"]', '["drafter-4"]']),
        ("{a = [1,2]},x", ["{a = [1,2]}", "x"]),
        ('"a,]",b', ['"a,]"', "b"]),
        ("1,,2", ["1", "", "2"]),
    ],
)
def test_commas_within_brackets_part_nothing(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_any_key_can_be_swept() -> None:
    points = grid(['speculation.strategies=["ngram-4"],["drafter-2", "drafter-4"]', "algorithm.name=grpo,rloo"])
    members = make_members(TINY, [], points)
    assert [member.config.speculation.strategies for member in members] == [("ngram-4",)] * 2 + [
        ("drafter-2", "drafter-4")
    ] * 2
    assert members[3].name == "tiny-strategies_drafter-2_drafter-4-namerloo"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sweep", "run.seed=0,x"], "run.seed = 'x'"),
        (["--sweep", "run.seed=0,0"], "two members have run.name = 'tiny-seed0'"),
        (["--sweep", "run.seed="], "section.key=A,B"),
        (["--sweep", "run.seed=1", "--list", "x"], "give one of them"),
        (["--sweep", "rollout.prompts_per_step=16,15", "--ranks-per-node", "4"], "not divisible by 4"),
        (["--sweep", "model.path=embedded:tiny,models/none"], "models/none"),
        (["rollout.temprature=1"], "did you mean"),
        (["--warmup", "speculation.mode=plain"], "no member has a learned drafter"),
        (["--nodes", "0"], "0 nodes"),
        (["--at-once", "0"], "--at-once 0"),
        (["--chain", "0"], "--chain 0"),
        (["--time", "soon"], "time 'soon'"),
        (["--sbatch=qos=long"], "is no option of sbatch"),
    ],
)
def test_nothing_is_submitted_where_one_member_is_wrong(
    arguments: list[str], words: str, submit: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert submit([TINY, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("submit: ")
    assert err.count("\n") == 1
    assert words in err
    assert list(tmp_path.iterdir()) == []


# --- what waits for what ---


def make(folder: Path, points: Sequence[str], **options: Any) -> Submission:
    """A submission of the embedded job; ``points`` are swept."""
    warmup, evaluate = options.pop("warmup", False), options.pop("evaluate", False)
    tasks = make_tasks(make_members(TINY, [], grid(points)), TINY, "tiny", warmup=warmup, evaluate=evaluate)
    batch = Batch("tiny", "", Folders(str(ROOT), str(folder)), nodes=4, time="10")
    return Submission(folder / "sub", folder, batch, tasks, **{"at_once": 8, **options})


def sent(submission: Submission, chosen: set[Key] | None = None) -> tuple[list[tuple[Batch, list[Key]]], Submission]:
    """What would be sent, in order, and the submission with the numbers 100, 200, .. of its jobs."""
    calls: list[tuple[Batch, list[Key]]] = []

    def send(batch: Batch, tasks: Sequence[Task]) -> list[str]:
        calls.append((batch, [task.key for task in tasks]))
        return [f"{len(calls)}00" + f"_{task.index}" * (batch.array is not None) for task in tasks]

    every = {task.key for task in submission.tasks}
    *_, last = send_all(submission, every if chosen is None else chosen, send)
    return calls, last


def test_members_that_warm_up_alike_share_a_warm_up(tmp_path: Path) -> None:
    submission = make(tmp_path, ["run.seed=0,1"], warmup=True, evaluate=True)
    warmup, *trainings = [*submission.of_stage("warmup"), *submission.of_stage("train")]
    assert warmup.run == f"runs/tiny{WARMUP_SUFFIX}"
    assert [task.arguments[-1] for task in trainings] == ["drafter.init=runs/tiny-warmup/drafter"] * 2
    assert WARMUP_SUFFIX == warmup_plan.SUFFIX
    assert warmup_plan.config_of(load_config(TINY, warmup.arguments[2:])).folder == Path(warmup.run)
    calls, after = sent(submission)
    assert [(batch.dependency, str(batch.array), batch.nodes) for batch, _ in calls] == [
        ("", "None", 1),
        ("afterok:100", "0-1%2", 4),
        ("aftercorr:200", "0-1%2", 1),
    ]
    assert [task.jobs for task in after.tasks] == [("100",), ("200_0",), ("200_1",), ("300_0",), ("300_1",)]


def test_members_that_warm_up_otherwise_wait_for_their_own(tmp_path: Path) -> None:
    points = ["drafter.form=eagle,eagle3", "speculation.mode=full,plain"]
    submission = make(tmp_path, points, warmup=True, evaluate=True, at_once=4)
    assert [task.run for task in submission.of_stage("warmup")] == [
        "runs/tiny-formeagle-modefull-warmup",
        "runs/tiny-formeagle3-modefull-warmup",
    ]
    calls, _ = sent(submission)
    assert [(batch.dependency, str(batch.array)) for batch, _ in calls] == [
        ("", "0-1%2"),
        ("afterok:100_0", "0%1"),
        ("", "1,3%1"),
        ("afterok:100_1", "2%1"),
        ("aftercorr:200", "0%1"),
        ("aftercorr:300", "1,3%1"),
        ("aftercorr:400", "2%1"),
    ]


def test_more_groups_than_may_run_at_once_take_turns(tmp_path: Path) -> None:
    points = ["drafter.form=eagle,eagle3", "speculation.mode=full,plain"]
    calls, _ = sent(make(tmp_path, points, warmup=True, evaluate=True, at_once=1))
    assert [(batch.dependency, str(batch.array)) for batch, _ in calls] == [
        ("", "0-1%1"),
        ("afterok:100_0", "0%1"),
        ("afterany:200", "1,3%1"),
        ("afterok:100_1,afterany:300", "2%1"),
        ("aftercorr:200", "0%1"),
        ("aftercorr:300,afterany:500", "1,3%1"),
        ("aftercorr:400,afterany:600", "2%1"),
    ]


def test_a_chain_goes_on_whatever_became_of_the_job_before(tmp_path: Path) -> None:
    calls, after = sent(make(tmp_path, ["run.seed=0,1"], chain=3, evaluate=True))
    assert [batch.dependency for batch, _ in calls] == ["", "afterany:100", "afterany:200", "aftercorr:300"]
    assert [batch.requeue for batch, _ in calls] == [False, False, False, True]
    assert after.tasks[1].jobs == ("100_1", "200_1", "300_1")
    said = [[line for line in batch.before if LINKS_LEFT in line] for batch, _ in calls]
    assert said == [[f"export {LINKS_LEFT}=2"], [f"export {LINKS_LEFT}=1"], [f"export {LINKS_LEFT}=0"], []]


def test_the_ranks_of_a_job_are_given_their_job_file_and_how_it_goes_on(tmp_path: Path) -> None:
    """A job file that all tasks of an array share, as the batch script's shell reads it and a rank finds it."""
    (tmp_path / "a b.toml").write_text(Path(TINY).read_text())
    config = str(tmp_path / "a b.toml")
    tasks = make_tasks(make_members(config, [], grid(["run.seed=0,1"])), config, "tiny", warmup=True, evaluate=True)
    submission = dataclasses.replace(make(tmp_path, []), tasks=tasks, folder=tmp_path / "my sub")
    for batch, keys in sent(submission)[0]:
        lines = executor.script(batch, submission.jobs_folder).splitlines()
        shell = [line for line in lines if line.startswith(("PROJECT=", "export TLT_", "read_job "))]
        function = (ROOT / "sbatch" / "env.sh").read_text().partition("read_job() {")[2].partition("\n}")[0]
        program = "\n".join([f"read_job() {{{function}\n}}", *shell, "env -0"])
        out = subprocess.run(["bash", "-c", program], capture_output=True, check=True, env={}).stdout.decode()
        found = dict(line.partition("=")[::2] for line in out.split("\0"))
        assert found[AGAIN] == f"python {ROOT}/jobs/submit.py resubmit {tmp_path}/my sub"
        given = given_job({**found, "PMI_RANK": "0"}, config)
        shared = keys[0][0] != "evaluate"  # there each task has its own run's
        assert given == (Path(config).read_bytes().rstrip() if shared else None)


def test_one_run_is_no_array(tmp_path: Path) -> None:
    calls, after = sent(make(tmp_path, [], evaluate=True))
    assert [(batch.array, batch.dependency) for batch, _ in calls] == [(None, ""), (None, "afterok:100")]
    assert [task.jobs for task in after.tasks] == [("100",), ("200",)]


def test_submitted_again_a_task_keeps_its_index_and_waits_for_what_is_submitted_too(tmp_path: Path) -> None:
    submission = make(tmp_path, ["run.seed=0,1,2,3"], evaluate=True)
    chosen: set[Key] = {("train", 2), ("evaluate", 1), ("evaluate", 2)}
    calls, _ = sent(submission, chosen)
    assert [(batch.dependency, str(batch.array), keys) for batch, keys in calls] == [
        ("", "2%1", [("train", 2)]),
        ("", "1%1", [("evaluate", 1)]),
        ("aftercorr:100", "2%1", [("evaluate", 2)]),
    ]


def test_a_submission_is_read_back_as_it_was(tmp_path: Path) -> None:
    submission = sent(make(tmp_path, ["run.seed=0,1"], warmup=True, chain=2))[1]
    submission = dataclasses.replace(submission, batch=dataclasses.replace(submission.batch, options=("--qos=long",)))
    save(submission)
    assert load(submission.folder) == submission
    (submission.folder / "submission.json").write_text('{"batch": {}}')
    with pytest.raises(ConfigError, match="is damaged"):
        load(submission.folder)
    with pytest.raises(ConfigError, match=r"give the folder that submit\.py has named"):
        load(tmp_path)


# --- what Slurm gets ---


def fake_program(folder: Path, name: str, body: str) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def fake_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str) -> None:
    for name, body in (("srun", "true"), ("sbatch", sbatch)):
        fake_program(folder, name, body)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin")


def test_an_array_is_the_text_of_the_batch_scripts(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_slurm(tmp_path, monkeypatch, f"cp $1 {tmp_path}/submitted.sh; echo Submitted batch job 4321")
    arguments = ["--nodes", "2", "--gpus-per-node", "8", "--partition", "gpu", "--at-once", "2", "--folder", "sub"]
    assert submit([TINY, *arguments, "--sweep", "run.seed=0,1,2", "--sbatch=--qos=long"]) == 0
    submission = load(tmp_path / "sub")
    batch = sent(submission)[0][0][0]
    text = (tmp_path / "submitted.sh").read_text()
    assert text == executor.script(batch, tmp_path / "sub" / "jobs")
    command = f"python -u -m tlt_hpc.cluster.executor {tmp_path}/sub/jobs"
    bare = render(dataclasses.replace(batch, command=command)).splitlines()
    assert [line for line in text.splitlines() if line not in bare] == [
        "export SUBMITIT_EXECUTOR=slurm SUBMITIT_LOG_LEVEL=WARNING",
        f'kept={tmp_path}/sub/jobs/"${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}"',
        'rm -f "$kept"_*_status.txt "$kept.status"',
        "trap 'echo $? >\"$kept.status\"' EXIT",
    ]
    for line in ("array=0-2%2", "nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "partition=gpu", "qos=long"):
        assert f"#SBATCH --{line}\n" in text
    assert "job 4321_2: train tiny-seed2" in capsys.readouterr().out
    assert [task.jobs for task in submission.tasks] == [("4321_0",), ("4321_1",), ("4321_2",)]
    assert submit([TINY, "--folder", "sub"]) == 2
    assert "has a submission" in capsys.readouterr().err


def test_what_sbatch_refuses_is_one_line(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_slurm(tmp_path, monkeypatch, "echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1")
    assert submit([TINY, "--folder", "sub"]) == 2
    assert capsys.readouterr().err == (
        "submit: sbatch refused tiny-train: sbatch: error: invalid partition specified: nope\n"
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    assert submit([TINY, "--folder", "other"]) == 2
    assert "no Slurm here; call it on the cluster, or give --local" in capsys.readouterr().err


# --- states ---


def leave_status(submission: Submission, job: str, *statuses: int) -> None:
    """What a job's ranks leave behind."""
    submission.jobs_folder.mkdir(parents=True, exist_ok=True)
    for rank, value in enumerate(statuses):
        executor.status_file(submission.jobs_folder, job, rank).write_text(f"{value}\n")


def states(submission: Submission, queue: str) -> list[status.TaskStatus]:
    return status.read_status(
        submission, parse_queue(queue), lambda job: executor.read_status(submission.jobs_folder, job)
    )


def test_the_table_tells_how_each_member_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    submission = sent(make(tmp_path, ["run.seed=0,1,2,3,4,5,6"]))[1]
    leave_status(submission, "100_0", 0, 0)
    leave_status(submission, "100_1", 0, 1)
    leave_status(submission, "100_4", 75)
    (submission.jobs_folder / "100_0_0_log.out").write_text("nodes node[1-2]: x\nnodes node[3-4]: x\n")
    (submission.jobs_folder / "100_1_0_log.out").write_text("tlt: no such data\nsrun: error: task 0\n")
    run = tmp_path / submission.tasks[0].run
    run.mkdir(parents=True)
    for step in range(3):
        add_line(run / "metrics.jsonl", {"training/global_step": step, "critic/rewards/mean": step / 4})
    queue = "100_2|RUNNING|node2|None\n100_3|PENDING||Resources\n100_5|TIMEOUT|node1|TimeLimit\n100_6|FAILED|node7|x\n"
    found = states(submission, queue)
    head, *rows = status.status_table(found).splitlines()
    assert head.split() == ["member", "stage", "state", "step", "reward", "node", "log"]
    assert {row[head.index("log") - 1] for row in rows} == {" "}
    assert [row.split() for row in rows] == [
        ["tiny-seed0", "train", "finished", "3", "0.500", "node[3-4]", "sub/jobs/100_0_0_log.out"],
        ["tiny-seed1", "train", "failed", "(status", "1)", "0", "sub/jobs/100_1_0_log.out"],
        ["tiny-seed2", "train", "running", "0", "node2", "sub/jobs/100_2_0_log.out"],
        ["tiny-seed3", "train", "pending", "(Resources)", "0", "sub/jobs/100_3_0_log.out"],
        ["tiny-seed4", "train", "stopped", "early", "0", "sub/jobs/100_4_0_log.out"],
        ["tiny-seed5", "train", "timeout", "0", "node1", "sub/jobs/100_5_0_log.out"],
        ["tiny-seed6", "train", "failed", "(it", "was", "killed)", "0", "node7", "sub/jobs/100_6_0_log.out"],
    ]
    assert status.unfinished(found) == {("train", index) for index in (1, 4, 5, 6)}
    assert [status.last_words(each) for each in found[:3]] == ["", "tlt: no such data", ""]


@pytest.mark.parametrize(
    ("left", "queue", "state", "is_live"),
    [
        ({}, "100|RUNNING|n|None\n200|PENDING||Dependency", "running", True),
        ({"100": 75}, "200|PENDING||Dependency", "pending (Dependency)", True),
        ({"100": 75}, "200|RUNNING|n|None", "running", True),
        ({"100": 75, "200": 0}, "", "finished", False),
        ({"100": 0}, "200|PENDING||Dependency", "finished", False),
        ({"100": 2, "200": 75}, "", "stopped early", False),
        # requeued: what its first start left counts no more while it waits and runs
        ({"100": 75, "200": 75}, "200|PENDING||BeginTime", "pending (BeginTime)", True),
    ],
)
def test_of_a_chain_the_job_that_tells_most_counts(
    left: dict[str, int], queue: str, state: str, is_live: bool, tmp_path: Path
) -> None:
    submission = sent(make(tmp_path, [], chain=2))[1]
    for job, value in left.items():
        leave_status(submission, job, value)
    (found,) = states(submission, queue)
    assert (found.state, found.is_live) == (state, is_live)


def test_a_job_that_slurm_has_forgotten_and_that_left_nothing_was_killed(tmp_path: Path) -> None:
    submission = sent(make(tmp_path, []))[1]
    assert states(submission, "")[0].state == "failed (it was killed)"
    assert states(make(tmp_path, []), "")[0].state == "not submitted"
    assert QueuedJob("NODE_FAIL", "", "").is_live is False


@pytest.mark.parametrize(
    ("ranks", "kept", "status_left"),
    [([0, 0], "0\n", 0), ([75], "137\n", 75), ([], "2\n", 2), ([0], "1\n", 1), ([], "", None), ([0, 0], "", 0)],
)
def test_the_ranks_own_status_goes_before_the_scripts(
    ranks: list[int], kept: str, status_left: int | None, tmp_path: Path
) -> None:
    submission = sent(make(tmp_path, []))[1]
    leave_status(submission, "100", *ranks)
    (submission.jobs_folder / "100.status").write_text(kept)
    leave_status(submission, "1000", 9)  # another job
    assert executor.read_status(submission.jobs_folder, "100") == status_left


class Canary:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("command", ["status", "resubmit", "collect"])
def test_no_pickle_of_a_folder_is_read(
    command: str, submit: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder may be another user's, and whoever unpickles its files runs that user's programs."""
    fake_slurm(tmp_path, monkeypatch, "echo Submitted batch job 4321")
    fake_program(tmp_path, "squeue", "exit 0")
    submission = sent(make(tmp_path, []))[1]
    save(submission)
    executed = tmp_path / "executed"
    for name in ("100_0_result.pkl", "100_submitted.pkl", "100_0_status.txt", "100.status"):
        (submission.jobs_folder / name).write_bytes(pickle.dumps(Canary(executed)))
    assert submit([command, str(submission.folder)]) == (0 if command == "resubmit" else 1)
    assert not executed.exists()


@pytest.mark.parametrize("text", ["", "\n", "x", "0 0", "\x80", "9" * 5000])
def test_a_status_that_is_no_number_counts_as_a_failure(text: str, tmp_path: Path) -> None:
    submission = sent(make(tmp_path, []))[1]
    leave_status(submission, "100", 0)
    executor.status_file(submission.jobs_folder, "100", 1).write_text(text)
    assert executor.read_status(submission.jobs_folder, "100") == 1


def test_a_status_that_is_no_file_is_named(tmp_path: Path) -> None:
    submission = sent(make(tmp_path, []))[1]
    submission.jobs_folder.mkdir(parents=True)
    place = executor.status_file(submission.jobs_folder, "100", 0)
    os.mkfifo(place)
    with pytest.raises(UserError, match="it is a FIFO, not a regular file"):
        executor.read_status(submission.jobs_folder, "100")


# --- results ---


def test_results_are_one_table_and_two_files(tmp_path: Path) -> None:
    submission = sent(make(tmp_path, ["run.seed=0,1", "optimizer.learning_rate=1e-4"]))[1]
    leave_status(submission, "100_0", 0)
    run = tmp_path / submission.tasks[0].run
    run.mkdir(parents=True)
    for step in range(12):
        line = {"critic/rewards/mean": float(step), "timing_s/step": 2.0, "perf/throughput": 100.0 + step}
        add_line(run / "metrics.jsonl", {"training/global_step": step, **line})
    (run / "evaluations.jsonl").write_text('{"val-core/x/acc/greedy": 0.1}\n{"val-core/x/acc/greedy": 0.5, "n": 1}\n')
    rows = collect(submission, states(submission, "100_1|RUNNING|n|None"))
    assert rows[0] == {
        "member": "tiny-seed0-learning_rate1e-4",
        "run.seed": "0",
        "optimizer.learning_rate": "1e-4",
        "state": "finished",
        "steps": 12,
        "reward, last 10": 6.5,
        "length": None,
        "accept length": None,
        "tokens/s": 105.5,
        "s/step": 2.0,
        "val-core/x/acc/greedy": 0.5,
    }
    assert (rows[1]["state"], rows[1]["steps"], rows[1]["val-core/x/acc/greedy"]) == ("running", 0, None)
    as_csv, as_json = write_results(tmp_path, rows)
    assert json.loads(as_json.read_text()) == rows
    assert next(csv.DictReader(as_csv.open()))["reward, last 10"] == "6.5"
    assert results_table(rows).splitlines()[0].split()[:3] == ["member", "run.seed", "optimizer.learning_rate"]
    (run / "evaluations.jsonl").write_text("{")
    with pytest.raises(UserError, match=r"evaluations\.jsonl is damaged"):
        collect(submission, states(submission, ""))


# --- on this machine ---


def test_locally_a_failed_task_takes_along_those_that_need_it_alone(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """submitit's real processes, and in place of the runs a program that fails for one of them."""

    def run(arguments: Sequence[str]) -> int:  # pickled by value, since it is no module's
        print("ran", *arguments)
        return 3 if arguments[0] == "train" and "run.seed=0" in arguments and not Path("mended").exists() else 0

    monkeypatch.setattr(executor, "run_here", run)
    assert submit([TINY, "--local", "--evaluate", "--sweep", "run.seed=0,1", "--folder", "sub"]) == 3
    assert submit(["status", "sub"]) == 1
    out = capsys.readouterr().out
    assert "train tiny-seed0: ended with status 3" in out
    assert "evaluate tiny-seed1: ended with status 0" in out
    assert "tiny-seed0  evaluate  not submitted" in out
    (tmp_path / "mended").touch()
    assert submit(["resubmit", "sub"]) == 0
    out = capsys.readouterr().out
    assert "tiny-seed1" not in out
    assert "evaluate tiny-seed0: ended with status 0" in out
    assert submit(["resubmit", "sub"]) == 0
    assert "nothing has failed" in capsys.readouterr().out
    log = load(tmp_path / "sub").jobs_folder / f"{load(tmp_path / 'sub').tasks[0].jobs[-1]}_0_log.out"
    assert log.read_text().startswith("ran train ")
