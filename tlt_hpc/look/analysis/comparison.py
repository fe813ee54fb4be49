"""Several runs side by side: the same tokens or not, and reward, length, seconds, acceptance and waiting of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.errors import UserError
from tlt_hpc.look.analysis.result import Analysis, count, listed, share
from tlt_hpc.look.analysis.run_log import RunLog

IDLE, HARVESTED = "idle_rank_seconds", "harvested_rank_seconds"
_METRICS = {
    "score": "critic/score/mean",
    "length": "response_length/mean",
    "accept_length": "drafter/spec_decode/mean_acceptance_length",
    "rollout_seconds": "rollout/seconds",
    "step_seconds": "timing_s/step",
    IDLE: f"rollout/{IDLE}",
    HARVESTED: f"rollout/{HARVESTED}",
    "kept_tokens": "rollout/kept_tokens",
    "gpu_joules": "energy/gpu_joules",
    "cpu_joules": "energy/cpu_joules",
}
SHOWN = {
    "score": ("Score", "mean score", False),
    "length": ("Mean response", "tokens", True),
    "accept_length": ("Accept length", "tokens per pass", False),
    "rollout_seconds": ("Rollout", "seconds", True),
    "step_seconds": ("Step", "seconds", True),
    IDLE: ("Waiting; filled: harvested", "rank-seconds", True),
    "gpu_joules": ("Energy of GPUs", "joules", True),
    "cpu_joules": ("Energy of processors", "joules", True),
}
"""Series -> heading, unit, and whether its axis begins at zero."""
MOST_TOKENS = 8_000_000
"""Response tokens a run of which two runs' tokens are held against each other, from their first common step on."""
_KEY = ("draw", "sample", "stream")
_TOKENS = ("rollouts/response_ends", "rollouts/response_tokens", *(f"rollouts/{name}" for name in _KEY))


@dataclass(frozen=True)
class RunSeries:
    """One run's figures by step, [S] each; NaN where its lines do not tell."""

    name: str
    steps: NDArray[np.int64]
    series: dict[str, NDArray[np.float64]]

    def on(self, steps: NDArray[np.int64]) -> RunSeries:
        """Of these steps alone."""
        told = np.isin(self.steps, steps)
        return RunSeries(self.name, self.steps[told], {name: values[told] for name, values in self.series.items()})

    def mean(self, name: str, steps: Sequence[int]) -> float:
        """Over the given steps, as far as they are told."""
        values = self.series[name][np.isin(self.steps, steps)]
        return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


@dataclass(frozen=True)
class Comparison(Analysis):
    """``common_steps``: those that all runs have a line of. Tokens are held against the first run's."""

    runs: tuple[RunSeries, ...]
    common_steps: NDArray[np.int64]
    compared_steps: NDArray[np.int64]
    """Steps whose tokens were held against each other."""
    first_difference: dict[str, int | None]
    """By run, from the second on: the first of the compared steps whose tokens differ."""
    tokens_in_words: str

    @property
    def has_data(self) -> bool:
        return any(len(run.steps) for run in self.runs)

    def on_common_steps(self) -> Comparison:
        """The series over the steps that all runs have, for curves that can lie on each other."""
        return replace(self, runs=tuple(run.on(self.common_steps) for run in self.runs))


def analyse_comparison(runs: Sequence[RunLog], most_tokens: int = MOST_TOKENS) -> Comparison:
    """Two runs or more.

    Raises:
        UserError: fewer.
    """
    if len(runs) < 2:
        raise UserError("one run has nothing to be compared with; give two folders or more")
    names = _names(runs)
    series = tuple(_series(run, name) for run, name in zip(runs, names, strict=True))
    common = sorted(set.intersection(*(set(run.lines) for run in runs)))
    compared, differences = _compare_tokens(runs, names, most_tokens)
    words = _tokens_in_words(names, compared, differences)
    problems = tuple(f"{name}: {each}" for run, name in zip(runs, names, strict=True) for each in run.problems)
    return Comparison(
        run=", ".join(names),
        verdict=_verdict(series, common, words, differences),
        problems=problems,
        runs=series,
        common_steps=np.array(common, np.int64),
        compared_steps=np.array(compared, np.int64),
        first_difference=differences,
        tokens_in_words=words,
    )


