"""`tlt preflight`: each planted problem is found under its own name, with a remedy, and hides no other check."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from preflight_place import NODES, ROOT, SCRIPT, Place, make_place

from tlt_hpc.cli.main import main, parse
from tlt_hpc.cluster.watch.diagnosis import process_state
from tlt_hpc.config import ConfigError, load_config, to_toml
from tlt_hpc.plan.preflight import job_checks, machine, mpi, request, system_checks
from tlt_hpc.plan.preflight.checklist import CHECKS, SLURM_CHECKS
from tlt_hpc.plan.preflight.program import NoAnswer, ask
from tlt_hpc.plan.preflight.results import Finding

Plant = Callable[[Place], object]
TORCH_BUILD = system_checks.torch_build


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return make_place(tmp_path, monkeypatch)


def test_where_all_is_well_nothing_fails(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.slurm()
    found = place.check()
    assert {name: one.found for name, one in found.items() if one.level == "failure"} == {}
    assert list(found) == ["config", *CHECKS, *SLURM_CHECKS]
    assert not list(place.path.glob("**/.tlt-preflight-*")) and not (place.path / "runs").exists()
    place.command("sbatch", "echo refused >&2; exit 1")
    assert main(place.command_line()) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(found) + 1 and re.search(r", 1 failure in .* the job would fail$", lines[-1])
    assert (
        lines[-2] == "failure  sbatch           sbatch would refuse the job: refused; correct what the script asks for"
    )


# --- planted problems: how, the check that finds it, what it says, other checks that may fail ---


def broken_function(place: Place) -> None:
    file = place.write("mine.py", "import no_such_package\ndef score(**given): return 1.0\n")
    place.set("reward.default=function", f"reward.function={file}:score")


def hanging_function(place: Place) -> None:
    place.monkeypatch.setattr(job_checks, "JUDGE_SECONDS", 1.5)
    file = place.write("mine.py", "import time\ntime.sleep(30)\ndef score(**given): return 1.0\n")
    place.set("reward.default=function", f"reward.function={file}:score")


def changed_run(place: Place) -> None:
    run = place.path / "runs" / "tiny"
    run.mkdir(parents=True)
    overrides = ["rollout.temperature=0.5", *place.base()]
    (run / "config.toml").write_text(to_toml(load_config(ROOT / "jobs" / "tiny.toml", overrides)))


def small_disk(place: Place) -> None:
    values = [*os.statvfs(place.path)]
    values[3] = values[4] = 10
    place.monkeypatch.setattr(system_checks.os, "statvfs", lambda path: os.statvfs_result(values))


def quota(numbers: str) -> Plant:
    return lambda place: place.prints("quota", f" {machine.mount_of(place.path).source} {numbers}\n", 1)


def no_mpi(place: Place) -> None:
    place.monkeypatch.setattr(mpi, "ask", ask)
    place.monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")


def launcher(script: str, seconds: float) -> Plant:
    """An mpiexec of another library that starts single ranks, or one that hangs."""

    def plant(place: Place) -> None:
        file = place.command("mpiexec", script)
        place.monkeypatch.setattr(mpi, "ask", lambda command, most, env=None: ask(command, min(most, seconds), env))
        place.monkeypatch.setattr(mpi, "find_mpiexec", lambda: str(file))

    return plant


def old_package(place: Place) -> None:
    version = metadata.version
    place.monkeypatch.setattr(metadata, "version", lambda name: "4.9.0" if name == "transformers" else version(name))


PLANTED: list[tuple[str, Plant, str, str, set[str]]] = [
    ("unknown key", lambda p: p.set("rollout.temprature=0.5"), "config",
     r"unknown key 'rollout.temprature'.*did you mean 'rollout.temperature'", set()),
    ("no model", lambda p: shutil.rmtree(p.model), "model", r"no config.json.*--model-id", set()),
    ("short weights", lambda p: os.truncate(p.model / "model.safetensors", 100_000), "model",
     r"model.safetensors is no whole safetensors file.*download it again", set()),
    ("no data", lambda p: p.data.unlink(), "data", r"data.jsonl' does not exist.*give a .jsonl", set()),
    ("broken row", lambda p: p.data.write_text(p.data.read_text() + '{"prompt": 3, "answer": "1"}\n'), "data",
     r"data.jsonl:41.*prompt", set()),
    ("broken function", broken_function, "rewards", r"no_such_package", set()),
    ("hanging function", hanging_function, "rewards", r"not ready after 1.5 s.*see what reward.function", set()),
    ("no drafter", lambda p: p.set(f"drafter.init={p.path / 'nowhere'}"), "drafter", r"drafter.init = .*nowhere",
     set()),
    ("changed run", changed_run, "run", r"holds a run with rollout.temperature = 0.5, now 1.0.*another run.name",
     set()),
    ("odd ranks", lambda p: p.set("run.ranks=3"), "ranks", r"not divisible by 3 ranks.*use 15", set()),
    ("small GPUs", lambda p: (p.set("model.device=cuda", "--gpu-memory", "0.1"), p.torch_for("12.8")), "memory",
     r"Does not fit.*3.71 GB more than the 100 MB of each GPU.*rollout.max_live", set()),
    ("small disk", small_disk, "disk", r"0.0 MB free of .*, the run writes .*make room", set()),
    ("small quota", quota("1000* 900 1000 6days 17 0 0 0"), "disk", r"0.0 MB free of your user's quota on .*make room",
     set()),
    ("few files", quota("1000 0 0 0 999 0 1000 0"), "disk", r"1 more files fit on your user's quota.*makes about",
     set()),
    # where root cannot write either
    ("read-only folder", lambda p: p.set("run.folder=/sys/tlt"), "run folder", r"/sys .*not permitted.*set run.folder",
     {"disk"}),
    ("no MPI", no_mpi, "mpi", r"mpi4py does not load: .*libmpi.so.*load your site's MPI module", {"ranks talk"}),
    ("another mpiexec", launcher('shift 2; exec "$@"', 60), "ranks talk",
     r"2 ranks do not talk: MPI sees 1 rank where TLT_RANKS=2.*try by hand: .*mpiexec", set()),
    ("hanging ranks", launcher("sleep 30 & wait", 2), "ranks talk", r"gave no answer in 2 s.*try by hand", {"mpi"}),
    ("old package", old_package, "packages", r"transformers 4.9.0 is not >=5.23.*pip install", set()),
    ("torch for CPUs", lambda p: p.set("model.device=cuda"), "torch",
     r"is a build for CPUs, and the job runs on GPUs.*install torch's CUDA build", set()),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "name", "said", "also"), [one[1:] for one in PLANTED],
                         ids=[one[0] for one in PLANTED])  # fmt: skip
def test_a_planted_problem_is_found_and_hides_no_other(
    place: Place, plant: Plant, name: str, said: str, also: set[str]
) -> None:
    plant(place)
    found = place.check()
    assert_found(found, name, said, also)
    assert list(found) == ["config", *CHECKS, "slurm"]


def test_an_existing_run_is_resumed_unless_a_start_of_it_is_at_work(place: Place) -> None:
    run = place.path / "runs" / "tiny"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(load_config(ROOT / "jobs" / "tiny.toml", place.base())))
    assert place.check()["run"].found == f"{run} is there, and will be resumed"
    place.monkeypatch.setattr(job_checks, "find_at_work", lambda status: f"job 17, {status.name}")
    assert_found(place.check(), "run", r"a start of this run is at work there \(job 17, status\)", set(), "warning")


@pytest.mark.ci
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a user namespace in which none may be made: needs root")
def test_a_system_that_refuses_the_sandbox_is_found(place: Place) -> None:
    """In a process of its own, since what it is forbidden it can never have again."""
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
    place.set("reward.default=code")
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", sys.executable, "-m", "tlt_hpc",
         *place.command_line()],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    said = r"failure  rewards .*this machine allows none: unshare\(.*No space left.*have user namespaces allowed.*"
    assert done.returncode == 1 and re.search(said, done.stdout), done.stderr
    assert "the sandbox works on this machine" in place.check()["rewards"].found


def assert_found(found: dict[str, Finding], name: str, said: str, also: set[str], level: str = "failure") -> None:
    one = found[name]
    assert one.level == level and one.remedy, one
    assert re.search(said, f"{one.found}; {one.remedy}"), one
    others = {other for other, finding in found.items() if finding.level == "failure"} - {name}
    assert others <= also, {other: found[other].found for other in others}
    assert all("\n" not in finding.found + finding.remedy for finding in found.values())


def test_the_python_that_the_job_will_find_is_named(place: Place) -> None:
    """Found by the real sbatch/env.sh, as in the job."""
    place.slurm()
    place.monkeypatch.setattr(system_checks, "_ENVIRONMENT", ROOT / "sbatch" / "env.sh")
    folder = place.path / "gpu"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "activate").write_text(f'PATH="{folder}/bin:$PATH"\necho activated\n')
    program = folder / "bin" / "python"
    program.write_text(f"#!/bin/sh\ncase $2 in *mpi4py*) echo Open MPI v5.0.8;; *) echo {folder};; esac\n")
    program.chmod(0o755)
    place.monkeypatch.setenv("TLT_ENVIRONMENT", str(folder))
    assert_found(
        place.check(), "python", f"finds the Python of {folder}; preflight runs in .*activate", set(), "warning"
    )
    place.monkeypatch.setenv("TLT_ENVIRONMENT", "/none")
    said = "the job would find no Python: sbatch/env.sh: TLT_ENVIRONMENT=/none is"
    assert_found(place.check(), "python", said, set())


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    assert TORCH_BUILD() == (torch.__version__, torch.version.cuda or "")


def test_what_could_not_be_checked_says_why(place: Place) -> None:
    shutil.rmtree(place.model)
    found = place.check()
    assert (found["data"].level, found["data"].found) == ("skipped", f"there is no model in {place.model}")
    for name in ("memory", "disk"):
        assert (found[name].level, found[name].found) == ("skipped", f"the sizes of {place.model} are not known")


# --- Slurm's limits ---


MIXED = "main*|up|infinite|256000|gpu:a100:4(S:0-1)\nmain*|up|infinite|256000|gpu:h100:4"


def gpu_job(asked: str, nodes: str = MIXED) -> Plant:
    """A job on GPUs, of a Slurm with nodes of two kinds."""

    def plant(place: Place) -> None:
        place.slurm(nodes=nodes, script=SCRIPT.replace("-N2", asked))
        place.torch_for("12.8")

    return plant


def changed(old: str, new: str) -> Plant:
    return lambda place: place.slurm(script=SCRIPT.replace(old, new))


SLURM_PLANTED: list[tuple[str, Plant, str, str, str]] = [
    ("no such partition", changed("=main", "=gpu"), "partition", "failure", r"no partition gpu is up.*sinfo"),
    ("partition down", lambda p: p.slurm(NODES.replace("|up|", "|drain|")), "partition", "failure", r"main is up"),
    ("no Slurm", lambda p: (p.slurm(script=SCRIPT.replace("16G", "0")), p.command("sinfo", "echo refused >&2; exit 1")),
     "partition", "failure", r"refused"),
    ("time over the limit", lambda p: p.slurm(NODES.replace("1-00", "04")), "partition", "failure",
     r"10:00:00 .*'main' at most 04:00:00"),
    ("no time", changed("--time", "--mail-user"), "partition", "warning", r"give --time"),
    ("no GPUs asked for", lambda p: (p.slurm(), p.set("model.device=cuda"), p.torch_for("12.8")), "gpus", "failure",
     r"--gpus-per-node"),
    ("a placeholder", changed("science", "YOUR_ACCOUNT"), "sbatch", "failure", r"still says YOUR_ACCOUNT.*edit"),
    ("srun without pmi2", lambda p: p.slurm(kinds="MPI plugin types are...\n\tpmix\n\tnone\n"), "mpi", "failure",
     r"srun knows no --mpi=pmi2, only none, pmix"),
    ("srun for another MPI", lambda p: (p.slurm(), p.monkeypatch.setenv("TLT_SRUN_MPI", "pmix")), "mpi", "failure",
     r"--mpi=pmix does not start MPICH.*TLT_SRUN_MPI=pmi2"),
    ("sbatch refuses", lambda p: (p.slurm(), p.prints("sbatch", "sbatch: error: Batch job submission failed", 1)),
     "sbatch", "failure", r"would refuse the job: sbatch: error: Batch job"),
    ("GPUs of two kinds", gpu_job("-N2 --gres=gpu:4"), "gpus", "failure",
     r"nodes with a100 or h100, and all its nodes must have the same GPUs.*KIND:COUNT"),
    ("GPUs that have no name", gpu_job("-N2 --gpus-per-node=4", MIXED.replace("gpu:h100:4", "gpu:4")), "gpus",
     "failure", r"nodes with GPUs without a name or a100,"),
    ("requeue off", lambda p: p.slurm(script=SCRIPT.replace("#SBATCH --requeue\n", ""), requeue=0), "requeue",
     "warning", r"requeue is off \(JobRequeue = 0.*add #SBATCH --requeue"),
    ("no requeue", changed("--requeue", "--no-requeue"), "requeue", "warning", r"says --no-requeue"),
    ("no signal", changed("USR2@120", "USR1@120"), "requeue", "warning", r"no USR2.*--signal=USR2@120"),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "name", "level", "said"), [one[1:] for one in SLURM_PLANTED],
                         ids=[one[0] for one in SLURM_PLANTED])  # fmt: skip
def test_what_slurm_does_not_allow_is_found(place: Place, plant: Plant, name: str, level: str, said: str) -> None:
    plant(place)
    found = place.check()
    assert_found(found, name, said, {"gpus"} if "refused" in said else set(), level)
    assert list(found) == ["config", *CHECKS, *SLURM_CHECKS]


@pytest.mark.parametrize(
    "plant",
    [
        gpu_job("-N2 --gres=gpu:h100:4"),
        gpu_job("-N2 -C h100 --gpus-per-node=4"),
        gpu_job("-N1 --gpus-per-node=4"),
        lambda p: p.slurm(f"{NODES}\nshort|up|1:00:00|256000|(null)", script=SCRIPT.replace("=main", "=short,main")),
    ],
    ids=["one kind of two", "a feature says which", "two kinds for one node", "one partition of a list"],
)
def test_what_slurm_does_allow_is_no_failure(place: Place, plant: Plant) -> None:
    plant(place)
    assert {name: one.found for name, one in place.check().items() if one.level == "failure"} == {}


# --- the rest of the command ---


def test_all_mistakes_of_a_configuration_are_named(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.set("rollout.temprature=0.5", "model.dtype=float64", "optimizer.learning_rate=-1")
    assert main(place.command_line()) == 1
    lines = [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("failure  config")]
    assert lines == ["model.dtype", "unknown", "optimizer.learning_rate"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.toml"], "config file nowhere.toml: No such file"),
        (["jobs/tiny.toml", "--model-id", "a/b"], "says nothing without --fix"),
        (["jobs/tiny.toml", "--account", "a"], "--account=a without --script"),
        (["jobs/tiny.toml", "--script", "nowhere.sh"], "--script nowhere.sh: .*No such file.*give one such as"),
    ],
)
def test_a_mistake_in_the_command_is_one_line_and_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["preflight", *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error) and error.count("\n") == 1


def test_fix_fetches_the_model(place: Place) -> None:
    kept = place.path / "kept"
    shutil.move(place.model, kept)
    asked = []

    def fetch(model_id: str, folder: Path) -> None:
        asked.append(model_id)
        shutil.copytree(kept, folder)

    place.monkeypatch.setattr(job_checks, "fetch", fetch)
    place.set("--fix", "--model-id", "Someone/Tiny")
    found = place.check()
    assert found["model"].level == "ok" and asked == ["Someone/Tiny"]
    assert found["fix model"].found == f"fetched Someone/Tiny to {place.model}"
    assert place.check()["fix model"].found.endswith("is there") and len(asked) == 1


def test_what_fix_could_not_do_is_said_and_the_checks_continue(place: Place) -> None:
    shutil.rmtree(place.model)

    def fetch(model_id: str, folder: Path) -> None:
        raise OSError("no route\nmore")

    place.monkeypatch.setattr(job_checks, "fetch", fetch)
    place.set("--fix", "--model-id", "Someone/Tiny")
    assert_found(place.check(), "fix model", r"could not fetch 'Someone/Tiny': .*no route", {"model"})


def test_a_script_is_read_as_sbatch_reads_it(place: Place) -> None:
    place.slurm()
    options = Namespace(nodes=None, partition=None, account=None, time=None, script=place.path / "job.sh")
    found = request.make_request(options, {})
    assert (found.nodes, found.ranks_per_node, found.partition, found.account) == (2, 1, "main", "science")
    assert (found.time, found.memory_mb, found.signal, found.requeue) == ("10:00:00", 16384, "USR2@120", True)
    found = request.make_request(options, {"SBATCH_PARTITION": "other", "SBATCH_ACCOUNT": "mine"})
    assert (found.partition, found.account) == ("other", "mine")
    options.nodes, options.account = 3, "given"
    found = request.make_request(options, {"SBATCH_ACCOUNT": "mine"})
    assert (found.nodes, found.account) == (3, "given")


def test_sbatch_is_asked_about_the_script_itself(place: Place) -> None:
    """With the options that the user will give sbatch, and no other."""
    place.slurm(script=SCRIPT.replace("-N2", "-N2 --exclusive --constraint=a100 --reservation=mine --gres=gpu:a100:2"))
    place.command("sbatch", f'printf "%s\\n" "$@" >{place.path}/asked; echo sbatch: Job 1 to start at once')
    place.set("--account", "other", "--time", "5:00", "--nodes", "1")
    assert place.check()["sbatch"].level == "ok"
    expected = ["--test-only", "--nodes=1", "--account=other", "--time=5:00", str(place.path / "job.sh")]
    assert (place.path / "asked").read_text().splitlines() == expected


@pytest.mark.parametrize(
    ("asked", "read"),
    [
        ("--ntasks-per-node=2 --gpus-per-node=a100:4 --mem=7G", (4, "a100", 2, 7168)),
        ("--gpus-per-node=a100:4 --gres=gpu:h100:2", (4, "a100", 4, 0)),
        ("--gres=craynetwork:1,gpu,lscratch:200 -N 2-4 --mem=100", (1, "", 1, 100)),
    ],
)
def test_gpus_memory_and_ranks_of_a_node_are_read(asked: str, read: tuple[object, ...]) -> None:
    found = request.request_of(shlex.split(asked))
    assert (found.gpus_per_node, found.gpu_kind, found.ranks_per_node, found.memory_mb) == read


@pytest.mark.parametrize("asked", ["-n 8", "-G 8", "--gpus-per-task=1", "--mem-per-cpu=1G", "--mem-per-gpu=1G"])
def test_options_by_another_measure_than_the_node_are_refused(asked: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^the script asks for --(ntasks|gpus|mem).*; preflight reads --(ntasks-per|gpus-per|mem)"
    ):
        request.request_of(shlex.split(asked))


def test_the_recipe_of_the_first_run_asks_for_what_its_script_leaves_open() -> None:
    """As printed, with a user's own account and partition in the place of the capitals."""
    recipe = (ROOT / "docs" / "cluster.md").read_text().split("## The first run", 1)[1].split("```")[1]
    lines = recipe.replace("\\\n", " ").splitlines()
    command = next(line for line in lines if line.startswith("tlt preflight"))
    options = parse(shlex.split(command, comments=True)[1:])
    options.script = ROOT / options.script
    found = request.make_request(options, {})
    assert (found.partition, found.account) == ("PARTITION", "ACCOUNT")


