"""Batch scripts: the environment of the ranks, and a whole job on a real Slurm."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from launch_ranks import ROOT
from shell_slurm import program

from tlt_hpc.storage.step_lines import read_lines

SAYS_MPI = 'echo "$0" >>"$CALLED"; echo "${MPI_SAYS:-Open MPI v5.0.8, package: site}"'
LISTS_MPI = '[[ $1 != --mpi=list ]] || { echo "MPI plugin types are..."; echo "${SRUN_HAS-none pmix}"; exit; }'
SHOWN = "^(HF|HDF5|OMP|MKL|PMI|DS|TRITON|(PY)?TORCH|CUDA|TRANSF|PYTHONNO|SLURM_(EXP|STEP|MEM|GPU|TRES|CPU_B)|APPT|SING)"


def run_script(folder: Path, name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a batch script with a fake ``srun``, ``mpirun`` and ``python`` that record their arguments."""
    record = f'printf "%s\\n" "$@" && pwd && env | grep -E "{SHOWN}" | sort'
    program(folder / "bin" / "srun", f"{LISTS_MPI}; {record}")
    for launcher in ("mpirun", "mpiexec"):
        program(folder / "bin" / launcher, f"echo {launcher}; {record}")
    if not (folder / "bin" / "python").exists():
        program(folder / "bin" / "python", SAYS_MPI)
    environment = {
        "PATH": f"{folder / 'bin'}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(folder / "clone"),
        "SLURM_CPUS_PER_TASK": "12", "SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_ID": "7",
        "DS_BUILD_OPS": "0", "CALLED": str(folder / "called"), **variables,
    }  # fmt: skip
    if not (folder / "clone" / "sbatch").exists():
        shutil.copytree(ROOT / "sbatch", folder / "clone" / "sbatch")
    command = ["bash", str(ROOT / "sbatch" / f"{name}.sh"), *arguments]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def test_every_rank_gets_its_command_and_its_environment(tmp_path):
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


