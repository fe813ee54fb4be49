"""Whether the installed packages fit the project's version ranges, the GPU driver and the job."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import tlt_hpc
from tlt_hpc.config import UserError
from tlt_hpc.plan.preflight import machine
from tlt_hpc.plan.preflight.planned_job import PlannedJob
from tlt_hpc.plan.preflight.results import Finding, Skip, failure, ok, warning

_PROJECT = Path(tlt_hpc.__file__).resolve().parent.parent / "pyproject.toml"
_SHOWN = ("torch", "mpi4py", "deepspeed", "transformers", "h5py")
_FLASH_ATTENTION = SpecifierSet(">=2.8")


def check_python(job: PlannedJob) -> Finding:
    """The Python that the job will use; it should be the one that preflight runs in."""
    python, (wanted, _) = job.python, _asked_for()
    found = f"{python.version}, {python.program}"
    if not wanted.contains(python.version):
        return failure(f"{found}: the project needs {wanted}", "create the environment again with such a Python")
    if not python.is_this:
        return warning(
            f"{found}, by sbatch/env.sh; preflight runs in {sys.prefix} and checks the packages there",
            "activate the job's environment and call preflight in it, or name this one in TLT_ENVIRONMENT",
        )
    return ok(found)


def check_packages(job: PlannedJob) -> Finding:
    """Every required package is installed in a supported version."""
    _, requirements = _asked_for()
    wrong = [words for one in requirements if (words := _misfit(one))]
    if wrong:
        return failure(", ".join(wrong), "pip install the required versions, or create the environment again")
    return ok(", ".join(f"{name} {metadata.version(name)}" for name in _SHOWN))


def check_torch(job: PlannedJob) -> Finding:
    """The build of torch is for the job's device, and the driver, if there is one, is new enough for it."""
    machine.check_driver()
    try:
        python, gpus = job.python, machine.read_gpus()
    except UserError:  # the check of Python says so
        raise Skip("the job's Python is not known") from None
    if not python.torch:
        return failure(f"torch is not installed in {python.prefix}", "create the environment again (environment.yml)")
    cuda, version = python.torch_cuda, python.torch
    if job.uses_gpu and not cuda:
        return failure(
            f"torch {version} in {python.prefix} is a build for CPUs, and the job runs on GPUs",
            "install torch's CUDA build (environment.yml; on a login node CONDA_OVERRIDE_CUDA says which), or name an "
            "environment that has it in TLT_ENVIRONMENT",
        )
    if not cuda:
        return ok(f"torch {version} for CPUs")
    if not gpus:
        if job.needs_gpu and not job.asks_slurm:
            return warning(f"torch {version} for CUDA {cuda}; this machine has no GPU, and the job runs on GPUs",
                           "start the job where there are some; a login node needs none")  # fmt: skip
        return ok(f"torch {version} for CUDA {cuda}; no GPU here, so its driver is not known")
    here = f"{len(gpus)} x {gpus[0].name}, driver {gpus[0].driver}"
    newest = machine.driver_cuda()
    if newest and int(newest.partition(".")[0]) < int(cuda.partition(".")[0]):
        return failure(
            f"torch {version} is for CUDA {cuda}, and the driver ({here}) takes CUDA {newest} at most",
            f"install torch's build for CUDA {newest.partition('.')[0]}",
        )
    return ok(f"torch {version} for CUDA {cuda}; {here}, which takes CUDA {newest or 'of its own'}")


def check_flash_attention(job: PlannedJob) -> Finding:
    """flash-attn is installed for a job on GPUs, which is slower without it."""
    if not job.uses_gpu:
        raise Skip("the job runs on CPUs")
    try:
        version = metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        return warning(
            "flash-attn is not installed: attention falls back to torch's own, which is slower on long responses",
            "conda install flash-attn (environment.yml), or pip install flash-attn where nvcc is",
        )
    if not _FLASH_ATTENTION.contains(version):
        return failure(f"flash-attn {version}, the project needs {_FLASH_ATTENTION}", "install such a version")
    return ok(version)


def check_offload(job: PlannedJob) -> Finding:
    """DeepSpeed can compile its CPU optimiser for ZeRO offload: C++, without CUDA's compiler."""
    if not job.config.optimizer.offload or not job.uses_gpu:
        raise Skip("nothing is offloaded")
    lacking = [what for what, is_there in _tools().items() if not is_there]
    if lacking:
        return failure(
            f"optimizer.offload = true has DeepSpeed compile its optimiser, and there is no {', no '.join(lacking)}",
            "load the modules that the job loads (a compiler, python) before preflight, or install cxx-compiler and "
            "ninja from conda-forge",
        )
    return ok("C++ compiler, ninja and Python.h are there; the first start compiles for a minute")


def _tools() -> dict[str, bool]:
    return {
        "C++ compiler": shutil.which(os.environ.get("CXX", "c++")) is not None,
        "ninja": shutil.which("ninja") is not None or importlib.util.find_spec("ninja") is not None,
        "Python.h": Path(sysconfig.get_path("include"), "Python.h").is_file(),
    }


def _asked_for() -> tuple[SpecifierSet, list[Requirement]]:
    """The supported versions of Python and of the packages: from the clone, else from the installed package."""
    if _PROJECT.is_file():
        project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]
        return SpecifierSet(project["requires-python"]), [Requirement(line) for line in project["dependencies"]]
    found = metadata.metadata("tlt_hpc")
    lines = map(Requirement, metadata.requires("tlt_hpc") or [])
    needed = [one for one in lines if one.marker is None or one.marker.evaluate({"extra": ""})]
    return SpecifierSet(found["Requires-Python"]), needed


def _misfit(wanted: Requirement) -> str:
    """What is wrong with a package, in words; empty if nothing is."""
    try:
        found = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted.name} is not installed ({wanted.specifier})"
    return (
        "" if wanted.specifier.contains(found, prereleases=True) else f"{wanted.name} {found} is not {wanted.specifier}"
    )
