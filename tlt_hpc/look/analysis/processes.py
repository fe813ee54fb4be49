"""Applies a function to many files, in several processes if that is faster."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from tlt_hpc.common.errors import UserError

FEW_FILES = 200
"""With fewer files, starting processes takes longer than reading."""
MAX_PROCESSES = 8
_PARTS = 16
"""Portions for each process: many, so that all end at about the same time."""

Task = TypeVar("Task")
Answer = TypeVar("Answer")


def map_tasks(work: Callable[[Task], Answer], tasks: Sequence[Task], num_files: int) -> Iterator[Answer]:
    """Yield ``work(task)`` for each task, in order.

    Args:
        work: can be pickled, as can tasks and answers; its exceptions are raised here.
        num_files: number of files to read, which decides whether processes are used.

    Raises:
        UserError: a process was killed.
    """
    processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)), len(tasks))
    if num_files < FEW_FILES or processes < 2:
        yield from map(work, tasks)
        return
    # Spawned, not forked, because this process may have threads.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        try:
            yield from pool.map(work, tasks, chunksize=max(1, len(tasks) // (_PARTS * processes)))
        except BrokenProcessPool:
            raise UserError(
                f"one of {processes} processes that read {num_files:,} logs was killed, for want of memory as likely "
                "as not; give it more, or look at fewer steps with --last"
            ) from None