MPICH, NO_PMIX = {"MPI_SAYS": "MPICH Version:      5.0.2\nMPICH ABI: 1"}, {"SRUN_HAS": "none pmi2"}
INHERITED = {
    "SLURM_EXPORT_ENV": "NONE", "SLURM_STEP_ID": "0", "SLURM_MEM_PER_CPU": "100", "SLURM_GPUS_PER_NODE": "a100:1",
    "SLURM_TRES_PER_TASK": "gres/gpu:1", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_MEM_PER_NODE": "3000",
}  # fmt: skip
"""Variables that sbatch inherits from an interactive job or from ``--export=NONE``."""
LOGIN_NODE = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT", "PMI_RANK", "PMIX_RANK"), "1")
"""Variables of a login node's profile, or of a shell that srun has started, where sbatch is called."""


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        # caches are on a local disk that every node has
        ({"TMPDIR": "/scratch/of/the/login/node"}, "HF_HOME=/tmp/tlt-"),
        ({"TMPDIR": "/local/job.7"}, "HF_HOME=/local/job.7/tlt-"),
        ({"SLURM_TMPDIR": "/local/slurm"}, "HF_HOME=/local/slurm/tlt-"),
        ({"SLURM_TMPDIR": "/local/slurm", "TLT_LOCAL_DISK": "/nvme"}, "HF_HOME=/nvme/tlt-"),
        # the MPI library decides how srun starts ranks, unless the user does
        (MPICH, "--mpi=pmi2\n"),
        ({"TLT_SRUN_MPI": "mine"}, "--mpi=mine\n"),
        ({**NO_PMIX, "TLT_SRUN_MPI": "pmi2"}, "--mpi=pmi2\n"),
        ({**NO_PMIX, **MPICH}, "--mpi=pmi2\n"),
        ({"SRUN_HAS": ""}, "--mpi=pmix\n"),  # an empty list says nothing
        ({"TLT_LAUNCH": "mpirun", **NO_PMIX}, "mpirun\n-n\n16\n--map-by\nppr:8:node\n--bind-to\nnone\npython\n"),
        ({"TLT_LAUNCH": "mpirun", **MPICH}, "mpiexec\n-n\n16\n-ppn\n8\npython\n"),
        ({"TLT_CPU_BIND": "mask_cpu:0xf0,0xf"}, "--cpu-bind=mask_cpu:0xf0,0xf\n"),
        # a rank has a thread for each core, whatever the login node has
        (LOGIN_NODE, "OMP_NUM_THREADS=12\n"),
        ({**LOGIN_NODE, "TLT_THREADS": "6"}, "OMP_NUM_THREADS=6\n"),
        ({**LOGIN_NODE, "SLURM_CPUS_PER_TASK": "1"}, "OMP_NUM_THREADS=1\n"),
        (INHERITED, "--mpi=pmix\n"),
    ],
)
def test_what_a_site_or_a_user_sets(variables, shown, tmp_path):
    done = run_script(tmp_path, "smoke", **variables)
    assert done.returncode == 0 and f"\n{shown}" in done.stdout, done.stderr
    inherited = ("OMP_THREAD", "MKL", "PMI", "SLURM_")  # a step that requests nothing has all that its own job has
    assert [line for line in done.stdout.splitlines() if line.startswith(inherited)] == []
    assert done.stdout.count("\nOMP_NUM_THREADS") == 1


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            NO_PMIX,
            "srun --mpi=list has none pmi2. Put 'mpich<5' in the place of openmpi in environment.yml, or set TLT",
        ),
        ({"TLT_NETWORK": "IB"}, "TLT_NETWORK=IB is no longer read; set NCCL_NET=IB"),
        ({"TLT_LAUNCH": "ssh"}, "TLT_LAUNCH=ssh is neither srun nor mpirun"),
        ({"TLT_ENVIRONMENT": "/none"}, "TLT_ENVIRONMENT=/none is neither"),
        ({"MPI_SAYS": "Other MPI 1"}, "cannot tell how srun starts ranks of Other MPI 1; set TLT_SRUN_MPI to one of"),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy(variables, message, tmp_path):
    done = run_script(tmp_path, "smoke", **variables)
    assert done.returncode == 1 and done.stdout == "" and message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("script", "arguments"), [("warmup_drafter", ()), ("evaluate", ("runs/a",)), ("rehearse", ())])
def test_a_job_file_of_the_clone_is_found_where_the_store_is_elsewhere(script, arguments, tmp_path):
    store, job = tmp_path / "a store", tmp_path / "clone" / "jobs" / "mine.toml"
    store.mkdir()
    job.parent.mkdir(parents=True)
    job.touch()
    edited = (ROOT / "sbatch" / f"{script}.sh").read_text().replace('STORE="$PROJECT"', f'STORE="{store}"')
    (tmp_path / "edited.sh").write_text(edited)
    program(tmp_path / "bin" / "python", f'[[ $2 == -c ]] || printf "%s\\n" "$@"; {SAYS_MPI}')

    def found() -> list[str]:
        words = run_script(tmp_path, f"{tmp_path}/edited", *arguments, "jobs/mine.toml", "run.seed=3").stdout
        return words.splitlines()[1:]

    assert (words := found())[words.index(str(job)) + 1] == "run.seed=3"
    (store / "jobs").mkdir()
    (store / "jobs" / "mine.toml").touch()
    assert "jobs/mine.toml" in found() and str(job) not in found()


def test_a_run_is_evaluated_by_its_own_configuration_if_none_is_given(tmp_path):
    run = tmp_path / "clone" / "runs" / "a=b"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("[run]")
    for overrides in ((), ("evaluation.samples=32",), ("--step", "20")):
        words = run_script(tmp_path, "evaluate", "runs/a=b", *overrides).stdout.splitlines()
        at = words.index("evaluate")
        assert words[at + 1 :][: 2 + len(overrides)] == ["runs/a=b", "runs/a=b/config.toml", *overrides]


