"""How long responses are: by step, over all, and how many were cut at the cap. Reads no token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import FinishReason
from tlt_hpc.look.analysis.result import Analysis, count, share, span_of
from tlt_hpc.look.analysis.run_log import RunLog
from tlt_hpc.look.analysis.survey import StepLogs, Survey, take

COLUMNS = ("rollouts/response_ends", "rollouts/finish_reason")
_QUANTILES = (50, 90, 99)
_NUM_BINS = 40
_NO_TAIL = 2.0
"""Longest over median below which a step has no long tail."""


@dataclass(frozen=True)
class Lengths(Analysis):
    """By step, [S]: tokens of the median, the 90th and 99th of a hundred, the longest, the mean; counts.

    ``edges`` [B + 1] and ``histogram`` [B]: responses of all steps by length, in bins that grow alike.
    """

    steps: NDArray[np.int64]
    p50: NDArray[np.float64]
    p90: NDArray[np.float64]
    p99: NDArray[np.float64]
    longest: NDArray[np.int64]
    mean: NDArray[np.float64]
    num_responses: NDArray[np.int64]
    num_cut: NDArray[np.int64]
    """Responses that ended at the cap."""
    cap: int | None
    """``rollout.max_new_tokens``, where the configuration tells it."""
    edges: NDArray[np.float64]
    histogram: NDArray[np.int64]

    @property
    def has_data(self) -> bool:
        return len(self.steps) > 0


@dataclass(frozen=True)
class _Row:
    """What is kept of a step: each response's length, and how many of them were cut."""

    lengths: NDArray[np.int32]
    num_cut: int


def analyse_lengths(run: RunLog) -> Lengths:
    """Of all steps that have a readable log with a response in it."""
    return take(run, LENGTHS)


def _row(logs: StepLogs) -> _Row:
    lengths = np.concatenate([np.diff(rank[COLUMNS[0]], prepend=0) for rank in logs.ranks])
    num_cut = sum(int((rank[COLUMNS[1]] == FinishReason.LENGTH).sum()) for rank in logs.ranks)
    return _Row(lengths.astype(np.int32), num_cut)


def _found(run: RunLog, all_steps: list[int], rows: list[_Row]) -> Lengths:
    steps = [step for step, row in zip(all_steps, rows, strict=True) if len(row.lengths)]
    rows = [row for row in rows if len(row.lengths)]
    all_lengths = [row.lengths.astype(np.int64) for row in rows]
    quantiles = np.array([np.percentile(lengths, _QUANTILES) for lengths in all_lengths]).reshape(-1, len(_QUANTILES))
    cap = run.setting("rollout", "max_new_tokens")
    edges, histogram = _histogram(np.concatenate([np.empty(0, np.int64), *all_lengths]))
    found = Lengths(
        run=run.name,
        verdict="",
        problems=run.problems,
        steps=np.array(steps, np.int64),
        p50=quantiles[:, 0],
        p90=quantiles[:, 1],
        p99=quantiles[:, 2],
        longest=np.array([lengths.max() for lengths in all_lengths], np.int64),
        mean=np.array([lengths.mean() for lengths in all_lengths], np.float64),
        num_responses=np.array([len(lengths) for lengths in all_lengths], np.int64),
        num_cut=np.array([row.num_cut for row in rows], np.int64),
        cap=cap if isinstance(cap, int) else None,
        edges=edges,
        histogram=histogram,
    )
    return Lengths(**{**vars(found), "verdict": _verdict(found)})


LENGTHS = Survey(COLUMNS, (), _row, _found)


def _histogram(lengths: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Bins from the shortest to the longest, equal in the logarithm, none of them without a whole number in it."""
    if len(lengths) == 0:
        return np.empty(0), np.empty(0, np.int64)
    low, high = max(1, int(lengths.min())), int(lengths.max())
    edges = np.unique(np.round(np.geomspace(low, high + 1, _NUM_BINS + 1)))
    edges[0] = min(float(lengths.min()), edges[0])
    return edges, np.histogram(lengths, edges)[0].astype(np.int64)


def _verdict(found: Lengths) -> str:
    if len(found.steps) == 0:
        return "No response is in the rollout log yet."
    ratio = found.longest / np.maximum(found.p50, 1)
    parts = [
        f"{count(int(found.num_responses.sum()), 'response')} in {span_of(found.steps)}: "
        f"mean {np.average(found.mean, weights=found.num_responses):,.0f} tokens, longest {found.longest.max():,}."
    ]
    middle = float(np.median(ratio))
    if middle < _NO_TAIL:
        parts.append(
            f"There is no long tail: a step's longest response has {middle:.1f} times the tokens of its median."
        )
    else:
        parts.append(
            f"The tail is long: a step's longest response has {middle:.1f} times the tokens of its median "
            f"(the 99th of a hundred {np.median(found.p99 / np.maximum(found.p50, 1)):.1f} times)."
        )
    cut, total = int(found.num_cut.sum()), int(found.num_responses.sum())
    at_cap = f" of {found.cap:,} tokens" if found.cap else ""
    parts.append(
        f"{count(cut, 'response')} ({share(cut, total)}) ended at the cap{at_cap}." if cut else "None was cut."
    )
    return " ".join([*parts, _trend(found)]).strip()


def _trend(found: Lengths) -> str:
    """Mean length of the first quarter of the steps against the last's."""
    quarter = len(found.steps) // 4
    if quarter == 0:
        return ""
    first, last = float(found.mean[:quarter].mean()), float(found.mean[-quarter:].mean())
    if abs(last - first) < 0.1 * first:
        return f"The mean stayed about the same, {first:,.0f} tokens at first and {last:,.0f} at last."
    word = "grew" if last > first else "shrank"
    return f"The mean {word} from {first:,.0f} to {last:,.0f} tokens (first and last quarter of the steps)."
