"""Compares runs: whether tokens are equal, and score, length, seconds, accept length, energy and idle time of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.words import count
from tlt_hpc.look.analysis.base import Analysis
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.words import listed, share, times_as_fast

IDLE, HARVESTED = "idle_rank_seconds", "harvested_rank_seconds"


@dataclass(frozen=True)
class ComparedMetric:
    """A metric of which runs are compared; without a heading it is not drawn, without words not in the verdict."""

    name: str
    heading: str = ""
    unit: str = ""
    starts_at_zero: bool = True
    words: str = ""
    form: str = ".2f"


METRICS = {
    "score": ComparedMetric("critic/score/mean", "Score", "mean score", False, "score", ".3f"),
    "length": ComparedMetric("response_length/mean", "Mean response", "tokens", True, "mean response", ".1f"),
    "accept_length": ComparedMetric(
        "drafter/spec_decode/mean_acceptance_length", "Accept length", "tokens per pass", False, "accept length"
    ),
    "rollout_seconds": ComparedMetric("rollout/seconds", "Rollout", "seconds", True, "rollout seconds"),
    "step_seconds": ComparedMetric("timing_s/step", "Step", "seconds", True, "step seconds"),
    IDLE: ComparedMetric(f"rollout/{IDLE}", "Waiting; filled: harvested", "rank-seconds"),
    HARVESTED: ComparedMetric(f"rollout/{HARVESTED}"),
    "kept_tokens": ComparedMetric("rollout/kept_tokens"),
    "gpu_joules": ComparedMetric("energy/gpu_joules", "Energy of GPUs", "joules"),
    "cpu_joules": ComparedMetric("energy/cpu_joules", "Energy of processors", "joules"),
}
MAX_TOKENS = 8_000_000
"""Response tokens of a run that are compared, from the first common step on."""
_KEY = ("draw", "sample", "stream")
_TOKENS = ("rollouts/response_ends", "rollouts/response_tokens", *(f"rollouts/{name}" for name in _KEY))


@dataclass(frozen=True)
class RunSeries:
    """One run's metrics by step, [S] each; NaN where a line lacks one. ``num_logs``: ranks whose logs are there."""

    name: str
    steps: NDArray[np.int64]
    series: dict[str, NDArray[np.float64]]
    num_logs: NDArray[np.int64]

    def on(self, steps: NDArray[np.int64]) -> RunSeries:
        """The same run on these steps only."""
        told = np.isin(self.steps, steps)
        series = {name: values[told] for name, values in self.series.items()}
        return RunSeries(self.name, self.steps[told], series, self.num_logs[told])

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
    tokens_in_words: str

    @property
    def verdict(self) -> str:
        return _verdict(self)

    @property
    def has_data(self) -> bool:
        return any(len(run.steps) for run in self.runs)

    def on_common_steps(self) -> RunComparison:
        """The same comparison on the steps that all runs have."""
        return replace(self, runs=tuple(run.on(self.common_steps) for run in self.runs))


def analyse_comparison(runs: Sequence[RunLog], max_tokens: int = MAX_TOKENS) -> RunComparison:
    """Compare two runs or more.

    Raises:
        UserError: there are fewer.
    """
    if len(runs) < 2:
        raise UserError("one run has nothing to be compared with; give two folders or more")
    names = _names(runs)
    series = tuple(_series(run, name) for run, name in zip(runs, names, strict=True))
    common = sorted(set.intersection(*(set(run.lines) for run in runs)))
    compared, differences = _compare_tokens(runs, names, max_tokens)
    problems = tuple(f"{name}: {each}" for run, name in zip(runs, names, strict=True) for each in run.problems)
    return RunComparison(
        run=", ".join(names),
        problems=problems,
        runs=series,
        common_steps=np.array(common, np.int64),
        compared_steps=np.array(compared, np.int64),
        first_difference=differences,
        tokens_in_words=_tokens_in_words(names, compared, differences),
    )


def _names(runs: Sequence[RunLog]) -> list[str]:
    """The folders' names; with their parents if two are equal, and numbered if those are equal, too."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = ["/".join(run.folder.path.resolve().parts[-2:]) for run in runs]
    return [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]


def _series(run: RunLog, name: str) -> RunSeries:
    series = {key: run.metric(metric.name) for key, metric in METRICS.items()}
    return RunSeries(name, np.array(list(run.lines), np.int64), series, _num_logs(run))


def _num_logs(run: RunLog) -> NDArray[np.int64]:
    logged = set(run.logged_steps)
    return np.array([len(run.files(step)) if step in logged else 0 for step in run.lines], np.int64)


def _compare_tokens(
    runs: Sequence[RunLog], names: Sequence[str], max_tokens: int
) -> tuple[list[int], dict[str, int | None]]:
    """Compare step by step until ``max_tokens`` were read, or all runs differ from the first."""
    common = sorted(set.intersection(*(set(run.steps) for run in runs)))
    compared, num_tokens = list[int](), 0
    differences: dict[str, int | None] = dict.fromkeys(names[1:])
    for step in common:
        own = [_responses(run, step) if i == 0 or differences[names[i]] is None else None for i, run in enumerate(runs)]
        first = own[0]
        if not first or any(other == {} for other in own[1:]):  # some rank's log is missing or damaged
            continue
        compared.append(step)
        for name, other in zip(names[1:], own[1:], strict=True):
            if other is not None and other != first:
                differences[name] = step
        num_tokens += sum(len(tokens) // 4 for tokens in first.values())
        if num_tokens >= max_tokens or None not in differences.values():
            break
    return compared, differences


def _responses(run: RunLog, step: int) -> dict[tuple[int, ...], bytes]:
    """A step's response tokens by draw, sample and stream, whichever rank generated them; empty if a log is missing."""
    found = dict[tuple[int, ...], bytes]()
    for _, ranks in run.columns(_TOKENS, steps=[step]):
        if len(ranks) < max(rank.num_ranks for rank in ranks):
            return {}
        for rank in ranks:
            keys = np.stack([rank[f"rollouts/{name}"] for name in _KEY], 1).tolist()
            ends = rank["rollouts/response_ends"]
            tokens = rank["rollouts/response_tokens"]
            starts = np.concatenate([[0], ends])[: len(ends)]
            for key, start, end in zip(keys, starts.tolist(), ends.tolist(), strict=True):
                found[tuple(key)] = tokens[start:end].tobytes()
    return found


