"""The wheel, installed where there is no clone: the demo, its jobs, its batch scripts and its model come with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tlt_hpc.cli.init_folder import PATTERNS
from tlt_hpc.cli.main import main

ROOT = Path(__file__).resolve().parent.parent


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shipped_files() -> dict[str, bytes]:
    return {str(path.relative_to(ROOT)): path.read_bytes() for pattern in PATTERNS for path in ROOT.glob(pattern)}


def test_init_copies_the_jobs_and_scripts_of_the_clone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "a b")]) == 0
    found = files_in(tmp_path / "a b")
    assert found == shipped_files()
    in_folders = [path for name in ("jobs", "sbatch") for path in (ROOT / name).iterdir() if path.is_file()]
    assert {str(path.relative_to(ROOT)) for path in in_folders} <= set(found), "a file that no pattern takes"
    out = capsys.readouterr().out
    assert f"next: cd '{tmp_path / 'a b'}' && tlt train jobs/tiny.toml" in out
    assert "then: tlt submit jobs/qwen7b.toml --script sbatch/train_qwen7b.sh --account" in out
    assert set(re.findall(r"(?:jobs|sbatch)/\S+", out)) <= set(found)
    assert main(["init", str(tmp_path / "a b")]) == 0
    assert f"0 files copied, {len(found)} there already" in capsys.readouterr().out


def test_init_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "tiny.toml").write_text("mine\n")
    (tmp_path / "sbatch" / "env.sh").mkdir(parents=True)
    assert main(["init", str(tmp_path)]) == 2
    assert "has other versions of jobs/tiny.toml, sbatch/env.sh; move them away" in capsys.readouterr().err
    assert files_in(tmp_path) == {"jobs/tiny.toml": b"mine\n"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, which sees the libraries that the tests use, not the clone."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT], check=True)
    (wheel,) = folder.glob("tlt_hpc-*.whl")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", "--quiet", "--no-deps", wheel], check=True)
    # as a path in a .pth file: .pth files there, such as that of the clone's own installation, are not read
    purelib = sysconfig.get_path("purelib", vars={"base": str(folder / "venv")})
    (Path(purelib) / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv" / "bin"


def call(folder: Path, *words: str | Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["LD_LIBRARY_PATH"] = f"{sys.prefix}/lib:{os.environ.get('LD_LIBRARY_PATH', '')}"  # MPICH's wheel
    found = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.ci
def test_the_demo_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    package = call(tmp_path, installed / "python", "-c", "import tlt_hpc; print(tlt_hpc.__file__)").strip()
    assert Path(package).is_relative_to(installed.parent)
    call(tmp_path, installed / "tlt", "init", "work")
    work = tmp_path / "work"
    assert files_in(work) == shipped_files()
    small = ("run.ranks=1", "run.num_steps=2", "rollout.prompts_per_step=2", "rollout.max_new_tokens=64")
    assert "2 steps" in call(work, installed / "tlt", "train", "jobs/tiny.toml", *small)
    without = ("--dry-run", "--no-preflight")
    shown = call(work, installed / "python", "jobs/submit.py", "jobs/tiny.toml", *small, "run.name=more", *without)
    assert "tlt train" in shown
