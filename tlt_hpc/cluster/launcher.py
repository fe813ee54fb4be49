"""Starts this program's ranks with mpiexec where neither srun nor mpiexec did. Imports no MPI library."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tlt_hpc.cluster.slurm import is_task
from tlt_hpc.common.formatting import format_count

PYTHON = (sys.executable, "-P", "-m")
"""Starts a module; not one of the folder that the user is in (``-P``), which may be another user's run."""
_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
# The MPI library's own: mpiexec within an allocation sees the batch script's SLURM_LOCALID on every rank.
_LOCAL_RANK_VARIABLES = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
)
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "TLT_RANKS", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
STARTED = "TLT_STARTED"
"""When this program started the ranks itself, and said so, in seconds since the epoch; else unset."""
JOB_FILE, JOB_TEXT = "TLT_JOB_FILE", "TLT_JOB_TEXT"
"""Path and text of the job file, set by what starts the ranks (this module, or ``sbatch/env.sh``): hundreds of ranks
do not open it then."""
_LONGEST_JOB = 65536
"""Bytes; Linux lets one variable have twice as many."""


def launched_rank(environment: Mapping[str, str]) -> int | None:
    """This process's rank by its launcher's variables; None where no launcher started it."""
    return _first_integer_variable(_RANK_VARIABLES, "SLURM_PROCID", environment)


def launched_count(environment: Mapping[str, str]) -> int | None:
    """Return the number of ranks that the launcher started; None where there was none."""
    return None if launched_rank(environment) is None else _first_integer_variable(_SIZE_VARIABLES, "", environment)


def local_rank(environment: Mapping[str, str]) -> int | None:
    """This rank's number on its node, by its launcher's variables; None where none says."""
    return _first_integer_variable(_LOCAL_RANK_VARIABLES, "SLURM_LOCALID", environment)


def _first_integer_variable(names: Sequence[str], of_task: str, environment: Mapping[str, str]) -> int | None:
    """The value of the first variable that is set; of Slurm's ``of_task`` only in a process that srun has started."""
    known = (*names, of_task) if is_task(environment) else names
    return next((int(environment[name]) for name in known if name in environment), None)


def starting_ranks_message(num_ranks: int | None) -> str:
    """The line for the user as ranks start; None if the launcher does not give their number."""
    return f"starting {'the ranks' if num_ranks is None else format_count(num_ranks, 'rank')}"


def single_rank_hint(environment: Mapping[str, str], num_ranks: int, given: Sequence[str]) -> str:
    """The line for the user where a step of a Slurm job, such as a shell, has one rank, and ``run.ranks`` says more.

    A batch script of ours, which sets the job file, was asked for its ranks. ``given``: the words after ``tlt``.
    """
    is_ours = STARTED in environment or JOB_FILE in environment
    if num_ranks == 1 or is_ours or not is_task(environment) or launched_count(environment) != 1:
        return ""
    launcher = ("srun", "--overlap", "--overcommit", "-n", str(num_ranks))
    by_srun = shlex.join((*launcher, sys.executable, *["-P", "-m", "mpi4py", "-m", "tlt_hpc"], *given))
    return f"srun started one rank, but run.ranks = {num_ranks}; to start all of them: `{by_srun}`"


def crowded_cores_note(num_ranks: int, num_cores: int) -> str:
    """Return the end of that line if ranks of this machine outnumber the cores that they may run on; else empty."""
    return f" on {format_count(num_cores, 'core')}, which will be slow" if num_ranks > num_cores else ""


def launch_time(environment: Mapping[str, str]) -> float | None:
    """When this program started the ranks, in seconds since the epoch; None if it did not within the last day."""
    try:
        at = float(environment.get(STARTED, ""))
    except ValueError:
        return None
    return at if 0 <= time.time() - at < 86400 else None


def job_text_from_launcher(environment: Mapping[str, str], path: str) -> bytes | None:
    """Return the text of the job file ``path`` as the launcher read it; None if it was not handed on to this rank."""
    if launched_rank(environment) is None or environment.get(JOB_FILE) != path:
        return None
    return os.fsencode(environment[JOB_TEXT])


def find_mpiexec(environment: Mapping[str, str] = os.environ) -> str:
    """The mpiexec beside this Python, else the one on the path.

    Raises:
        ValueError: there is none, or in this environment it would wait forever for cores that its own step has.
    """
    if is_task(environment):
        raise ValueError(
            f"mpiexec starts no ranks within a step of Slurm (SLURM_STEP_ID={environment['SLURM_STEP_ID']}), such as a "
            "shell of srun; use srun --overlap, or leave the step: salloc, sbatch"
        )
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if found is None:
        raise ValueError(
            "no mpiexec beside this Python or on PATH; `pip install 'mpich<5'`, load your site's MPI, or use srun"
        )
    return found


def launch_command(num_ranks: int, arguments: Sequence[str]) -> list[str]:
    """The command that runs ``tlt ARGUMENTS`` on ``num_ranks`` ranks; a rank that raises ends all (mpi4py's runner)."""
    return [find_mpiexec(), "-n", str(num_ranks), *PYTHON, "mpi4py", "-m", "tlt_hpc", *arguments]


def launch_environment(num_ranks: int, environment: Mapping[str, str], job: str = "") -> dict[str, str]:
    """The ranks' environment: one thread each unless the user says otherwise, the asked rank count to check against.

    ``job``: path of the job file, whose text goes with it; empty: none.
    """
    ranks = {"OMP_NUM_THREADS": "1", **environment, "TLT_RANKS": str(num_ranks), STARTED: str(time.time())}
    if job and Path(job).stat().st_size <= _LONGEST_JOB:
        ranks |= {JOB_FILE: job, JOB_TEXT: os.fsdecode(Path(job).read_bytes())}
    return ranks


def pipe_output_through_tee() -> None:
    """Put ``tee`` before each pipe that we write to: mpiexec kills its ranks if it cannot write.

    ``tee`` reads on after its reader has ended, as where Ctrl-C ends all of ``tlt train job.toml | tee log``, until all
    that write to it have ended. No signal to our process group ends it, and SIGPIPE stays ignored.
    """
    tees: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        end = os.fstat(stream.fileno())
        if not (stat.S_ISFIFO(end.st_mode) or stat.S_ISSOCK(end.st_mode)):
            continue
        pipe = end.st_dev, end.st_ino
        if pipe not in tees:  # both streams in one pipe keep their order
            tees[pipe] = subprocess.Popen(
                ["tee", os.devnull],
                stdin=subprocess.PIPE,
                stdout=stream.fileno(),
                stderr=subprocess.DEVNULL,
                restore_signals=False,
                start_new_session=True,
            )
        inlet = tees[pipe].stdin
        assert inlet is not None
        os.dup2(inlet.fileno(), stream.fileno())


def exec_mpiexec(num_ranks: int, arguments: Sequence[str], job: str) -> None:
    """Replace this process by mpiexec with the ranks; does not return."""
    command = launch_command(num_ranks, arguments)
    pipe_output_through_tee()
    os.execve(command[0], command, launch_environment(num_ranks, os.environ, job))
