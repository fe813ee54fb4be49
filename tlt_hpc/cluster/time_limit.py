"""What a job under Slurm does about its time limit: it knows it from the start, and is queued again once stopped."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from tlt_hpc.cluster.slurm import Allocation, SlurmError, allocation, kill_wait
from tlt_hpc.cluster.stopping import MAX_KILL_SECONDS, StopFlag
from tlt_hpc.cluster.watch.beat import BEAT
from tlt_hpc.common.files import LINES_BYTES, DamagedText, parse_json, read_bytes

T = TypeVar("T")

logger = logging.getLogger(__name__)

HISTORY = "requeues.jsonl"
PREEMPTION_POLL_SECONDS = 5.0
AGAIN = "TLT_SUBMIT_AGAIN"
"""The command that resumes a job that is not queued again; unset if it is the one that submitted it."""
TRIES, TRY_AGAIN_SECONDS = 3, 2.0
"""A controller that is busy, as where many jobs end at once, may answer the next time."""
MOST_IDLE_STARTS = 3
"""So many starts in a row that came no further end a job that would otherwise be queued again for ever."""


def know_limits(
    flag: StopFlag, environment: Mapping[str, str], rank: int, folder: Path, progress: Callable[[], str] | None
) -> None:
    """Tell rank 0's stop flag when the allocation ends, and how fast it is killed; it votes for all ranks.

    Where the ranks are in an update that lasts beyond the end, the job is queued again all the same: what was finished
    is on disk by then.

    Args:
        progress: how far the work in ``folder`` has come; None for work that is not queued again.
    """
    job = allocation(environment)
    if job is None or rank:
        return
    warning = f"how soon SIGKILL follows SIGTERM is not known, so {MAX_KILL_SECONDS} s are taken"
    flag.set_kill_delay(_or_else(kill_wait, MAX_KILL_SECONDS + 1, warning))
    left = _or_else(job.seconds_left, None, "the time limit is not known, only its signal will tell")
    if left is not None:
        BEAT.ends_at = time.time() + left

        def at_last() -> None:
            if progress is not None:
                print(f"tlt: {queue_again(environment, folder, _told(progress))}", flush=True)

        def seconds_left(within: float) -> float | None:
            """What is left now, since an operator may have postponed the end; None where Slurm does not answer."""
            left = job.seconds_left(within)
            return math.inf if left is None else left

        warning = "whether the time limit is still the same is not known, and taken for granted"
        flag.set_time_limit(left, at_last, lambda within: _or_else(partial(seconds_left, within), None, warning))


def _told(progress: Callable[[], str]) -> str:
    try:
        return progress()
    except (ValueError, OSError) as error:  # which the next start meets, and says
        logger.warning("how far the work has come is not known: %s", error)
        return f"unknown at {time.time():.0f}"


def _or_else(ask: Callable[[], T], otherwise: T, warning: str = "") -> T:
    """What Slurm answers, or ``otherwise`` where it does not, with a ``warning`` unless that is empty."""
    try:
        return ask()
    except SlurmError as error:
        if warning:
            logger.warning("%s: %s", warning, error)
        return otherwise


def queue_again(environment: Mapping[str, str], folder: Path, progress: str) -> str:
    """Have Slurm queue this job again, once it has saved all that it will; for rank 0. Returns the line for the user.

    ``progress`` tells how far the work in ``folder`` has come: a job that starts again and again and comes no further
    is not queued once more.
    """
    job = allocation(environment)
    if job is None:
        return "not in a Slurm job, so nothing was queued: the same command resumes"
    history = read_history(folder / HISTORY)
    idle = [entry for entry in history if entry["job"] == job.job_id][1 - MOST_IDLE_STARTS :]
    if len(idle) == MOST_IDLE_STARTS - 1 and all(entry["progress"] == progress for entry in idle):
        return (
            f"job {job.job_id} is not queued again: {MOST_IDLE_STARTS} starts in a row came no further than "
            f"{progress}; give it more time (sbatch --time), or make a step shorter"
        )
    try:
        with (folder / HISTORY).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"job": job.job_id, "restarts": job.restarts, "progress": progress}) + "\n")
        _try_again(partial(_requeue, job))
    except (SlurmError, OSError) as error:
        return f"job {job.job_id} is not queued again ({error}): {how_to_resume(environment)}"
    return f"job {job.job_id} is queued again and will resume"


def how_to_resume(environment: Mapping[str, str]) -> str:
    """How the work of a job that is not queued again is resumed, in words."""
    return f"`{environment[AGAIN]}` resumes" if AGAIN in environment else "submit the same script, which resumes"


def await_preemption(environment: Mapping[str, str]) -> None:
    """Where this job is being preempted, wait to be killed; for rank 0. Else return at once.

    Slurm queues a job again that it had to end, and takes one that left by itself within its grace time for finished.
    """
    job = allocation(environment)
    if job is None:
        return
    try:
        if not _try_again(job.is_preempted):
            return
        print(
            f"tlt: job {job.job_id} is preempted: it waits for Slurm to end it and to queue it again; where "
            f"PreemptMode is not REQUEUE, {how_to_resume(environment)}",
            flush=True,
        )
        while _or_else(job.is_preempted, True):  # to leave would lose the place in the queue
            time.sleep(PREEMPTION_POLL_SECONDS)
    except SlurmError as error:
        logger.warning("whether job %s is preempted is not known, so it ends: %s", job.job_id, error)


def _requeue(job: Allocation) -> None:
    try:
        job.requeue()
    except SlurmError:
        if not _or_else(job.is_waiting, False):  # else the answer alone was lost
            raise


def _try_again(ask: Callable[[], T]) -> T:
    """What Slurm answers, asked up to three times.

    Raises:
        SlurmError: what it said the last time.
    """
    for _ in range(TRIES - 1):
        try:
            return ask()
        except SlurmError as error:
            logger.info("asking again: %s", error)
            time.sleep(TRY_AGAIN_SECONDS)
    return ask()


def read_history(path: Path) -> list[dict[str, object]]:
    """The starts of a folder's jobs that ended at their time limit; a file that cannot be read has none."""
    try:
        entries = [parse_json(line, dict[str, object]) for line in read_bytes(path, LINES_BYTES).splitlines()]
        return [entry for entry in entries if {"job", "progress"} <= set(entry)]
    except FileNotFoundError:
        return []
    except (DamagedText, OSError) as error:
        logger.warning("%s is damaged and counts for nothing: %s", path, error)
        return []