def _names(runs: Sequence[RunLog]) -> list[str]:
    """The folders' names; with their parents' where two are alike, and numbered where those are too."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = ["/".join(run.folder.path.resolve().parts[-2:]) for run in runs]
    return [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]


def _series(run: RunLog, name: str) -> RunSeries:
    return RunSeries(name, np.array(list(run.lines), np.int64), {key: run.metric(m) for key, m in _METRICS.items()})


def _compare_tokens(
    runs: Sequence[RunLog], names: Sequence[str], most_tokens: int
) -> tuple[list[int], dict[str, int | None]]:
    """Step by step until so many tokens were read, or all runs differ from the first."""
    common = sorted(set.intersection(*(set(run.steps) for run in runs)))
    compared, num_tokens = list[int](), 0
    differences: dict[str, int | None] = dict.fromkeys(names[1:])
    for step in common:
        own = [_responses(run, step) if i == 0 or differences[names[i]] is None else None for i, run in enumerate(runs)]
        first = own[0]
        if not first or any(other == {} for other in own[1:]):  # some rank's log is not here, or damaged
            continue
        compared.append(step)
        for name, other in zip(names[1:], own[1:], strict=True):
            if other is not None and other != first:
                differences[name] = step
        num_tokens += sum(len(tokens) // 4 for tokens in first.values())
        if num_tokens >= most_tokens or None not in differences.values():
            break
    return compared, differences


def _responses(run: RunLog, step: int) -> dict[tuple[int, ...], bytes]:
    """A step's response tokens by draw, sample and stream, whichever rank had them; none unless all ranks' are here."""
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


def _verdict(series: tuple[RunSeries, ...], common: list[int], words: str, differences: dict[str, int | None]) -> str:
    if not common:
        return f"{words} No step has a line in all runs: nothing else can be held side by side."
    first, parts = series[0], [words]
    over = f"over their {count(len(common), 'common step')}"
    for other in series[1:]:
        told = [f"{text} {_against(first, other, name, common, form)}" for name, text, form in _TOLD]
        faster = _faster(first, other, common)
        if faster and differences[other.name] is not None:
            faster += ", though of other tokens"
        told += _energy(first, other, common)
        parts.append(f"{other.name} against {first.name}, {over}: {', '.join(told)}{faster}.")
    parts.append(_harvests(series, common))
    return " ".join(filter(None, parts))


_TOLD = (
    ("score", "score", ".3f"),
    ("length", "mean response", ".1f"),
    ("accept_length", "accept length", ".2f"),
    ("rollout_seconds", "rollout seconds", ".2f"),
    ("step_seconds", "step seconds", ".2f"),
)


def _against(first: RunSeries, other: RunSeries, name: str, steps: list[int], form: str) -> str:
    return f"{other.mean(name, steps):{form}} and {first.mean(name, steps):{form}}"


def _energy(first: RunSeries, other: RunSeries, steps: list[int]) -> list[str]:
    """What steps took, of each kind of counter that both runs tell of; of the steps that they do."""
    steps, told = _whole_steps(first, other, steps), []
    for name, what in (("gpu_joules", "of GPUs"), ("cpu_joules", "of processors")):
        finite = [run.steps[np.isfinite(run.series[name])] for run in (first, other)]
        both = [step for step in steps if all(step in own for own in finite)]
        if both:
            told.append(f"joules a step {what} {_against(first, other, name, both, ',.0f')}")
    return told


def _whole_steps(first: RunSeries, other: RunSeries, steps: list[int]) -> list[int]:
    """Without those of which an earlier start has generated something, for none of this one's seconds."""
    kept = [run.series["kept_tokens"] > 0 for run in (first, other)]
    cut = {int(step) for run, own in zip((first, other), kept, strict=True) for step in run.steps[own]}
    return [step for step in steps if step not in cut]


def _faster(first: RunSeries, other: RunSeries, steps: list[int]) -> str:
    steps = _whole_steps(first, other, steps)
    if not steps:
        return ""
    a, b = (run.mean("rollout_seconds", steps) for run in (first, other))
    if not (np.isfinite(a) and np.isfinite(b)) or min(a, b) <= 0:
        return ""
    ratio = a / b
    if abs(ratio - 1) < 0.02:
        return "; rollouts take the same time"
    return (
        f"; its rollouts are {ratio:.2f} times as fast"
        if ratio > 1
        else f"; its rollouts take {1 / ratio:.2f} times as long"
    )


def _harvests(series: tuple[RunSeries, ...], steps: list[int]) -> str:
    told = []
    for run in series:
        idle, harvested = (run.mean(name, steps) for name in (IDLE, HARVESTED))
        if np.isfinite(idle) and np.isfinite(harvested):
            told.append(f"{share(harvested, idle)} in {run.name}")
    return f"Harvested of the waiting: {listed(told)}." if told else ""
