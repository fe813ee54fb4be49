"""One pass over the logs of all steps for several analyses at once, so that each file is opened once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from tlt_hpc.look.analysis.processes import map_tasks
from tlt_hpc.look.run_log import RunLog, read_ranks
from tlt_hpc.storage.log_columns import Columns

Row = TypeVar("Row")
Found = TypeVar("Found")


@dataclass(frozen=True)
class StepLogs:
    """Columns of one step, for each rank whose log can be read; at least one."""

    step: int
    ranks: tuple[Columns, ...]
    is_first_of_replica: tuple[bool, ...]
    """By rank; the other ranks of a replica ran the same rounds, which count once."""


@dataclass(frozen=True)
class Survey(Generic[Row, Found]):
    """The part of an analysis that reads logs.

    Args:
        arrays: to read of each file, as for ``read_columns``; so are ``attributes``.
        row: reduces one step to a small row; a module's function, since it may run in another process.
        found: combines the rows of all readable steps, ascending, to the result.
    """

    arrays: tuple[str, ...]
    attributes: tuple[str, ...]
    row: Callable[[StepLogs], Row]
    found: Callable[[RunLog, list[int], list[Row]], Found]


def take(run: RunLog, survey: Survey[Row, Found]) -> Found:
    """Run one survey.

    Raises:
        UserError: as ``take_all``.
    """
    found: Found = take_all(run, (survey,))[0]
    return found


def take_all(run: RunLog, surveys: Sequence[Survey[Any, Any]]) -> list[Any]:
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
    num_files = sum(len(paths) for _, paths in tasks)
    steps, rows = list[int](), list[tuple[Any, ...]]()
    for (step, _), (row, problems) in zip(tasks, map_tasks(read, tasks, num_files), strict=True):
        for problem in problems:
            run.note(problem)
        if row is not None:
            steps.append(step)
            rows.append(row)
    return [survey.found(run, steps, [row[i] for row in rows]) for i, survey in enumerate(surveys)]


def _read_step(
    task: tuple[int, tuple[Path, ...]],
    arrays: Sequence[str],
    attributes: Sequence[str],
    rows: Sequence[Callable[[StepLogs], Any]],
    replica_size: int,
) -> tuple[tuple[Any, ...] | None, list[str]]:
    """A step's row for each survey, or None if nothing of the step can be read; and a line for each problem."""
    step, paths = task
    ranks, problems = read_ranks(step, paths, arrays, attributes)
    if not ranks:
        return None, problems
    logs = StepLogs(step, tuple(ranks), tuple(rank.rank % replica_size == 0 for rank in ranks))
    return tuple(row(logs) for row in rows), problems
