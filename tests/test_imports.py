"""Layers of the package: what may import what, which package uses each heavy library, and that there are no cycles."""

from __future__ import annotations

import ast
import os
import shutil
from functools import cache, partial
from pathlib import Path

import pytest
from answers import loaded_by, python
from launch_ranks import ROOT

PACKAGE = "tlt_hpc"

# Bottom to top. A package or module imports from lower layers, and in its own layer from what stands left of it.
LAYERS = (
    ("", "common", "config"),
    ("storage", "cluster", "mpi"),
    ("kernels", "models", "data", "rewards"),
    ("rollout", "drafting", "rl", "checkpoint"),
    ("plan", "look", "run", "evaluate", "train"),
    ("export", "studies", "cli", "extras", "__main__"),
)
ORDER = {package: place for place, package in enumerate(package for layer in LAYERS for package in layer)}

# Narrower than the layers: all that these packages may import.
MAY_IMPORT = {
    "common": set[str](),
    "config": {"common"},
    "storage": {"common", "config"},
    "cluster": {"common", "config", "storage"},
    "mpi": {"common", "config", "storage", "cluster"},
    "kernels": set[str](),
    "data": {"common", "config", "storage", "cluster", "models"},
    "rewards": {"common", "config", "cluster"},
    "rollout": {"common", "kernels", "models"},
    "drafting": {"common", "config", "storage", "cluster", "models"},
    "export": {"common", "config", "storage", "models", "data", "checkpoint", "look"},
}

HOME_OF = {
    "torch": set(ORDER) - {"common", "config", "storage", "cluster", "mpi", "data", "rewards", "look", "cli"},
    "mpi4py": {"mpi"},
    "h5py": {"storage"},
    "deepspeed": {"rl"},
    "transformers": {"models", "data"},
    "submitit": {"cluster"},
    "matplotlib": {"extras"},
    "triton": {"kernels"},
    "pyarrow": {"data"},
    "jinja2": {"data", "extras"},
    "flash_attn": {"kernels"},
    "latex2sympy2_extended": {"rewards"},
    "sympy": {"rewards"},
    "mpmath": {"rewards"},
    "tensorboard": {"look"},
    "wandb": {"extras"},
    "huggingface_hub": {"export", "models", "extras"},  # the last names its errors alone
    "pickle": {"mpi"},  # between ranks; a file that is unpickled is run
}


@cache
def imports_of(path: Path) -> set[str]:
    """Every module that a file imports anywhere, functions and type checks included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def resolve(name: str, modules: set[str]) -> str:
    """The module of the package that an imported name is, or is in."""
    while name not in modules:
        name = name.rpartition(".")[0]
    return name


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def library_of(name: str) -> str:
    """The heavy library behind an imported name; safetensors.torch is torch, and torch.utils.tensorboard is not."""
    if name.startswith("torch.utils.tensorboard"):
        return "tensorboard"
    return "torch" if name.startswith("safetensors.torch") else name.split(".")[0]


FILES = {module_name(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
ARROWS = {
    module: {resolve(name, set(FILES)) for name in imports_of(path) if name.split(".")[0] == PACKAGE} - {module}
    for module, path in FILES.items()
}


def test_the_layers_are_few_and_name_every_package() -> None:
    assert len(LAYERS) <= 6 and len(FILES) > 40
    assert {package_of(module) for module in FILES} == set(ORDER)


def test_imports_come_from_lower_layers() -> None:
    up = [
        f"{module} -> {target}"
        for module, targets in ARROWS.items()
        for target in targets
        if ORDER[package_of(target)] > ORDER[package_of(module)]
    ]
    assert not up


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_no_more_than_they_need(package: str) -> None:
    own = [targets for module, targets in ARROWS.items() if package_of(module) == package]
    found = {package_of(target) for targets in own for target in targets}
    assert found - {package, ""} <= MAY_IMPORT[package]


def extra_of(module: str) -> str:
    """The extra that a module belongs to; empty for the core."""
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["extras"] and len(parts) > 2 else ""


def test_the_core_imports_no_extra_and_no_extra_another() -> None:
    over = [
        f"{module} -> {target}"
        for module, targets in ARROWS.items()
        for target in targets
        if extra_of(target) not in ("", extra_of(module))
    ]
    assert not over and len({extra_of(module) for module in FILES}) > 5


def test_the_core_works_without_the_extras(tmp_path: Path) -> None:
    """All of its modules are imported from a copy that has none, and a command that needs one says so."""
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("extras", "__pycache__"))
    run_once = {"tlt_hpc.__main__", "tlt_hpc.rewards.server"}
    core = sorted(module for module in FILES if not module.startswith("tlt_hpc.extras") and module not in run_once)
    core = [module for module in core if not module.startswith("tlt_hpc.kernels.programs")]  # which need Triton
    code = f"import importlib, sys\nfor name in {core}: importlib.import_module(name)\nsys.exit(len(sys.modules) < 300)"
    alone = partial(python, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    alone("-c", code)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    alone("-P", "-m", PACKAGE, "data", "inspect", "rows.jsonl")
    said = alone("-P", "-m", PACKAGE, "report", "runs/tiny", status=2).stderr
    assert said == "tlt: this installation lacks tlt_hpc.extras; install the whole package (docs/install.md)\n"


def test_no_cycles() -> None:
    """Take away modules that import none of the rest until nothing is left; what stays is in or above a cycle."""
    left = {module: set(targets) for module, targets in ARROWS.items()}
    while free := {module for module, targets in left.items() if not targets & set(left)}:
        left = {module: targets for module, targets in left.items() if module not in free}
    assert not left


@pytest.mark.parametrize("library", HOME_OF)
def test_each_heavy_library_has_its_package(library: str) -> None:
    users = {package_of(module) for module, path in FILES.items() if library in map(library_of, imports_of(path))}
    assert users <= HOME_OF[library]


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("tlt_hpc.cli.main", {"torch", "deepspeed", "transformers", "mpi4py", "h5py", "submitit", "numpy", "rich"}),
        # what trains no policy: every rank would open half as many files again on a shared file system
        (
            "tlt_hpc.evaluate.evaluate, tlt_hpc.studies.warmup.warm_up, tlt_hpc.cli.show_evaluation",
            {"deepspeed", "transformers", "triton", "pandas", "pyarrow", "matplotlib"},
        ),
    ],
)
def test_modules_load_no_library_that_they_do_not_need(modules: str, absent: set[str]) -> None:
    assert not absent & loaded_by(f"import {modules}")
