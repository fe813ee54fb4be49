"""Accept length (tokens per target pass and sequence) by step, by live sequences and by strategy; strategies used."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.look.analysis.base import Analysis
from tlt_hpc.look.analysis.kinds import OFF
from tlt_hpc.look.analysis.survey import StepLogs, Survey
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.words import listed, share, span_of

_SPANS = ("spans/strategy_index", "spans/num_live", "spans/num_tokens", "spans/seconds")
_NAMES, _TOKENS, _ENDS = "strategy/names", "strategy/tokens", "rollouts/response_ends"
_PASSES = "rollouts/num_target_passes"
_NUM_BUCKETS = 24


@dataclass(frozen=True)
class AcceptLengths(Analysis):
    """``steps`` [S], ``strategies`` [G], buckets of live sequences [B]: 1, 2, 3-4, 5-8, ...

    ``accept_length`` [S]: tokens per target pass and sequence, of all responses. ``own_accept_length`` and
    ``drafter_version`` [S]: the same for the learned drafter alone, and its updates so far, from metrics.jsonl; NaN
    where they are missing or the drafter was not used. ``step_tokens`` [S, G]: tokens by strategy. ``rounds``,
    ``tokens``, ``row_passes`` and ``seconds`` [G, B]: sums over all steps; zero if the logs have no rounds.
    """

    steps: NDArray[np.int64]
    accept_length: NDArray[np.float64]
    own_accept_length: NDArray[np.float64]
    drafter_version: NDArray[np.float64]
    strategies: tuple[str, ...]
    step_tokens: NDArray[np.int64]
    rounds: NDArray[np.int64]
    tokens: NDArray[np.int64]
    row_passes: NDArray[np.int64]
    seconds: NDArray[np.float64]

    @property
    def has_data(self) -> bool:
        return len(self.steps) > 0

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
        if not self.has_data:
            return "No step is in the rollout log yet."
        tokens = self.step_tokens.sum(0)
        drafted, whole = tokens[[name != OFF for name in self.strategies]].sum(), tokens.sum()
        mean = np.nanmean(self.accept_length) if np.isfinite(self.accept_length).any() else 1.0
        if whole and not drafted:
            return f"Speculation was off in {span_of(self.steps)}: every pass gave a sequence one token."
        order = [i for i in np.argsort(-tokens, kind="stable")[:3] if tokens[i]]
        used = [f"{self.strategies[i]} {share(tokens[i], whole)}" for i in order]
        parts = [
            f"In {span_of(self.steps)} {share(drafted, whole)} of the tokens came from speculative rounds (mean "
            f"{mean:.2f} tokens per target pass and sequence).",
            f"Most tokens: {listed(used)}." if used else "",
            self._extremes(),
            self._own(),
        ]
        return " ".join(filter(None, parts))

    def _extremes(self) -> str:
        """Compares the accept length with few and with many live sequences."""
        drafts = [i for i, name in enumerate(self.strategies) if name != OFF]
        tokens, passes = self.tokens[drafts].sum(0), self.row_passes[drafts].sum(0)
        used = np.flatnonzero(passes)
        if len(used) == 0:
            return "The logs do not record single rounds, so nothing is known by live sequences."
        told = [f"{tokens[i] / passes[i]:.2f} with {self.bucket_names[i]} live" for i in sorted({used[0], used[-1]})]
        return f"Speculative rounds gave {listed(told)}."

    def _own(self) -> str:
        """How the accept length of the learned drafter's own drafts changed."""
        known = np.flatnonzero(np.isfinite(self.own_accept_length))
        if len(known) < 2:
            return ""
        first, last = self.own_accept_length[known[[0, -1]]]
        updates = np.nan_to_num(self.drafter_version[known[-1]])
        return (
            f"The drafter's own drafts (chain of 4) went from {first:.2f} to {last:.2f} after {updates:,.0f} updates."
        )


_Row = tuple[dict[str, int], dict[str, NDArray[np.float64]], float]
"""One step: tokens by strategy; number, tokens, row passes and seconds of rounds by strategy, [4, buckets]; accept
length."""


def _row(logs: StepLogs) -> _Row:
    tokens, rounds = defaultdict[str, int](int), dict[str, NDArray[np.float64]]()
    for rank in logs.ranks:
        for name, number in zip(rank.texts(_NAMES), rank[_TOKENS].tolist(), strict=True):
            tokens[name] += number
    for rank in logs.counted:
        names = rank.texts(_NAMES)
        index, live, given, taken = (rank[name][rank[_SPANS[0]] >= 0] for name in _SPANS)
        buckets = np.ceil(np.log2(np.maximum(live, 1))).astype(np.int64)
        cell = index.astype(np.int64) * _NUM_BUCKETS + np.minimum(buckets, _NUM_BUCKETS - 1)
        sums = [np.bincount(cell, weights, len(names) * _NUM_BUCKETS) for weights in (None, given, live, taken)]
        for name, table in zip(names, np.reshape(sums, (4, len(names), _NUM_BUCKETS)).swapaxes(0, 1), strict=True):
            rounds[name] = rounds.get(name, np.zeros(1)) + table
    total = sum(int(rank[_ENDS][-1]) for rank in logs.ranks if rank.num_rollouts)
    passes = sum(int(rank[_PASSES].sum()) for rank in logs.ranks)
    return dict(tokens), rounds, total / passes if passes else float("nan")


def _found(run: RunLog, steps: list[int], rows: list[_Row]) -> AcceptLengths:
    by_name = [counts for counts, _, _ in rows]
    names = tuple(dict.fromkeys(name for counts in by_name for name in counts))
    none = np.zeros((4, _NUM_BUCKETS))
    table = np.array([sum((row[1].get(name, none) for row in rows), none) for name in names])
    table = table.reshape(-1, 4, _NUM_BUCKETS)
    used = np.flatnonzero(table[:, 0].sum(0))
    rounds, tokens, passes, taken = table[:, :, : used[-1] + 1 if len(used) else 0].swapaxes(0, 1)
    step_tokens = np.array([[counts.get(name, 0) for name in names] for counts in by_name], np.int64)
    judged = run.metric("drafter/own_sequences", steps) != 0
    return AcceptLengths(
        run=run.name,
        problems=run.problems,
        steps=np.array(steps, np.int64),
        accept_length=np.array([row[2] for row in rows], np.float64),
        own_accept_length=np.where(judged, run.metric("drafter/own_accept_length", steps), np.nan),
        drafter_version=run.metric("drafter/version", steps),
        strategies=names,
        step_tokens=step_tokens.reshape(len(rows), len(names)),
        rounds=rounds.astype(np.int64),
        tokens=tokens.astype(np.int64),
        row_passes=passes.astype(np.int64),
        seconds=taken,
    )


ACCEPTANCE = Survey((*_SPANS, _NAMES, _TOKENS, _ENDS, _PASSES), (), _row, _found)