def test_a_user_without_a_name_on_the_node_has_caches(tmp_path):
    program(tmp_path / "bin" / "id", "echo 1234; echo 'id: cannot find name for user ID 1234' >&2; exit 1")
    done = run_script(tmp_path, "smoke")
    assert done.returncode == 0 and not done.stderr and "\nHF_HOME=/tmp/tlt-1234-7-0/huggingface\n" in done.stdout


def test_all_scripts_start_their_ranks_alike():
    """What ``run_ranks`` gives srun, none forgets; smoke_gpu.sh and rehearse.sh leave that to what they start."""
    scripts = {path.name: path.read_text() for path in (ROOT / "sbatch").glob("*.sh")}
    for script in scripts.keys() - {"env.sh", "smoke_gpu.sh", "rehearse.sh"}:
        text = scripts[script]
        assert text.count("\nrun_ranks python -P -m mpi4py -m tlt_hpc ") == 1 and "srun" not in text, script


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
def test_an_active_environment_precedes_the_demo_one(variables, used, tmp_path):
    """`make demo` leaves a .venv without CUDA in the clone."""
    places = {"conda": tmp_path / "of/conda", "venv": tmp_path / "of/venv", "clone": tmp_path / "clone/.venv"}
    for place in places.values():
        program(place / "bin" / "python", SAYS_MPI)
        (place / "bin" / "activate").write_text(f'PATH="{place}/bin:$PATH"\n: "$NOT_SET"\n')
    filled = {name: value.format(**places, path=f"{tmp_path}/bin:/usr/bin:/bin") for name, value in variables.items()}
    done = run_script(tmp_path, "smoke", **filled)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "called").read_text().splitlines()[-1] == f"{places[used]}/bin/python"


def test_an_error_names_the_places_that_have_been_searched(tmp_path):
    program(tmp_path / "bin" / "python", "echo 'No module named mpi4py' >&2; exit 1")
    done = run_script(tmp_path, "smoke")
    assert done.returncode == 1
    for words in ("No module named mpi4py", f"{tmp_path}/clone/.venv", "conda environment tlt_hpc", "on the path"):
        assert words in done.stderr


def test_a_container_provides_python_to_the_script_and_the_ranks(tmp_path):
    """The host has no usable Python; a fake ``apptainer`` provides one."""
    program(tmp_path / "bin" / "python", "echo 'the host has no mpi4py' >&2; exit 1")
    inside = tmp_path / "inside"
    program(inside / "python", SAYS_MPI)
    for shell in ("sh", "bash"):
        (inside / shell).symlink_to(f"/bin/{shell}")
    enter = f'while [[ $1 != *.sif ]]; do shift; done; shift; PATH="{inside}"; exec "$@"'
    program(tmp_path / "bin" / "apptainer", enter)
    container = "apptainer exec --nv /shared/tlt.sif"
    done = run_script(tmp_path, "smoke", TLT_CONTAINER=container, TLT_ENVIRONMENT="/none", TLT_LOCAL_DISK="/nvme")
    assert done.returncode == 0, done.stderr
    assert "\n".join(["", *container.split(), "python", "-P", "-m", "mpi4py", ""]) in done.stdout
    assert f"\nAPPTAINER_BIND={tmp_path}/clone,/nvme\n" in done.stdout
    assert "no squeue and scontrol in the container" in done.stderr
    program(inside / "python", "exit 1")
    done = run_script(tmp_path, "smoke", TLT_CONTAINER=container)
    assert f"{container} python: mpi4py and its MPI library do not load in it" in done.stderr


# --- a real Slurm ---


@pytest.mark.slurm
@pytest.mark.mpi
def test_the_smoke_script_trains_on_two_nodes(slurm, tmp_path):
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