def _tokens_in_words(names: Sequence[str], compared: list[int], differences: dict[str, int | None]) -> str:
    if not compared:
        return "No common step has the logs of all ranks: tokens not compared."
    span = f"{count(len(compared), 'step')} compared, up to step {compared[-1]}"
    if all(step is None for step in differences.values()):
        return f"The same tokens in all runs ({span})."
    parts = [
        f"{name} differs from step {step} on" if step is not None else f"{name} has the same tokens"
        for name, step in differences.items()
    ]
    return f"Against {names[0]}: {listed(parts)} ({span})."


@dataclass(frozen=True)
class TimedSteps:
    """Steps whose seconds of two runs can be compared; ``ranks``: both runs' numbers of ranks, if they differ."""

    steps: NDArray[np.int64]
    ranks: tuple[int, int] | None


def timed_steps(first: RunSeries, other: RunSeries) -> TimedSteps:
    """The steps that both runs have timed completely: no part was generated by an earlier start.

    Only steps with the same number of ranks in both runs; if there are none, all, and both numbers of ranks.
    """
    runs = (first, other)
    common = np.array(sorted(_whole(first) & _whole(other)), np.int64)
    if not len(common):
        return TimedSteps(common, None)
    numbers = [run.num_logs[np.isin(run.steps, common)] for run in runs]
    alike = (numbers[0] == numbers[1]) | (np.minimum(*numbers) == 0)  # 0: the logs are not here
    if alike.any():
        return TimedSteps(common[alike], None)
    return TimedSteps(common, (int(numbers[0][0]), int(numbers[1][0])))


def _whole(run: RunSeries) -> set[int]:
    """Steps that have all their seconds."""
    rollout, step = run.series["rollout_seconds"], run.series["step_seconds"]
    is_timed = (rollout > 0) & (step > 0) & np.isfinite(rollout + step)
    return set(run.steps[is_timed & ~(run.series["kept_tokens"] > 0)].tolist())


def _verdict(found: RunComparison) -> str:
    series, common, words = found.runs, found.common_steps.tolist(), found.tokens_in_words
    if not common:
        return f"{words} No step has a line in all runs: nothing else can be held side by side."
    first, parts = series[0], [words]
    over = f"over their {count(len(common), 'common step')}"
    for other in series[1:]:
        told = [
            f"{metric.words} {_against(first, other, name, common, metric.form)}"
            for name, metric in METRICS.items()
            if metric.words
        ]
        faster = _faster(first, other)
        if faster and found.first_difference[other.name] is not None:
            faster += ", though of other tokens"
        told += _energy(first, other, common)
        parts.append(f"{other.name} against {first.name}, {over}: {', '.join(told)}{faster}.")
    parts.append(_harvests(series, common))
    return " ".join(filter(None, parts))


def _against(first: RunSeries, other: RunSeries, name: str, steps: list[int], form: str) -> str:
    return f"{other.mean(name, steps):{form}} and {first.mean(name, steps):{form}}"


def _energy(first: RunSeries, other: RunSeries, steps: list[int]) -> list[str]:
    """Joules of a step by kind of counter, over the steps for which both runs have them."""
    told = []
    cut = {int(step) for run in (first, other) for step in run.steps[run.series["kept_tokens"] > 0]}
    steps = [step for step in steps if step not in cut]
    for name, what in (("gpu_joules", "of GPUs"), ("cpu_joules", "of processors")):
        finite = [run.steps[np.isfinite(run.series[name])] for run in (first, other)]
        both = [step for step in steps if all(step in own for own in finite)]
        if both:
            told.append(f"joules a step {what} {_against(first, other, name, both, ',.0f')}")
    return told


def _faster(first: RunSeries, other: RunSeries) -> str:
    timed = timed_steps(first, other)
    if not len(timed.steps):
        return ""
    ratio = first.mean("rollout_seconds", timed.steps) / other.mean("rollout_seconds", timed.steps)
    ranks = f" on {count(timed.ranks[1], 'rank')} instead of {timed.ranks[0]}" if timed.ranks else ""
    return f"; its rollouts are {times_as_fast(ratio)}{ranks}"


def _harvests(series: tuple[RunSeries, ...], steps: list[int]) -> str:
    told = []
    for run in series:
        idle, harvested = (run.mean(name, steps) for name in (IDLE, HARVESTED))
        if np.isfinite(idle) and np.isfinite(harvested):
            told.append(f"{share(harvested, idle)} in {run.name}")
    return f"Harvested of the waiting: {listed(told)}." if told else ""
