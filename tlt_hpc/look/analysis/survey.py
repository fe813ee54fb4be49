"""One pass over the logs of all steps for several analyses at once: each file is opened once. Knows no figure.

An analysis says which columns it needs, what it keeps of one step (small, since it may come from another process), and
what it makes of all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from tlt_hpc.look.analysis.processes import map_tasks
from tlt_hpc.look.analysis.run_log import RunLog, read_ranks
from tlt_hpc.storage.log_columns import Columns

Row = TypeVar("Row")
Found = TypeVar("Found")


@dataclass(frozen=True)
class StepLogs:
    """A step's columns, of each rank whose log can be read, one at least."""

    step: int
    ranks: tuple[Columns, ...]
    speaks: tuple[bool, ...]
    """Whether each tells of its replica's rounds, which the others of it went through with it."""


@dataclass(frozen=True)
class Survey(Generic[Row, Found]):
    """Arrays and attributes as ``read_columns`` takes them; ``row`` is a module's function, so that it can be pickled.

    ``found`` gets the steps of which something can be read, ascending, and the row of each.
    """

    arrays: tuple[str, ...]
    attributes: tuple[str, ...]
    row: Callable[[StepLogs], Row]
    found: Callable[[RunLog, list[int], list[Row]], Found]


def take(run: RunLog, survey: Survey[Row, Found]) -> Found:
    """One survey alone.

    Raises:
        UserError: as ``take_all``.
    """
    found: Found = take_all(run, (survey,))[0]
    return found


def take_all(run: RunLog, surveys: Sequence[Survey[Any, Any]]) -> list[Any]:
    """What each of them finds; a file that is damaged in a column of one is left out of all, and noted.

    Raises:
        UserError: a process that read for this one was killed.
    """
    tasks = [_Task(step, tuple(run.files(step).values())) for step in run.steps]
    look = partial(
        _look,
        arrays=tuple(dict.fromkeys(name for survey in surveys for name in survey.arrays)),
        attributes=tuple(dict.fromkeys(name for survey in surveys for name in survey.attributes)),
        rows=tuple(survey.row for survey in surveys),
        replica_size=run.replica_size,
    )
    steps, rows = list[int](), list[tuple[Any, ...]]()
    for task, (row, problems) in zip(tasks, map_tasks(look, tasks, sum(len(t.files) for t in tasks)), strict=True):
        for problem in problems:
            run.note(problem)
        if row is not None:
            steps.append(task.step)
            rows.append(row)
    return [survey.found(run, steps, [row[i] for row in rows]) for i, survey in enumerate(surveys)]


@dataclass(frozen=True)
class _Task:
    step: int
    files: tuple[Path, ...]


def _look(
    task: _Task,
    arrays: Sequence[str],
    attributes: Sequence[str],
    rows: Sequence[Callable[[StepLogs], Any]],
    replica_size: int,
) -> tuple[tuple[Any, ...] | None, list[str]]:
    """A step's row for each survey, None where nothing of it can be read; and what cannot."""
    ranks, problems = read_ranks(task.step, task.files, arrays, attributes)
    if not ranks:
        return None, problems
    logs = StepLogs(task.step, tuple(ranks), tuple(rank.rank % replica_size == 0 for rank in ranks))
    return tuple(row(logs) for row in rows), problems
