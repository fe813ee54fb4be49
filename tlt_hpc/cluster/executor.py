"""Hands tasks to submitit, with this project's batch script as the text; and is what a task's ranks run.

Only a job unpickles what submitit pickled for it, and whoever submitted the job is its user. Nothing that looks at a
submission does, since its folder may be another user's and to unpickle a file is to run it: statuses are text.
"""

from __future__ import annotations

import dataclasses
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import submitit
from submitit.core import utils
from submitit.core.submission import process_job
from submitit.local.local import LocalExecutor

from tlt_hpc.cluster.batch import Batch, render
from tlt_hpc.cluster.submission import Task
from tlt_hpc.common.files import read_text, told
from tlt_hpc.config import UserError
from tlt_hpc.storage.folder import writing_beside

_MINUTES = 60 * 24 * 365
"""A local run has no time limit."""
STATUS = ".status"
"""Behind a job's number: the file with the status that its batch script ended with."""
RANK = "python -u -m tlt_hpc.cluster.executor"
"""A rank of a task; the folder with its pickle follows."""


class BatchExecutor(submitit.SlurmExecutor):  # type: ignore[misc]  # submitit has no types here
    """submitit's Slurm executor, whose script is what ``render`` makes of a ``Batch``."""

    def __init__(self, folder: Path, batch: Batch) -> None:
        super().__init__(folder=folder)
        self._batch = batch
        self.update_parameters(nodes=batch.nodes, ntasks_per_node=batch.ranks_per_node)

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return script(self._batch, self.folder)

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[submitit.Job]:
        """Of an array: submitit's own would submit it with submitit's text, and number the members from 0."""
        array = self._batch.array
        if array is None:
            return list(super()._internal_process_submissions(delayed_submissions))
        pickles = []
        for delayed in delayed_submissions:
            pickles.append(self.folder / f"{uuid.uuid4().hex}.pkl")
            delayed.set_timeout(_MINUTES, self.max_num_timeout)
            delayed.dump(pickles[-1])
        first = self._submit_command(self._submitit_command_str)
        ids = [f"{first.job_id}_{index}" for index in array.indices]
        jobs = [self.job_class(self.folder, job_id, list(range(first.num_tasks))) for job_id in ids]
        for job, pickle in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(pickle, "submitted_pickle")
        return jobs


def script(batch: Batch, folder: Path) -> str:
    """The text that Slurm gets for a task or an array of them, whose pickles lie in ``folder``.

    The status that a job ended with is kept, since ranks that are ended at once leave none; what an earlier start left
    goes first.
    """
    place = shlex.quote(str(folder))
    before = (
        "export SUBMITIT_EXECUTOR=slurm SUBMITIT_LOG_LEVEL=WARNING",  # its lines say nothing that the log needs
        f'kept={place}/"${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}"',
        'rm -f "$kept"_*_status.txt "$kept{STATUS}"',
        "trap 'echo $? >\"$kept{STATUS}\"' EXIT",
    )
    lines = tuple(line.replace("{STATUS}", STATUS) for line in before)
    return render(dataclasses.replace(batch, command=f"{RANK} {place}", before=(*batch.before, *lines)))


def send(folder: Path, batch: Batch, tasks: Sequence[Task]) -> list[str]:
    """Submit tasks as one job, or as one array where ``batch`` has one; returns their job numbers.

    Raises:
        UserError: Slurm refuses, with what it said.
    """
    executor = executor_for(folder, batch)
    try:
        with redirect_stderr(StringIO()), executor.batch():  # the error has it too
            jobs = [executor.submit(leave_status, run_rank, task.arguments) for task in tasks]
    except utils.FailedJobError as error:
        raise UserError(f"sbatch refused {batch.name}: {' '.join(str(error).split())}") from None
    return [job.job_id for job in jobs]


def executor_for(folder: Path, batch: Batch) -> BatchExecutor:
    """The executor, where there is a Slurm to send to.

    Raises:
        UserError: there is none.
    """
    try:
        return BatchExecutor(folder, batch)
    except RuntimeError:
        raise UserError("no srun on the path, so no Slurm here; call it on the cluster, or give --local") from None


def send_locally(folder: Path, task: Task, gpus: int) -> submitit.Job:
    """Start a task on this machine, its ranks by mpiexec; returns submitit's job."""
    os.environ.setdefault("SUBMITIT_LOG_LEVEL", "WARNING")  # for the process that it starts
    executor = LocalExecutor(folder=folder)
    executor.update_parameters(timeout_min=_MINUTES, gpus_per_node=gpus, stderr_to_stdout=True)
    return executor.submit(leave_status, run_here, task.arguments)


def wait_for(job: submitit.Job) -> int:
    """The exit status of a job on this machine, once it has ended; 1 where it was killed before it could leave one."""
    job.wait()
    status = read_status(job.paths.folder, job.job_id)
    return 1 if status is None else status


def read_status(folder: Path, job: str) -> int | None:
    """The exit status that a job has left; None where it has left none (yet, or it was killed).

    Its ranks' own go first: Slurm's is that of a killed rank, where a rank's end took the others with it.
    """
    own = max(map(status_in, folder.glob(status_file(folder, job, "*").name)), default=None)
    kept = folder / f"{job}{STATUS}"
    has_kept = kept.is_file() and kept.stat().st_size
    return own if own or not has_kept else status_in(kept)


def status_file(folder: Path, job: str, rank: int | str) -> Path:
    """Where a rank of a job leaves its exit status."""
    return folder / f"{job}_{rank}_status.txt"


def status_in(path: Path) -> int:
    """The exit status that a file holds; 1 if it holds none.

    Raises:
        UserError: it cannot be read.
    """
    try:
        text = read_text(path).strip()
    except OSError as error:
        raise UserError(told(error)) from None
    return int(text) if re.fullmatch("[0-9]{1,3}", text) else 1


# --- in a job ---


def leave_status(run: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Leave the exit status of ``run(arguments)`` for ``read_status``, 1 where it raises; returns it."""
    status = 1
    try:
        status = run(arguments)
    finally:
        with writing_beside(own_status_file()) as part:
            part.write_text(f"{status}\n", encoding="utf-8")
    return status


def own_status_file() -> Path:
    """This rank's."""
    paths = submitit.JobEnvironment().paths
    return status_file(paths.folder, paths.job_id, paths.task_id)


def run_here(arguments: Sequence[str]) -> int:
    """``tlt ARGUMENTS``, which starts its own ranks; returns its exit status."""
    return subprocess.run([sys.executable, "-m", "tlt_hpc", *arguments], check=False).returncode


def run_rank(arguments: Sequence[str]) -> int:
    """This rank's part of ``tlt ARGUMENTS``, as in a batch script; returns its exit status.

    It goes through mpi4py's runner, so that a rank which raises ends the whole job.
    """
    for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)  # submitit's handlers would swallow or requeue; the command has its own
    sys.argv = ["mpi4py", "-m", "tlt_hpc", *arguments]
    try:
        runpy.run_module("mpi4py", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("the command always ends by SystemExit")


def main(folder: str) -> int:
    """Be a rank: do what the pickle says, and end with the exit status that it left."""
    process_job(folder)
    return status_in(own_status_file())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