def test_gpus_are_counted_in_generic_resources() -> None:
    texts = {"gpu:a100:4(S:0-1)": 4, "gpu:8": 8, "(null)": 0, "gpu:a100:2,gpu:v100:1": 3, "nvme:1,gpu:h100:8(S:0)": 8,
             "gpu_memory:80": 0, "gpu:1g.10gb:7(S:0,1)": 7}  # fmt: skip
    assert {text: sum(count for _, count in request.gpu_resources(text)) for text in texts} == texts


@pytest.mark.parametrize(
    ("kind", "level", "said"),
    [("tmpfs", "warning", "in memory"), ("ext4", "warning", "mostly of one machine"), ("lustre", "ok", "(lustre)")],
)
def test_the_kind_of_file_system_is_judged(place: Place, kind: str, level: str, said: str) -> None:
    place.slurm()
    place.monkeypatch.setattr(machine, "mount_of", lambda path: machine.Mount("/", kind, "x"))
    one = place.check()["run folder"]
    assert one.level == level and said in one.found


def test_the_quotas_on_lustre_are_asked_for_and_the_smallest_counts(place: Place) -> None:
    place.monkeypatch.setattr(machine, "mount_of", lambda path: machine.Mount("/scratch", "lustre", "mds:/scratch"))
    place.prints("lfs", "/scratch 100 0 2000000 - 17 0 1000000 -\n")
    one = place.check()["disk"]
    assert one.level == "warning" and one.found.startswith("2.0 GB free of your user's quota on /scratch")
    none, some = "/scratch 100 0 0 - 17 0 0 -", "/scratch 100 0 101 - 17 0 0 -"
    place.command("lfs", f"case $* in *'-g '*) echo '{some}';; *) echo '{none}';; esac")
    one = place.check()["disk"]
    assert one.level == "failure" and one.found.startswith("0.0 MB free of your group's quota on /scratch")


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 600 & echo $! > {pid}; sleep 600"]
    for seconds in (0.5, 5.0, 50.0):  # until the child was there
        with pytest.raises(NoAnswer, match=rf"gave no answer in {seconds:g} s; try by hand"):
            ask(command, seconds)
        if pid.exists() and pid.read_text():
            break
    child, end = int(pid.read_text()), time.monotonic() + 60
    while process_state(child) not in ("", "Z"):
        assert time.monotonic() < end, "it outlives the command"
        time.sleep(0.01)
