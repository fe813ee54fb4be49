"""Work over a run's files, spread over processes where there is much of it. Knows no file."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from tlt_hpc.common.errors import UserError

FEW_FILES = 200
"""Below it processes take longer to start than the files to read."""
MOST_PROCESSES = 8
_PARTS = 16
"""Portions a process gets: many, so that all end at about the same time."""

Task = TypeVar("Task")
Answer = TypeVar("Answer")


def map_tasks(work: Callable[[Task], Answer], tasks: Sequence[Task], num_files: int) -> Iterator[Answer]:
    """``work`` of each task, in their order, as soon as it is there.

    Args:
        work: can be pickled, as tasks and answers can; what it raises is raised here.
        num_files: how much there is to read, of which it depends whether it is worth processes.

    Raises:
        UserError: a process was killed, so that its answers are missing.
    """
    processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)), len(tasks))
    if num_files < FEW_FILES or processes < 2:
        yield from map(work, tasks)
        return
    # Spawned, not forked: whoever asks may have threads. They import numpy and h5py, no more.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        try:
            yield from pool.map(work, tasks, chunksize=max(1, len(tasks) // (_PARTS * processes)))
        except BrokenProcessPool:
            raise UserError(
                f"one of {processes} processes that read {num_files:,} logs was killed, for want of memory as likely "
                "as not; give it more, or look at fewer steps with --last"
            ) from None
