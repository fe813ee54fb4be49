"""Compares runs: whether tokens are equal, and score, length, seconds, accept length, energy and idle time of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.words import count
from tlt_hpc.look.analysis.base import Analysis
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.words import listed, share, times_as_fast

IDLE, HARVESTED = "idle_rank_seconds", "harvested_rank_seconds"
ROLLOUT, STEP = "rollout_seconds", "step_seconds"


@dataclass(frozen=True)
class ComparedMetric:
    """A metric of which runs are compared; ``words`` and ``form`` are for the verdict."""

    name: str
    heading: str
    unit: str
    words: str
    form: str = ".2f"


METRICS = {
    "score": ComparedMetric("critic/score/mean", "Score", "mean score", "score", ".3f"),
    "length": ComparedMetric("response_length/mean", "Mean response", "tokens", "mean response", ".1f"),
    "accept_length": ComparedMetric(
        "drafter/spec_decode/mean_acceptance_length", "Accept length", "tokens per pass", "accept length"
    ),
    ROLLOUT: ComparedMetric("rollout/seconds", "Rollout", "seconds", "rollout seconds"),
    STEP: ComparedMetric("timing_s/step", "Step", "seconds", "step seconds"),
    IDLE: ComparedMetric(f"rollout/{IDLE}", "Idle", "rank-seconds", "idle rank-seconds"),
    HARVESTED: ComparedMetric(f"rollout/{HARVESTED}", "Harvested", "rank-seconds", "harvested rank-seconds"),
    "gpu_joules": ComparedMetric("energy/gpu_joules", "Energy of GPUs", "joules", "joules a step of GPUs", ",.0f"),
    "cpu_joules": ComparedMetric(
        "energy/cpu_joules", "Energy of processors", "joules", "joules a step of processors", ",.0f"
    ),
}
_TIMED = (ROLLOUT, STEP, "gpu_joules", "cpu_joules")
"""Not known of a step of which an earlier start generated a part."""
MAX_TOKENS = 8_000_000
"""Response tokens of a run that are compared, from the first common step on."""
_KEY = tuple(f"rollouts/{name}" for name in ("draw", "sample", "stream"))
_ENDS, _TOKENS = "rollouts/response_ends", "rollouts/response_tokens"


@dataclass(frozen=True)
class RunSeries:
    """One run's metrics by step, [S] each; NaN where unknown. ``num_logs``: ranks whose logs are there."""

    name: str
    steps: NDArray[np.int64]
    series: dict[str, NDArray[np.float64]]
    num_logs: NDArray[np.int64]

    def values(self, name: str, steps: ArrayLike) -> NDArray[np.float64]:
        """A series on the given steps."""
        return self.series[name][np.isin(self.steps, steps)]

    def mean(self, name: str, steps: ArrayLike) -> float:
        """Mean over the given steps that have a value; NaN if none has."""
        values = self.values(name, steps)
        return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


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
        return any(len(run.steps) for run in self.runs)

    @property
    def tokens_in_words(self) -> str:
        """Whether the tokens are the same."""
        if not len(self.compared_steps):
            return "No common step has the logs of all ranks: tokens not compared."
        span = f"{count(len(self.compared_steps), 'step')} compared, up to step {self.compared_steps[-1]}"
        if all(step is None for step in self.first_difference.values()):
            return f"The same tokens in all runs ({span})."
        parts = [
            f"{name} differs from step {step} on" if step is not None else f"{name} has the same tokens"
            for name, step in self.first_difference.items()
        ]
        return f"Against {self.runs[0].name}: {listed(parts)} ({span})."

    @property
    def verdict(self) -> str:
        if not len(self.common_steps):
            return f"{self.tokens_in_words} No step has a line in all runs: nothing else can be compared."
        first, parts = self.runs[0], [self.tokens_in_words]
        over = f"over their {count(len(self.common_steps), 'common step')}"
        for other in self.runs[1:]:
            told = []
            for name, metric in METRICS.items():
                theirs, own = other.mean(name, self.common_steps), first.mean(name, self.common_steps)
                if np.isfinite(theirs + own):
                    told.append(f"{metric.words} {theirs:{metric.form}} and {own:{metric.form}}")
            faster = _faster(first, other)
            if faster and self.first_difference[other.name] is not None:
                faster += ", though of other tokens"
            parts.append(f"{other.name} against {first.name}, {over}: {', '.join(told)}{faster}.")
        used = [(run.mean(HARVESTED, self.common_steps), run.mean(IDLE, self.common_steps), run) for run in self.runs]
        shares = [f"{share(part, idle)} in {run.name}" for part, idle, run in used if np.isfinite(part + idle)]
        return " ".join([*parts, f"Harvested of the idle time: {listed(shares)}." if shares else ""]).strip()


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
        runs=tuple(_series(run, name) for run, name in zip(runs, names, strict=True)),
        common_steps=np.array(sorted(set.intersection(*(set(run.lines) for run in runs))), np.int64),
        compared_steps=np.array(compared, np.int64),
        first_difference=differences,
        problems=tuple(f"{name}: {each}" for run, name in zip(runs, names, strict=True) for each in run.problems),
    )


