"""Response lengths by step, and how many responses were cut at the cap. Reads no tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.formatting import format_count
from tlt_hpc.common.records import FinishReason
from tlt_hpc.extras.report.analysis.base import StepAnalysis
from tlt_hpc.extras.report.analysis.survey import Survey
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.series import step_numbers
from tlt_hpc.look.text_format import format_percent, format_step_range
from tlt_hpc.storage.rollout_log import StepSummary

_NO_TAIL = 2.0
"""Ratio of the longest to the median response below which a step has no long tail."""


@dataclass(frozen=True)
class ResponseLengths(StepAnalysis):
    """By step, [S]: percentiles, maximum and mean of the response lengths in tokens, and counts."""

    p50: NDArray[np.float64]
    p90: NDArray[np.float64]
    p99: NDArray[np.float64]
    longest: NDArray[np.int64]
    mean: NDArray[np.float64]
    num_responses: NDArray[np.int64]
    num_cut: NDArray[np.int64]
    """Number of responses that ended at the cap."""
    cap: int
    """``rollout.max_new_tokens``; 0 if the configuration lacks it."""

    @property
    def verdict(self) -> str:
        """The lengths of the responses and how many were cut, in one paragraph."""
        if not self.has_data:
            return "No response is in the rollout log yet."
        total, cut = int(self.num_responses.sum()), int(self.num_cut.sum())
        ratio = float(np.median(self.longest / np.maximum(self.p50, 1)))
        tail = "There is no long tail" if ratio < _NO_TAIL else "The tail is long"
        at_cap = f" of {self.cap:,} tokens" if self.cap else ""
        return (
            f"{format_count(total, 'response')} in {format_step_range(self.steps)}: "
            f"mean {np.average(self.mean, weights=self.num_responses):,.0f} tokens, longest {self.longest.max():,}. "
            f"{tail}: a step's longest response has {ratio:.1f} times the tokens of its median. "
            + (
                f"{format_count(cut, 'response')} ({format_percent(cut, total)}) ended at the cap{at_cap}."
                if cut
                else "None was cut."
            )
        )


_Row = tuple[NDArray[np.int64], int]
"""The length of each response of a step, and how many were cut."""


def _summarise_step(run: RunLog, ranks: list[StepSummary]) -> _Row:
    cut = sum(int((rank.finish_reasons == FinishReason.LENGTH).sum()) for rank in ranks)
    return np.concatenate([rank.response_lengths for rank in ranks]), cut


def _combine_steps(run: RunLog, all_steps: list[int], rows: list[_Row]) -> ResponseLengths:
    pairs = [(step, *row) for step, row in zip(all_steps, rows, strict=True) if len(row[0])]
    lengths = [each for _, each, _ in pairs]
    quantiles = np.array([np.percentile(each, (50, 90, 99, 100)) for each in lengths]).reshape(-1, 4)
    return ResponseLengths(
        run=run.name,
        problems=run.problems,
        steps=step_numbers(step for step, _, _ in pairs),
        p50=quantiles[:, 0],
        p90=quantiles[:, 1],
        p99=quantiles[:, 2],
        longest=quantiles[:, 3].astype(np.int64),
        mean=np.array([each.mean() for each in lengths], np.float64),
        num_responses=np.array([len(each) for each in lengths], np.int64),
        num_cut=np.array([num_cut for _, _, num_cut in pairs], np.int64),
        cap=run.config_int("rollout", "max_new_tokens"),
    )


LENGTHS = Survey(_summarise_step, _combine_steps)
