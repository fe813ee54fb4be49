"""The options of ``tlt submit`` and of its commands: what each does, and that no other is taken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from shell_slurm import DEFAULT, TINY, Cluster

from tlt_hpc.cli import submit as submit_module

SUBMIT = [
    ("--nodes=2", "nodes=2 ntasks-per-node=1", "nodes=1 ntasks-per-node=2"),
    ("-N 2", "nodes=2 ntasks-per-node=1", "nodes=1 ntasks-per-node=2"),
    ("--sbatch=--gres=gpu:a100:4", "gres=gpu:a100:4 ntasks-per-node=4", "ntasks-per-node=2"),
    ("--sbatch=--gpus-per-node=a100:4", "gpus-per-node=a100:4 ntasks-per-node=4", "ntasks-per-node=2"),
]
RESUBMIT = [("--nodes=2", "nodes=2", "nodes=1")]
BOTH = [
    ("--gpus-per-node=2", "gpus-per-node=2", ""),
    ("--ranks-per-node=4", "ntasks-per-node=4", "ntasks-per-node=2"),
    ("--cpus-per-rank=8", "cpus-per-task=8", "cpus-per-task=1"),
    ("--sbatch=--cpus-per-task=8", "cpus-per-task=8", "cpus-per-task=1"),
    ("-p gpu -A me", "partition=gpu account=me", ""),
    ("--partition=gpu --account=me", "partition=gpu account=me", ""),
    ("-t 4", "time=4 signal=USR2@60", "time=24:00:00 signal=USR2@120"),
    ("--time=8", "time=8", "time=24:00:00"),
    ("--time=0", "time=0", "time=24:00:00"),
    ("--time=UNLIMITED", "time=UNLIMITED", "time=24:00:00"),
    ("--sbatch=-t5:00:00", "time=5:00:00", "time=24:00:00"),
    ("--mem=64G", "mem=64G", ""),
    ("--sbatch=--no-requeue", "no-requeue", "requeue"),
    ("--sbatch=--time-min=2", "time-min=2 signal=USR2@30", "signal=USR2@120"),
    ("--sbatch=--signal=USR2@300", "signal=USR2@300", "signal=USR2@120"),
    ("--sbatch=-qlong --sbatch=-C=a100 --sbatch=exclusive", "qos=long constraint=a100 exclusive", ""),
    ("--sbatch=--gres=gpu:4 --ranks-per-node=2", "gres=gpu:4", ""),
]
"""Options, lines of the batch script that there are with them alone, and those that there are without them alone."""


@pytest.mark.parametrize(
    ("command", "options", "now", "before"),
    [("submit", *row) for row in SUBMIT + BOTH] + [("resubmit", *row) for row in RESUBMIT + BOTH],
)
def test_options_change_what_slurm_is_asked_for(
    cluster: Cluster, command: str, options: str, now: str, before: str
) -> None:
    """srun, the ranks that are checked and the signal follow ``--sbatch``, too."""
    again = command == "resubmit"
    if again:
        cluster.failed()
    cluster.submit(*(["resubmit", "sub"] if again else [TINY, "--folder=sub"]), *options.split())
    srun = next(line for line in Path("script").read_text().splitlines() if line.startswith("srun "))
    assert f" --cpus-per-task={8 if '=8' in now and 'cpus' in now else 1} " in srun
    asked = cluster.asked
    assert (asked - DEFAULT, DEFAULT - asked) == ({*now.split()}, {*before.split()})
    assert len(cluster.checked) == 1 + again, "a changed request is checked before it is submitted"
    cluster.submit("resubmit", "sub")
    assert cluster.asked == asked, "it was recorded"
    assert len(cluster.checked) == 1 + again, "what has not changed was checked before"


def test_a_script_and_a_dependency_are_joined_with_what_is_given(cluster: Cluster) -> None:
    Path("job.sh").write_text("#SBATCH --ntasks-per-node=4 --qos=long --signal=USR2@120 --wait\n")
    cluster.submit(TINY, "--script=job.sh", "--folder=sub", "--gpu-memory=24.5")
    assert cluster.asked ^ DEFAULT == {"ntasks-per-node=2", "ntasks-per-node=4", "qos=long"}
    assert [given[3] for given in cluster.checked] == [24.5]
    cluster.queue("17|RUNNING|None")
    cluster.submit(TINY, "--after=17", "--folder=next", "--sbatch=--dependency=singleton", "run.name=other")
    assert cluster.asked - DEFAULT == {"dependency=singleton,afterok:17"}


def test_no_preflight_leaves_the_checks_of_a_dry_run(cluster: Cluster) -> None:
    cluster.submit(TINY, "--folder=sub", "--no-preflight")
    cluster.submit("resubmit", "sub", "--time=5:00:00", "--no-preflight")
    assert cluster.checked == [] and cluster.asked
    told = cluster.submit("resubmit", "sub", "--ranks-per-node=3", "--no-preflight", status=2)
    assert "not divisible by 3" in told


def test_a_dry_run_submits_and_cancels_nothing(cluster: Cluster) -> None:
    nothing = "nothing was submitted (--dry-run)\n"
    assert cluster.submit(TINY, "--folder=sub", "--dry-run").endswith(nothing)
    assert cluster.checked and not cluster.asked and not Path("sub").exists()
    cluster.failed()
    cluster.queue("4321|PENDING|DependencyNeverSatisfied")
    before = Path("sub/submission.json").read_text()
    told = cluster.submit("resubmit", "sub", "--dry-run", "--time=5:00:00")
    assert told.endswith(nothing) and "--time=5:00:00" in told and "runs/tiny: tlt train " in told
    assert len(cluster.checked) == 3 and not cluster.asked
    assert cluster.submit("cancel", "sub", "--dry-run").endswith("would be cancelled: 4321; nothing was (--dry-run)\n")
    assert Path("sub/submission.json").read_text() == before and not cluster.cancelled
    assert not list(Path("sub/jobs").glob("*cancel*"))
    cluster.submit("cancel", "sub")
    assert cluster.cancelled == "4321\n"


@pytest.mark.parametrize("command", ["list", "status", "collect", "cancel", "resubmit"])
def test_an_option_of_another_command_is_refused_in_one_line(cluster: Cluster, command: str) -> None:
    cluster.failed()
    cluster.queue("4321|RUNNING|None")
    for option in ("--sweep", "--script", "--folder", *(["--mem", "--time"] if command != "resubmit" else [])):
        told = cluster.submit(command, "sub", option, "2", status=2)
        assert told.startswith(f"tlt submit {command}: unknown option {option}") and told.count("\n") == 1
    assert f"tlt submit {command}: unknown argument b" in cluster.submit(command, "a", "b", status=2)
    assert f"comes before all options: tlt submit {command} ..." in cluster.submit("--mem=1", command, status=2)
    assert not cluster.asked and not cluster.cancelled


def test_gpus_that_are_typed_replace_those_of_a_script(cluster: Cluster) -> None:
    Path("job.sh").write_text("#SBATCH --ntasks-per-node=4 --gpus-per-node=4 --gres=disk:1\n")
    cluster.submit(TINY, "--folder=sub", "--script=job.sh", "--sbatch=--gres=gpu:2")
    assert cluster.asked ^ DEFAULT == {"gres=gpu:2"}
    cluster.submit("resubmit", "sub", "--gpus-per-node=4")
    assert cluster.asked ^ DEFAULT == {"gpus-per-node=4", "ntasks-per-node=2", "ntasks-per-node=4"}


def test_a_job_inherits_what_the_user_has_set_and_nothing_that_this_program_sets(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread on a login node is one thread of eight in the job."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    given = dict(os.environ)

    def check(*others: object) -> None:
        assert os.environ["OMP_NUM_THREADS"] == "1"
        os.environ |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}  # as libraries do

    monkeypatch.setattr(submit_module, "preflight", check)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # is restored after the test
    monkeypatch.delenv("HF_HUB_OFFLINE")
    cluster.submit(TINY, "--folder=sub")
    seen = dict(line.split("=", 1) for line in (cluster.path / "seen").read_text().split("\0") if line)
    own = {"_", "SHLVL", "PWD", "OLDPWD", "SBATCH_TIMELIMIT", "COLUMNS", "LINES"}  # the shell's; readline's, of pytest
    kept = {name: value for name, value in given.items() if name not in own}
    assert {name: value for name, value in seen.items() if name not in own} == kept
    assert "SBATCH_TIMELIMIT" not in seen
    assert os.environ["DS_ACCELERATOR"] == "cpu", "for what this process still does"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    cluster.submit("resubmit", "sub")
    assert "\0OMP_NUM_THREADS=3\0" in (cluster.path / "seen").read_text(), "the batch script decides about it"
