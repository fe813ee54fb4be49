"""The rounds of all steps, from the pass that the analyses make: what a gain is estimated from. Draws nothing."""

from __future__ import annotations

from tlt_hpc.look.analysis.run_log import RunLog
from tlt_hpc.look.analysis.survey import StepLogs, Survey
from tlt_hpc.plan.simulate.rank_step import ATTRIBUTES, COLUMNS, RankStep, rank_step

Ranks = tuple[RankStep, ...]


def _row(logs: StepLogs) -> Ranks:
    return tuple(map(rank_step, logs.ranks))


def _found(run: RunLog, steps: list[int], rows: list[Ranks]) -> dict[int, Ranks]:
    return dict(zip(steps, rows, strict=True))


ROUNDS = Survey(COLUMNS, ATTRIBUTES, _row, _found)
