"""Whether MPI works: the library that mpi4py loads, the launcher for it, ranks that find each other.

Every test has a process of its own: an MPI library that does not fit can end, or hang, the process that loads it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import Any

from tlt_hpc.cluster.launcher import PYTHON, find_mpiexec, launch_environment
from tlt_hpc.cluster.slurm import is_task
from tlt_hpc.config import UserError
from tlt_hpc.extras.preflight.planned_job import PlannedJob
from tlt_hpc.extras.preflight.program import ProgramOutput, run_program
from tlt_hpc.extras.preflight.results import Finding, Skip, failure, failure_of, ok, warning
from tlt_hpc.extras.preflight.slurm_checks import query_mpi_types

LOAD_SECONDS = 60.0
TALK_SECONDS = 90.0
"""Python and MPI from a cold file system take seconds; ranks that do not find each other wait forever."""
_PROBE = "tlt_hpc.mpi.probe"
_FITTING = {
    "Open MPI": ("pmix",),
    "Intel(R) MPI": ("pmi2", "pmix"),
    "CRAY MPICH": ("cray_shasta", "pmi2"),
    "MVAPICH": ("pmi2",),
    "MPICH": ("pmi2",),
}
"""Values of ``srun --mpi`` by a word in the library's version text, the more specific first."""
_LOAD_REMEDY = "load your site's MPI module, or `pip install 'mpich<5'`; `MPI4PY_LIBMPI` names a library"


def read_library() -> str:
    """The version text of the MPI library that mpi4py loads, without initialising it.

    Raises:
        UserError: mpi4py does not load, or not in time.
    """
    answer = run_program([*PYTHON, _PROBE], LOAD_SECONDS)
    if answer.status:
        raise UserError(f"mpi4py does not load: {answer.last_line}; {_LOAD_REMEDY}")
    return str(json.loads(_last_json_line(answer))["version"])


def fitting_mpi_types(library: str) -> tuple[str, ...]:
    """Values of ``srun --mpi`` that can start a library, the best first; empty if it is not known."""
    usual = next((types for word, types in _FITTING.items() if word in library), ())
    return (*usual, "pmix") if "--with-pmix" in library and "pmix" not in usual else usual


def check_launcher(job: PlannedJob) -> Finding:
    """mpi4py finds a library, and srun can start its ranks; ``check_rank_communication`` tries whether mpiexec does."""
    library = read_library()
    uses_srun = job.asks_slurm and os.environ.get("TLT_LAUNCH") != "mpirun"
    return _check_srun(library) if uses_srun else ok(_first_line(library))


def check_rank_communication(job: PlannedJob) -> Finding:
    """Two ranks, or in an allocation one on each node, find each other, with the thread level that a run needs."""
    in_step, in_job = is_task(os.environ), job.asks_slurm and "SLURM_JOB_ID" in os.environ
    if in_job or (in_step and shutil.which("srun")):
        srun = ["srun", f"--mpi={_srun_mpi(read_library())}", "--overlap", "--overcommit"]
        nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        return _run_communication_probe(
            [*srun, "--kill-on-bad-exit=1", f"--ntasks-per-node={1 if nodes > 1 else 2}"], nodes
        )
    try:
        mpiexec = find_mpiexec()
    except ValueError as error:
        if in_step:
            raise Skip(str(error)) from None
        if job.asks_slurm:
            raise Skip(
                "there is no mpiexec here; inside an allocation (salloc --nodes=2) preflight tries srun"
            ) from None
        return failure_of(error)
    found = _run_communication_probe([mpiexec], 1)
    if job.asks_slurm and found.level == "failure":  # login nodes often forbid it, and the job uses srun
        return warning(found.found, "run preflight inside an allocation, where it tries srun: salloc --nodes=2")
    return found


def _check_srun(library: str) -> Finding:
    asked, known, fitting = _srun_mpi(library), query_mpi_types(), fitting_mpi_types(library)
    if not known:
        return failure("`srun --mpi=list` names no kind of MPI", "call this on a login node, where Slurm answers")
    if asked not in known:
        others = "put mpich<5 in the place of openmpi in environment.yml, or export TLT_LAUNCH=mpirun"
        remedy = others if asked == "pmix" and fitting[:1] == ("pmix",) else "export TLT_SRUN_MPI=one of these"
        return failure(f"srun knows no --mpi={asked}, only {', '.join(known)}", remedy)
    if fitting and not asked.startswith(fitting):
        what = f"srun --mpi={asked} does not start {_first_line(library)}, which mpi4py loads: N jobs of one rank"
        return failure(what, f"export TLT_SRUN_MPI={fitting[0]}")
    if re.match(r"MPICH Version:\s+5\.0", library) and asked == "pmi2":
        what = f"{_first_line(library)} under srun --mpi=pmi2: starts on several nodes can fail (docs/cluster.md)"
        return warning(what, "install mpich 4.3, or export TLT_LAUNCH=mpirun")
    return ok(f"srun --mpi={asked} for {_first_line(library)}")


def _srun_mpi(library: str) -> str:
    """As the user says, or what fits the library; sbatch/env.sh chooses alike."""
    asked = os.environ.get("TLT_SRUN_MPI") or next(iter(fitting_mpi_types(library)), "")
    if not asked:
        raise Skip(f"it is not known how srun starts {_first_line(library)}; set TLT_SRUN_MPI, see srun --mpi=list")
    return asked


def _first_line(library: str) -> str:
    return " ".join(library.split("\n")[0].split())


def _run_communication_probe(launcher: list[str], num_nodes: int) -> Finding:
    num_ranks = max(2, num_nodes)
    command = [*launcher, "-n", str(num_ranks), *PYTHON, "mpi4py", "-m", _PROBE, "--talk"]
    answer = run_program(command, TALK_SECONDS, launch_environment(num_ranks, os.environ))
    if answer.status:
        return failure(f"{num_ranks} ranks do not talk: {_cause(answer)}", f"try by hand: {' '.join(command)}")
    hosts: list[str] = json.loads(_last_json_line(answer))["hosts"]
    where = f"{num_nodes} nodes ({', '.join(hosts)})" if num_nodes > 1 else "this machine"
    return ok(f"{num_ranks} ranks on {where}, by {shutil.which(launcher[0]) or launcher[0]}")


def _last_json_line(answer: ProgramOutput) -> str:
    """The last line of JSON; a site's library may print others."""
    return next(line for line in reversed(answer.out.splitlines()) if line.startswith("{"))


def _cause(answer: ProgramOutput) -> str:
    """The most useful line: the error itself, not what launchers print about a rank that ended."""
    lines: list[Any] = [line.strip() for line in answer.text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"MPI sees|thread level|Error:|error:|fatal", line)]
    return str((telling or lines or [f"status {answer.status}"])[0])
