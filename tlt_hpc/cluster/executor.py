"""Submits jobs with submitit, and is what their ranks run.

submitit pickles a function and its arguments for each job. Only the job itself unpickles them: a submission's folder
may belong to another user, and unpickling a file runs that user's code. So the exit status of a job is left as text.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

import submitit
from submitit.core.utils import FailedJobError

from tlt_hpc.cluster.request import OPPOSITE, sbatch_variable_name
from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import os_error_text, read_text

_INSTEAD = {"mem": ("mem-per-cpu", "mem-per-gpu"), "gres": ("gpus-per-node", "gpus"), "gpus-per-node": ("gres", "gpus")}
"""Options that sbatch takes instead of, or beside, one of these, and that ask for something else."""
_OWN = ("array", "job-name", "open-mode", "output", "wait")
"""Options that submitit sets by itself, and one with which sbatch would not return."""


def submit_jobs(
    folder: Path, parameters: Mapping[str, Any], commands: Sequence[Sequence[str]], environment: Mapping[str, str]
) -> list[str]:
    """Submit one job for each command, as an array if there are several; returns their job numbers.

    Args:
        folder: for scripts, logs and exit statuses.
        parameters: of ``submitit.SlurmExecutor``.
        environment: what the jobs inherit, as this process was given it.

    Raises:
        UserError: Slurm refuses, with its message, or there is no Slurm.
    """
    executor = _executor(folder, parameters)
    try:
        # the error has the same text
        with redirect_stderr(StringIO()), restoring_environment(os.environ, environment), executor.batch():
            jobs = [executor.submit(run_rank, command) for command in commands]
    except FailedJobError as error:
        raise UserError(f"sbatch refused the job: {' '.join(str(error).split())}") from None
    return [job.job_id for job in jobs]


def batch_script(folder: Path, parameters: Mapping[str, Any]) -> str:
    """The text of the batch script of one job, as ``submit_jobs`` submits it; nothing is written.

    Raises:
        UserError: there is no Slurm.
    """
    executor = _executor(folder, parameters)
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "")  # the library has no other way
    return text


def _executor(folder: Path, parameters: Mapping[str, Any]) -> Any:
    try:
        executor = submitit.SlurmExecutor(folder=folder, python="$TLT_CONTAINER python -P")
    except RuntimeError:
        raise UserError("no srun on PATH, so there is no Slurm here; call this on the cluster") from None
    executor.update_parameters(**parameters)
    remove_overruling_variables(os.environ, (*_OWN, *parameters["additional_parameters"]))
    return executor


def remove_overruling_variables(environment: MutableMapping[str, str], options: Iterable[str]) -> None:
    """Remove sbatch's variables for these options: they would overrule the lines of the script that it is given.

    And what tells which member of an array, and which start, of a job this may run in: the job would inherit it, and
    take itself for that.
    """
    asked = set(options)
    for option in asked | {other for one in asked for other in (*_INSTEAD.get(one, ()), OPPOSITE.get(one, one))}:
        environment.pop(sbatch_variable_name(option), None)
    for name in [name for name in environment if name.startswith(("SLURM_ARRAY_", "SLURM_RESTART_"))]:
        del environment[name]


@contextmanager
def restoring_environment(own: MutableMapping[str, str], given: Mapping[str, str]) -> Iterator[None]:
    """Restore the environment variables that were ``given`` while inside: libraries set threads, a device, offline use.

    A variable that was removed stays so.
    """
    changed = {name: value for name, value in own.items() if given.get(name) != value}
    for name in changed:
        del own[name]
    own.update((name, given[name]) for name in changed.keys() & given.keys())
    try:
        yield
    finally:
        own.update(changed)


def read_status(folder: Path, job: str) -> int | None:
    """The exit status of a job's last start; 1 if the file is damaged, None if there is none (yet).

    Raises:
        UserError: the file cannot be read.
    """
    files = sorted(folder.glob(f"{job}-start-*.status"))
    if not files:
        return None
    try:
        text = read_text(files[-1]).strip()
    except OSError as error:
        raise UserError(os_error_text(error)) from None
    return int(text) if re.fullmatch("[0-9]{1,3}", text) else 1


def run_rank(arguments: Sequence[str]) -> NoReturn:
    """Run this rank's part of ``tlt ARGUMENTS``, as in a batch script, and end the process with its exit status.

    mpi4py's runner makes a rank that raises end the whole job.
    """
    for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)  # submitit's handlers would swallow or requeue; the command has its own
    place = submitit.JobEnvironment()
    file = place.paths.folder / f"{place.job_id}-start-{int(os.environ.get('SLURM_RESTART_COUNT', '0')):03}.status"
    sys.argv = ["mpi4py", "-m", "tlt_hpc", *arguments]
    try:
        runpy.run_module("mpi4py", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        # srun kills the other ranks as soon as one ends with another status than 0: the first one leaves it
        with suppress(FileExistsError), file.open("x", encoding="ascii") as status:
            status.write(f"{int(end.code or 0)}\n")
        raise
    raise AssertionError("the command always ends by SystemExit")
