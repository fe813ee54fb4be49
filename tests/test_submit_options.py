"""Every option of ``tlt submit`` and of its commands: what it does, and that no other is taken.

``EFFECTS`` has an entry for each; a new option without one fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from shell_slurm import DEFAULT, TINY, Cluster, make_cluster

from tlt_hpc.cli import command_line
from tlt_hpc.cli import submit as submit_module
from tlt_hpc.cli.commands import COMMANDS
from tlt_hpc.cluster.submission import load

NAMES = ("submit", "submit list", "submit status", "submit resubmit", "submit collect", "submit cancel")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cluster:
    return make_cluster(tmp_path, monkeypatch, capsys)


@dataclass(frozen=True)
class Asks:
    """An option that changes what Slurm is asked for."""

    value: str
    now: frozenset[str]
    """Lines of the batch script that there are with it alone."""
    before: frozenset[str] = frozenset()
    """Lines that there are without it alone."""

    def __call__(self, cluster: Cluster, command: str, option: str) -> None:
        again = command == "submit resubmit"
        if again:
            cluster.failed()
        words = [option, self.value] if len(option) == 2 else [f"{option}={self.value}"]
        cluster.tlt(*command.split(), *(["sub"] if again else [TINY, "--folder=sub"]), *words)
        asked = cluster.asked
        assert (asked - DEFAULT, DEFAULT - asked) == (self.now, self.before)
        assert len(cluster.checked) == 1 + again, "a changed request is checked before it is submitted"
        cluster.submit("resubmit", "sub")
        assert cluster.asked == asked, "it was recorded"
        assert len(cluster.checked) == 1 + again, "what has not changed was checked before"


def asks(value: str, now: str, before: str = "") -> Asks:
    return Asks(value, frozenset(now.split()), frozenset(before.split()))


def shows_help(cluster: Cluster, command: str, option: str) -> None:
    assert cluster.tlt(*command.split(), option).startswith(f"usage: tlt {command} ")


def makes_members(cluster: Cluster, command: str, option: str) -> None:
    cluster.tlt(command, TINY, option, "run.seed=3,4", "--folder=sub")
    assert cluster.asked - DEFAULT == {"array=0-1%2"}
    assert [member.own for member in load(Path("sub")).members] == [("run.seed=3",), ("run.seed=4",)]


def reads_a_script(cluster: Cluster, command: str, option: str) -> None:
    Path("job.sh").write_text("#SBATCH --ntasks-per-node=4 --qos=long --signal=USR2@120 --wait\n")
    cluster.tlt(command, TINY, option, "job.sh", "--folder=sub")
    assert cluster.asked ^ DEFAULT == {"ntasks-per-node=2", "ntasks-per-node=4", "qos=long"}


def waits_for_a_job(cluster: Cluster, command: str, option: str) -> None:
    Path("queue").write_text("17|RUNNING|None\n")
    cluster.tlt(command, TINY, option, "17", "--folder=sub", "--sbatch=--dependency=singleton")
    assert cluster.asked - DEFAULT == {"dependency=singleton,afterok:17"}


def runs_another_command(cluster: Cluster, command: str, option: str) -> None:
    cluster.tlt(command, TINY, option, "warmup", "--folder=sub")
    assert load(Path("sub")).members[0].arguments[0] == "warmup"


def names_the_folder(cluster: Cluster, command: str, option: str) -> None:
    cluster.tlt(command, TINY, option, "elsewhere")
    assert [path.parent.name for path in Path().rglob("submission.json")] == ["elsewhere"]


def is_given_to_preflight(cluster: Cluster, command: str, option: str) -> None:
    cluster.tlt(command, TINY, option, "24.5", "--folder=sub")
    assert [given[3] for given in cluster.checked] == [24.5]


def leaves_out_preflight(cluster: Cluster, command: str, option: str) -> None:
    if command == "submit":
        cluster.tlt(command, TINY, "--folder=sub", option)
    else:
        cluster.failed()
        cluster.checked.clear()
        cluster.tlt(*command.split(), "sub", "--time=5:00:00", option)
        said = cluster.tlt(*command.split(), "sub", "--ranks-per-node=3", option, status=2)
        assert "not divisible by 3" in said, "the checks of `tlt train --dry-run` are made"
    assert cluster.checked == [] and cluster.asked


def submits_nothing(cluster: Cluster, command: str, option: str) -> None:
    if command == "submit":
        said = cluster.tlt(command, TINY, "--folder=sub", option)
        assert not Path("sub").exists()
    else:
        cluster.failed()
        Path("queue").write_text("4321|PENDING|DependencyNeverSatisfied\n")
        before = Path("sub/submission.json").read_text()
        said = cluster.tlt(*command.split(), "sub", option, "--time=5:00:00")
        assert Path("sub/submission.json").read_text() == before and not cluster.cancelled
        assert "--time=5:00:00" in said and "runs/tiny: tlt train " in said, "what would be submitted"
    assert said.endswith("nothing was submitted (--dry-run)\n") and not cluster.asked
    assert cluster.checked, "it is checked"


def cancels_nothing(cluster: Cluster, command: str, option: str) -> None:
    cluster.failed()
    Path("queue").write_text("4321|RUNNING|None\n")
    assert cluster.tlt(*command.split(), "sub", option).splitlines()[1:] == [
        "would be cancelled: 4321; nothing was (--dry-run)"
    ]
    assert not cluster.cancelled and not list(Path("sub/jobs").glob("*cancel*"))
    cluster.tlt(*command.split(), "sub")
    assert cluster.cancelled == "4321\n"


def writes_a_table(cluster: Cluster, command: str, option: str) -> None:
    cluster.failed()
    cluster.tlt(*command.split(), "sub", option, "all.csv")
    head, row = Path("all.csv").read_text().splitlines()
    assert head.startswith("run,") and row.startswith("tiny,")
    assert "its folder does not exist" in cluster.tlt(*command.split(), "sub", option, "none/all.csv", status=2)


HELP = dict.fromkeys(("-h", "--help"), shows_help)
OF_SLURM: Mapping[str, Callable[[Cluster, str, str], None]] = {
    **dict.fromkeys(("--nodes", "-N"), asks("2", "nodes=2", "nodes=1")),
    "--gpus-per-node": asks("2", "gpus-per-node=2"),
    "--ranks-per-node": asks("4", "ntasks-per-node=4", "ntasks-per-node=2"),
    "--cpus-per-rank": asks("8", "cpus-per-task=8", "cpus-per-task=1"),
    **dict.fromkeys(("--partition", "-p"), asks("gpu", "partition=gpu")),
    **dict.fromkeys(("--account", "-A"), asks("me", "account=me")),
    **dict.fromkeys(("--time", "-t"), asks("4", "time=4 signal=USR2@60", "time=24:00:00 signal=USR2@120")),
    "--mem": asks("64G", "mem=64G"),
    "--sbatch": asks("--qos=long", "qos=long"),
    "--dry-run": submits_nothing,
    "--no-preflight": leaves_out_preflight,
}
EFFECTS: Mapping[str, Mapping[str, Callable[[Cluster, str, str], None]]] = {
    "submit": {
        **HELP,
        **OF_SLURM,
        **dict.fromkeys(("--nodes", "-N"), asks("2", "nodes=2 ntasks-per-node=1", "nodes=1 ntasks-per-node=2")),
        "--sweep": makes_members,
        "--script": reads_a_script,
        "--after": waits_for_a_job,
        "--command": runs_another_command,
        "--folder": names_the_folder,
        "--gpu-memory": is_given_to_preflight,
    },
    "submit list": HELP,
    "submit status": HELP,
    "submit resubmit": {**HELP, **OF_SLURM},
    "submit collect": {**HELP, "--output": writes_a_table},
    "submit cancel": {**HELP, "--dry-run": cancels_nothing},
}


def options_of(command: str) -> set[str]:
    return set(command_line.parser_of(command_line.make_parser(COMMANDS), command).names)


def test_every_option_has_an_entry_here() -> None:
    assert [name for name in COMMANDS if name.startswith("submit")] == list(NAMES) == list(EFFECTS)
    assert {name: options_of(name) for name in NAMES} == {name: set(EFFECTS[name]) for name in NAMES}


@pytest.mark.parametrize(("command", "option"), [(name, option) for name in NAMES for option in EFFECTS[name]])
def test_every_option_has_its_effect(cluster: Cluster, command: str, option: str) -> None:
    EFFECTS[command][option](cluster, command, option)


@pytest.mark.parametrize("command", NAMES)
def test_an_option_of_another_command_is_refused_in_one_line(cluster: Cluster, command: str) -> None:
    cluster.failed()
    Path("queue").write_text("4321|RUNNING|None\n")
    others = {option for name in NAMES for option in EFFECTS[name]} - options_of(command)
    assert others
    for option in sorted(others):
        said = cluster.tlt(*command.split(), "sub", option, "2", status=2)
        assert said.startswith(f"tlt {command}: unknown option {option}") and said.count("\n") == 1
    assert not cluster.asked and not cluster.cancelled
    if command != "submit":
        assert f"tlt {command}: unknown argument b" in cluster.tlt(*command.split(), "a", "b", status=2)
        word = command.split()[1]
        assert f"comes before all options: tlt {command} ..." in cluster.submit("--mem=1", word, status=2)


@pytest.mark.parametrize(
    ("given", "now", "before"),
    [
        (["--sbatch=--cpus-per-task=4"], "cpus-per-task=4", "cpus-per-task=1"),
        (["--sbatch=-t 5:00:00"], "time=5:00:00", "time=24:00:00"),
        (["--sbatch=--no-requeue"], "no-requeue", "requeue"),
        (["--sbatch=--time-min=2"], "time-min=2 signal=USR2@30", "signal=USR2@120"),
        (["--sbatch=--signal=USR2@300"], "signal=USR2@300", "signal=USR2@120"),
        (["--time=UNLIMITED"], "time=UNLIMITED", "time=24:00:00"),
        (["--time=0"], "time=0", "time=24:00:00"),
        (["--time=8"], "time=8", "time=24:00:00"),
        (["--sbatch=-q long", "--sbatch=-Ca100", "--sbatch=exclusive"], "qos=long constraint=a100 exclusive", ""),
        (["--sbatch=--gres=gpu:a100:4"], "gres=gpu:a100:4 ntasks-per-node=4", "ntasks-per-node=2"),
        (["--sbatch=--gpus-per-node=a100:4"], "gpus-per-node=a100:4 ntasks-per-node=4", "ntasks-per-node=2"),
        (["--sbatch=--gres=gpu:4", "--ranks-per-node=2"], "gres=gpu:4", ""),
    ],
)
def test_an_option_is_the_same_by_either_name(cluster: Cluster, given: list[str], now: str, before: str) -> None:
    """srun, the ranks that are checked and the signal follow ``--sbatch``, too."""
    cluster.submit(TINY, "--folder=sub", *given)
    script = Path("script").read_text()
    assert cluster.asked ^ DEFAULT == {*now.split(), *before.split()}
    cores = "4" if "cpus-per-task=4" in now else "1"
    assert f" --cpus-per-task={cores} " in next(line for line in script.splitlines() if line.startswith("srun "))


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
