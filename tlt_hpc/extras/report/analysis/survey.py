"""One pass over the logs of all steps for several analyses at once: each log is read once, and reduced at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from tlt_hpc.look.run_log import RunLog
from tlt_hpc.storage.rollout_log import StepSummary

Found = TypeVar("Found")


class Survey(NamedTuple, Generic[Found]):
    """The part of an analysis that reads logs.

    ``row`` reduces the readable logs of one step to a small row. ``found`` combines the rows of all readable steps.
    """

    row: Callable[[RunLog, list[StepSummary]], Any]
    found: Callable[[RunLog, list[int], list[Any]], Found]


def run_survey(run: RunLog, survey: Survey[Found]) -> Found:
    """Run one survey."""
    found: Found = run_surveys(run, (survey,))[0]
    return found


def run_surveys(run: RunLog, surveys: Sequence[Survey[Any]]) -> list[Any]:
    """Run several surveys in one pass. A damaged log is noted and left out of all of them."""
    rows = {
        step: [survey.row(run, ranks) for survey in surveys]
        for step in run.steps
        if (ranks := run.read_rank_summaries(step))
    }
    return [survey.found(run, list(rows), [row[i] for row in rows.values()]) for i, survey in enumerate(surveys)]
