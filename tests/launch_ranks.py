"""Owns starting a test function on several MPI ranks and bringing back what each rank returned.

Ranks are forks of processes that have imported the large libraries once a test session (``rank_forks.py``): a start
takes a fraction of a second, and each case still has processes, an MPI and an exit status of its own. Ranks that are
initialised once and lent to one case after another would save that fraction as well, and would hand on what a case
leaves behind: signal handlers, patched modules, process groups, threads, host names.

As a program it is one of those ranks: `launch_ranks.py <module file> <function name> <json arguments> <result folder>`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
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


OWN = (sys.executable, "-m", "mpi4py")
"""Starts a rank that is no fork."""
NUM_FORKING = 2
"""Processes that ranks are forked from: neighbouring ranks hash strings differently, as ranks of a run do."""


def run_on_ranks(
    num_ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120, own: bool = False
) -> list[Any]:
    """Call a test module's top-level function with JSON-able arguments on every rank of a new MPI job.

    Returns what each rank's call returned (JSON-able), in rank order. The function connects to the world itself.
    ``own``: each rank starts a Python of its own, for tests of how a process starts or ends.

    Raises:
        AssertionError: the job ended with another status than 0, or ran past ``timeout`` seconds; shows its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = [*_program(function, arguments), folder]
        status, stdout, stderr = launch(num_ranks, program, timeout, OWN if own else forked())
        assert status == 0, f"{num_ranks} ranks of {function.__name__} ended with status {status}\n{stdout}\n{stderr}"
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def tlt(num_ranks: int, *arguments: str, timeout: float = 240, status: int = 0) -> subprocess.CompletedProcess[str]:
    """What ``tlt ARGUMENTS`` did on ranks, which are forks.

    mpiexec starts more than one, as for a user. Where a rank has it end them all, it may not hear of a fork's status.

    Raises:
        AssertionError: it ended with another status than ``status``, or ran past ``timeout`` seconds.
    """
    program = ["-m", "tlt_hpc", *arguments]
    start = [*(_launcher(num_ranks) if num_ranks > 1 else []), *forked()]
    done = subprocess.CompletedProcess(program, *_end_of(start, program, num_ranks, timeout))
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def run_python(
    *words: str | Path, cwd: Path = ROOT, timeout: float = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What ``python WORDS`` did with the package of this tree."""
    return subprocess.run(
        [sys.executable, *words], env={**os.environ, **LAUNCH_ENVIRONMENT, "PYTHONPATH": str(ROOT), **environment},
        cwd=cwd, timeout=timeout, capture_output=True, text=True, check=False,
    )  # fmt: skip


def launch(num_ranks: int, program: Sequence[str], timeout: float, python: Sequence[str] = OWN) -> tuple[int, str, str]:
    """Start ``python -m mpi4py PROGRAM`` on ``num_ranks`` ranks; exit status, standard output and error.

    ``python``: what stands before the program; ``forked()`` spares the ranks their imports.

    Raises:
        AssertionError: it ran past ``timeout`` seconds; its process group was killed.
    """
    return _end_of([*_launcher(num_ranks), *python], program, num_ranks, timeout)


def _launcher(num_ranks: int) -> list[str]:
    return [mpiexec(), "-n", str(num_ranks)]


def _end_of(start: Sequence[str], program: Sequence[str], num_ranks: int, timeout: float) -> tuple[int, str, str]:
    # Files instead of pipes: a rank that outlives mpiexec must not keep us waiting for the end of its output.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [*start, *program], stdout=out, stderr=err, cwd=ROOT, env=_environment(num_ranks), start_new_session=True
        )
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


def forked() -> list[str]:
    """What stands for ``python -m mpi4py`` in a command of mpiexec: each rank is a fork that has its imports."""
    for number in range(NUM_FORKING):
        address = _fork_folder() / str(number)
        if address not in _forking or _forking[address].poll() is not None:
            _forking[address] = _start_forking(address)
    return [sys.executable, "-IS", str(ROOT / "tests" / "forked_rank.py"), str(_fork_folder())]


_forking: dict[Path, subprocess.Popen[bytes]] = {}
"""Where it listens -> the process that ranks are forked from; it ends with its standard input, so with this process."""


@cache
def _fork_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tlt-ranks-"))
    atexit.register(shutil.rmtree, folder)
    return folder


def _start_forking(address: Path) -> subprocess.Popen[bytes]:
    """Ranks may connect at once, and wait until its imports are over."""
    address.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        return subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "rank_forks.py"), str(listener.fileno())],
            env={**os.environ, **LAUNCH_ENVIRONMENT, "PYTHONPATH": str(ROOT)},
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )


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