def _names(runs: Sequence[RunLog]) -> list[str]:
    """The folders' names; with their parents if two are equal, and numbered if those are equal, too."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = ["/".join(run.folder.path.resolve().parts[-2:]) for run in runs]
    return [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]


def _series(run: RunLog, name: str) -> RunSeries:
    series = {key: run.metric(metric.name) for key, metric in METRICS.items()}
    for key in _TIMED:
        series[key][run.metric("rollout/kept_tokens") > 0] = np.nan
    logged = set(run.logged_steps)
    num_logs = [len(run.files(step)) if step in logged else 0 for step in run.lines]
    return RunSeries(name, np.array(list(run.lines), np.int64), series, np.array(num_logs, np.int64))


def _compare_tokens(runs: Sequence[RunLog], names: Sequence[str]) -> tuple[list[int], dict[str, int | None]]:
    """Compare step by step until ``MAX_TOKENS`` were read, or all runs differ from the first."""
    compared, num_tokens = list[int](), 0
    differences: dict[str, int | None] = dict.fromkeys(names[1:])
    for step in sorted(set.intersection(*(set(run.steps) for run in runs))):
        first = _responses(runs[0], step)
        same = [name for name in differences if differences[name] is None]
        others = {name: _responses(run, step) for name, run in zip(names, runs, strict=True) if name in same}
        if not first or not all(others.values()):  # some rank's log is missing or damaged
            continue
        compared.append(step)
        differences |= {name: step for name, other in others.items() if other != first}
        num_tokens += sum(len(tokens) // 4 for tokens in first.values())
        if num_tokens >= MAX_TOKENS or None not in differences.values():
            break
    return compared, differences


def _responses(run: RunLog, step: int) -> dict[tuple[int, ...], bytes]:
    """A step's response tokens by draw, sample and stream, whichever rank generated them; empty if a log is missing."""
    found = dict[tuple[int, ...], bytes]()
    for _, ranks in run.columns((_ENDS, _TOKENS, *_KEY), steps=[step]):
        if len(ranks) < max(rank.num_ranks for rank in ranks):
            return {}
        for rank in ranks:
            keys = zip(*(rank[name].tolist() for name in _KEY), strict=True)
            for key, tokens in zip(keys, np.split(rank[_TOKENS], rank[_ENDS]), strict=False):
                found[key] = tokens.tobytes()
    return found


def timed_steps(first: RunSeries, other: RunSeries) -> tuple[NDArray[np.int64], tuple[int, int] | None]:
    """The steps that both runs have timed completely.

    Only steps with the same number of ranks in both runs; if there are none, all, and both numbers of ranks.
    """
    runs = (first, other)
    times = [np.where(run.series[ROLLOUT] > 0, run.series[ROLLOUT] * run.series[STEP], np.nan) for run in runs]
    timed = [run.steps[np.isfinite(each) & (each > 0)] for run, each in zip(runs, times, strict=True)]
    common = np.intersect1d(timed[0], timed[1])
    numbers = [run.num_logs[np.isin(run.steps, common)] for run in runs]
    alike = (numbers[0] == numbers[1]) | (np.minimum(*numbers) == 0)  # 0: the logs are not here
    if alike.any() or not len(common):
        return common[alike], None
    return common, (int(numbers[0][0]), int(numbers[1][0]))


def _faster(first: RunSeries, other: RunSeries) -> str:
    steps, ranks = timed_steps(first, other)
    if not len(steps):
        return ""
    ratio = first.mean(ROLLOUT, steps) / other.mean(ROLLOUT, steps)
    on = f" on {count(ranks[1], 'rank')} instead of {ranks[0]}" if ranks else ""
    return f"; its rollouts are {times_as_fast(ratio)}{on}"
