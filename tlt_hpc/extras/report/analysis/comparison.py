"""Compares runs: whether tokens are equal, and score, length, seconds, accept length and idle time of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.formatting import format_count
from tlt_hpc.extras.report.analysis.base import Analysis
from tlt_hpc.look.columns import COLUMNS, COMPARED
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.series import RunSeries, compared_series, speed_of, step_numbers
from tlt_hpc.look.text_format import format_percent, join_names

MAX_TOKENS = 8_000_000
"""Response tokens of a run that are compared, from the first common step on."""


@dataclass(frozen=True)
class RunComparison(Analysis):
    """``common_steps``: those that all runs have a line of. Tokens are compared with the first run's."""

    runs: tuple[RunSeries, ...]
    common_steps: NDArray[np.int64]
    compared_steps: NDArray[np.int64]
    """Steps whose tokens were compared."""
    first_difference: dict[str, int | None]
    """Name of each run but the first -> first compared step whose tokens differ, or None."""

    @property
    def has_data(self) -> bool:
        """True if any run has a step."""
        return any(len(run.steps) for run in self.runs)

    @property
    def tokens_in_words(self) -> str:
        """A sentence on whether the runs have the same tokens."""
        if not len(self.compared_steps):
            return "No common step has the logs of all ranks: tokens not compared."
        num_steps = format_count(len(self.compared_steps), "step")
        span = f"{num_steps} compared, up to step {self.compared_steps[-1]}"
        parts = [
            f"{name} differs from step {step} on" if step is not None else f"{name} has the same tokens"
            for name, step in self.first_difference.items()
        ]
        return f"Against {self.runs[0].name}: {join_names(parts)} ({span})."

    @property
    def verdict(self) -> str:
        """The differences between the first run and the others, in one paragraph."""
        if not len(self.common_steps):
            return f"{self.tokens_in_words} No step has a line in all runs: nothing else can be compared."
        first, parts = self.runs[0], [self.tokens_in_words]
        over = f"over their {format_count(len(self.common_steps), 'common step')}"
        for other in self.runs[1:]:
            told = []
            for name in COMPARED:
                theirs, own = other.mean(name, self.common_steps), first.mean(name, self.common_steps)
                if np.isfinite(theirs + own):
                    column = COLUMNS[name]
                    told.append(f"{column.heading} ({column.unit}) {theirs:{column.form}} and {own:{column.form}}")
            parts.append(f"{other.name} against {first.name}, {over}: {', '.join(told)}{self._speedup_clause(other)}.")
        used = [(run.mean("harvested", self.common_steps), run.mean("idle", self.common_steps)) for run in self.runs]
        shares = [
            f"{format_percent(*pair)} in {run.name}"
            for pair, run in zip(used, self.runs, strict=True)
            if sum(pair) >= 0
        ]
        return " ".join([*parts, f"Harvested of the idle time: {join_names(shares)}." if shares else ""]).strip()

    def _speedup_clause(self, other: RunSeries) -> str:
        if (speed := speed_of(self.runs[0], other)) is None:
            return ""
        ranks = other.num_ranks, self.runs[0].num_ranks
        on = (
            f" on {format_count(ranks[0], 'rank')} instead of {ranks[1]}" if ranks[0] != ranks[1] and min(ranks) else ""
        )
        tokens = ", though of other tokens" if self.first_difference[other.name] is not None else ""
        return f"; its rollouts are {speed.rollout:.2f} times as fast{on}{tokens}"


def analyse_comparison(runs: Sequence[RunLog]) -> RunComparison:
    """Compare two runs or more.

    Raises:
        UserError: there are fewer.
    """
    if len(runs) < 2:
        raise UserError("one run has nothing to be compared with; give two folders or more")
    names = _names(runs)
    compared, differences = _compare_tokens(runs, names)
    return RunComparison(
        run=", ".join(names),
        runs=tuple(compared_series(run, name) for run, name in zip(runs, names, strict=True)),
        common_steps=step_numbers(sorted(set.intersection(*(set(run.lines) for run in runs)))),
        compared_steps=step_numbers(compared),
        first_difference=differences,
        problems=tuple(f"{name}: {each}" for run, name in zip(runs, names, strict=True) for each in run.problems),
    )


def _names(runs: Sequence[RunLog]) -> list[str]:
    """The folders' names, numbered if two are equal."""
    names = [run.name for run in runs]
    return [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]


def _compare_tokens(runs: Sequence[RunLog], names: Sequence[str]) -> tuple[list[int], dict[str, int | None]]:
    """Compare step by step until ``MAX_TOKENS`` were read, or all runs differ from the first."""
    compared, num_tokens = list[int](), 0
    differences: dict[str, int | None] = dict.fromkeys(names[1:])
    for step in sorted(set.intersection(*(set(run.steps) for run in runs))):
        first = _read_responses(runs[0], step)
        same = [name for name in differences if differences[name] is None]
        others = {name: _read_responses(run, step) for name, run in zip(names, runs, strict=True) if name in same}
        if not first or not all(others.values()):  # some rank's log is missing or damaged
            continue
        compared.append(step)
        differences |= {name: step + 1 for name, other in others.items() if other != first}
        num_tokens += sum(len(tokens) // 4 for tokens in first.values())
        if num_tokens >= MAX_TOKENS or None not in differences.values():
            break
    return compared, differences


def _read_responses(run: RunLog, step: int) -> dict[tuple[int, ...], bytes]:
    """A step's response tokens by draw, sample and stream, whichever rank generated them; empty if a log is missing."""
    found, ranks = dict[tuple[int, ...], bytes](), run.read_rank_records(step)
    if not ranks or len(ranks) < ranks[0].num_ranks:
        return {}
    for rollout in (rollout for rank in ranks for rollout in rank.rollouts):
        found[rollout.key.draw, rollout.key.sample, rollout.key.stream] = rollout.response_tokens.tobytes()
    return found
