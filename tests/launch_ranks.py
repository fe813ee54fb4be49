"""Owns starting a test function on several MPI ranks and bringing back what each rank returned.

As a program it is one of those ranks: `launch_ranks.py <module file> <function name> <json arguments> <result folder>`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# Hydra must not ask a surrounding Slurm job for ranks; Open MPI must start more ranks than cores, as root in CI.
LAUNCH_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HYDRA_BOOTSTRAP": "fork",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def run_on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
    """Call a test module's top-level function with JSON-able arguments on every rank of a new MPI job.

    Returns what each rank's call returned (JSON-able), in rank order. The function connects to the world itself.

    Raises:
        AssertionError: the job ended with another status than 0, or ran past ``timeout`` seconds; shows its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        status, stdout, stderr = launch(num_ranks, [*_program(function, arguments), folder], timeout)
        assert status == 0, f"{num_ranks} ranks of {function.__name__} ended with status {status}\n{stdout}\n{stderr}"
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def launch(num_ranks: int, program: Sequence[str], timeout: float) -> tuple[int, str, str]:
    """Start ``python -m mpi4py PROGRAM`` on ``num_ranks`` ranks; exit status, standard output and error.

    Raises:
        AssertionError: it ran past ``timeout`` seconds; its process group was killed.
    """
    command = [mpiexec(), "-n", str(num_ranks), sys.executable, "-m", "mpi4py", *program]
    # Files instead of pipes: a rank that outlives mpiexec must not keep us waiting for the end of its output.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=_environment(num_ranks), start_new_session=True)
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0), err.seek(0)
        stdout, stderr = out.read(), err.read()
    assert status is not None, f"{num_ranks} ranks of {program} ran past {timeout} s\n{stdout}\n{stderr}"
    return status, stdout, stderr


def mpiexec() -> str:
    """The launcher beside this Python, else the one on PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert found is not None, (
        "no mpiexec beside this Python nor on PATH; install the package `mpich` or load an MPI module"
    )
    return found


def _environment(num_ranks: int) -> dict[str, str]:
    return {**os.environ, **LAUNCH_ENVIRONMENT, "TLT_RANKS": str(num_ranks)}


def _program(function: Callable[..., Any], arguments: Sequence[Any]) -> list[str]:
    assert function.__qualname__ == function.__name__, f"{function.__qualname__} is not at the top level of its module"
    return [__file__, function.__code__.co_filename, function.__name__, json.dumps(arguments)]


def _load_function(module_file: Path, name: str) -> Callable[..., Any]:
    sys.path[:0] = [str(ROOT), str(module_file.parent)]
    specification = importlib.util.spec_from_file_location(module_file.stem, module_file)
    assert specification is not None and specification.loader is not None, f"cannot import {module_file}"
    module = importlib.util.module_from_spec(specification)
    sys.modules[module_file.stem] = module
    specification.loader.exec_module(module)
    function: Callable[..., Any] = vars(module)[name]
    return function


def main(module_file: str, name: str, arguments: str, folder: str) -> None:
    """Be one rank: call the function and write what it returned."""
    function = _load_function(Path(module_file), name)
    from tlt_hpc.mpi.world import World  # found through the path that _load_function has set

    rank = World.connect().rank
    result = function(*json.loads(arguments))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
