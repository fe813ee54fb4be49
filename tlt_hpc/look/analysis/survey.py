"""One pass over the logs of all steps for several analyses at once, in several processes if there are many files."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from tlt_hpc.common.errors import UserError
from tlt_hpc.look.run_log import RunLog, read_ranks
from tlt_hpc.storage.rollout_log import Columns, read_columns

FEW_FILES = 200
"""With fewer files, starting processes takes longer than reading."""
MAX_PROCESSES = 8
_CHUNKS = 16
"""Portions for each process: many, so that all end at about the same time."""

Found = TypeVar("Found")
Task = tuple[int, Any]
"""A step, and the paths of its logs."""
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class StepLogs:
    """Columns of one step, for each rank whose log can be read; at least one."""

    step: int
    ranks: tuple[Columns, ...]
    replica_size: int

    @property
    def counted(self) -> list[Columns]:
        """The first rank of each replica: the other ranks ran the same rounds, which count once."""
        return [rank for rank in self.ranks if rank.rank % self.replica_size == 0]


@dataclass(frozen=True)
class Survey(Generic[Found]):
    """The part of an analysis that reads logs.

    Args:
        arrays: to read of each file, as for ``read_columns``; so are ``attributes``.
        row: reduces one step to a small row; a module's function, since it may run in another process.
        found: combines the rows of all readable steps, ascending, to the result.
    """

    arrays: tuple[str, ...]
    attributes: tuple[str, ...]
    row: Callable[[StepLogs], Any]
    found: Callable[[RunLog, list[int], list[Any]], Found]


def take(run: RunLog, survey: Survey[Found]) -> Found:
    """Run one survey.

    Raises:
        UserError: a reading process was killed.
    """
    found: Found = take_all(run, (survey,))[0]
    return found


def take_all(run: RunLog, surveys: Sequence[Survey[Any]]) -> list[Any]:
    """Run several surveys in one pass. A file with any damaged column is noted and left out of all of them.

    Raises:
        UserError: a reading process was killed.
    """
    tasks = [(step, tuple(run.files(step).values())) for step in run.steps]
    read = partial(
        _read_step,
        arrays=tuple(dict.fromkeys(name for survey in surveys for name in survey.arrays)),
        attributes=tuple(dict.fromkeys(name for survey in surveys for name in survey.attributes)),
        rows=tuple(survey.row for survey in surveys),
        replica_size=run.replica_size,
    )
    steps, rows = list[int](), list[list[Any]]()
    for (step, _), (row, problems) in zip(tasks, map_tasks(read, tasks), strict=True):
        for problem in problems:
            run.note(problem)
        if row:
            steps.append(step)
            rows.append(row)
    return [survey.found(run, steps, [row[i] for row in rows]) for i, survey in enumerate(surveys)]


def _read_step(
    task: Task,
    arrays: Sequence[str],
    attributes: Sequence[str],
    rows: Sequence[Callable[[StepLogs], Any]],
    replica_size: int,
) -> tuple[list[Any], list[str]]:
    """A step's row for each survey, or none if nothing of the step can be read; and a line for each problem."""
    step, paths = task
    ranks, problems = read_ranks(step, paths, partial(read_columns, arrays=arrays, attributes=attributes))
    logs = StepLogs(step, tuple(ranks), replica_size)
    return [row(logs) for row in rows] if ranks else [], problems


def map_tasks(work: Callable[[Task], Answer], tasks: Sequence[Task]) -> Iterator[Answer]:
    """Yield ``work(task)`` for each task, in order.

    Raises:
        UserError: a process was killed.
    """
    num_files = sum(len(files) for _, files in tasks)
    processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)), len(tasks))
    if num_files < FEW_FILES or processes < 2:
        yield from map(work, tasks)
        return
    # Spawned, not forked, because this process may have threads.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        try:
            yield from pool.map(work, tasks, chunksize=max(1, len(tasks) // (_CHUNKS * processes)))
        except BrokenProcessPool:
            raise UserError(
                f"one of {processes} processes that read {num_files:,} logs was killed, probably because memory ran "
                "out; give it more, or read fewer steps with --last"
            ) from None
