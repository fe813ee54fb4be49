"""Accept length (tokens per target pass and sequence) by step, by live sequences and by strategy; strategies used."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.extras.report.analysis.base import StepAnalysis
from tlt_hpc.extras.report.analysis.survey import Survey
from tlt_hpc.extras.report.analysis.time_kinds import OFF
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.series import step_numbers
from tlt_hpc.look.text_format import format_percent, format_step_range, join_names
from tlt_hpc.storage.rollout_log import StepSummary

_NUM_BUCKETS = 24


@dataclass(frozen=True)
class AcceptLengths(StepAnalysis):
    """``steps`` [S], ``strategies`` [G], buckets of live sequences [B]: 1, 2, 3-4, 5-8, ...

    ``accept_length`` [S]: tokens per target pass and sequence, of all responses. ``own_accept_length``
    [S]: the same for the learned drafter alone, from metrics.jsonl; NaN where it is missing or the drafter was not
    used. ``step_tokens`` [S, G]: tokens by strategy. ``tokens`` and
    ``row_passes`` [G, B]: sums over the rounds of all steps.
    """

    accept_length: NDArray[np.float64]
    own_accept_length: NDArray[np.float64]
    strategies: tuple[str, ...]
    step_tokens: NDArray[np.int64]
    tokens: NDArray[np.int64]
    row_passes: NDArray[np.int64]

    @property
    def by_bucket(self) -> NDArray[np.float64]:
        """Accept length, [G, B]; NaN where no such round ran."""
        return np.where(self.row_passes > 0, self.tokens / np.maximum(self.row_passes, 1), np.nan)

    @property
    def bucket_names(self) -> list[str]:
        """``1``, ``2``, ``3-4``, ``5-8``, ..."""
        tops = [2**i for i in range(self.tokens.shape[1])]
        return [str(top) if top < 3 else f"{top // 2 + 1}\u2013{top}" for top in tops]

    @property
    def verdict(self) -> str:
        """The accept length, and the strategies that produced the tokens, in one paragraph."""
        if not self.has_data:
            return "No step is in the rollout log yet."
        tokens = self.step_tokens.sum(0)
        drafts = [i for i, name in enumerate(self.strategies) if name != OFF]
        drafted, whole = tokens[drafts].sum(), tokens.sum()
        if not drafted:
            return f"Speculation was off in {format_step_range(self.steps)}: every pass gave a sequence one token."
        used = [
            f"{self.strategies[i]} {format_percent(tokens[i], whole)}" for i in np.argsort(-tokens)[:3] if tokens[i]
        ]
        mean = np.nanmean(self.accept_length) if np.isfinite(self.accept_length).any() else 1.0
        text = (
            f"In {format_step_range(self.steps)} {format_percent(drafted, whole)} of the tokens came from speculative "
            f"rounds (mean {mean:.2f} tokens per target pass and sequence). Most tokens: {join_names(used)}."
        )
        given, passes = self.tokens[drafts].sum(0), self.row_passes[drafts].sum(0)
        if len(live := np.flatnonzero(passes)):
            ends = [f"{given[i] / passes[i]:.2f} with {self.bucket_names[i]} live" for i in sorted({live[0], live[-1]})]
            text += f" Speculative rounds gave {join_names(ends)}."
        if len(known := np.flatnonzero(np.isfinite(self.own_accept_length))) > 1:
            first, last = self.own_accept_length[known[[0, -1]]]
            text += f" The drafter's own drafts (chain of 4) went from {first:.2f} to {last:.2f}; the policy changed "
            text += "meanwhile, too (tlt ablate measures what training alone brings)."
        return text


_Row = tuple[dict[str, int], dict[str, NDArray[np.float64]], float]
"""One step: tokens by strategy; tokens and row passes of rounds by strategy, [2, buckets]; accept length."""


def _summarise_step(run: RunLog, ranks: list[StepSummary]) -> _Row:
    tokens, rounds = Counter[str](), dict[str, NDArray[np.float64]]()
    for rank in ranks:
        tokens.update(dict(zip(rank.strategy_names, rank.strategy_tokens.tolist(), strict=True)))
    for rank in run.first_ranks_of_replicas(ranks):
        spans, names = rank.spans, rank.strategy_names
        decoding = spans.strategy_index >= 0
        live = spans.num_live[decoding]
        buckets = np.minimum(np.ceil(np.log2(np.maximum(live, 1))).astype(np.int64), _NUM_BUCKETS - 1)
        cells = spans.strategy_index[decoding].astype(np.int64) * _NUM_BUCKETS + buckets
        sums = [np.bincount(cells, each, len(names) * _NUM_BUCKETS) for each in (spans.num_tokens[decoding], live)]
        for name, table in zip(names, np.reshape(sums, (2, len(names), _NUM_BUCKETS)).swapaxes(0, 1), strict=True):
            rounds[name] = rounds.get(name, np.zeros(1)) + table
    passes = sum(int(rank.num_target_passes.sum()) for rank in ranks)
    total = sum(int(rank.response_lengths.sum()) for rank in ranks)
    return dict(tokens), rounds, total / passes if passes else float("nan")


def _combine_steps(run: RunLog, steps: list[int], rows: list[_Row]) -> AcceptLengths:
    names = tuple(dict.fromkeys(name for row in rows for name in row[0]))
    none = np.zeros((2, _NUM_BUCKETS))
    table = np.array([sum((row[1].get(name, none) for row in rows), none) for name in names], np.int64)
    table = table.reshape(-1, 2, _NUM_BUCKETS)
    used = np.flatnonzero(table[:, 1].sum(0))
    tokens, passes = table[:, :, : used[-1] + 1 if len(used) else 0].swapaxes(0, 1)
    step_tokens = np.array([[row[0].get(name, 0) for name in names] for row in rows], np.int64)
    judged = run.metric("drafter/own_sequences", steps) != 0
    return AcceptLengths(
        run=run.name,
        problems=run.problems,
        steps=step_numbers(steps),
        accept_length=np.array([row[2] for row in rows], np.float64),
        own_accept_length=np.where(judged, run.metric("drafter/own_accept_length", steps), np.nan),
        strategies=names,
        step_tokens=step_tokens.reshape(len(rows), len(names)),
        tokens=tokens,
        row_passes=passes,
    )


ACCEPTANCE = Survey(_summarise_step, _combine_steps)
