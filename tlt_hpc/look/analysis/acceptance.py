"""How many tokens a target pass gives a sequence: by step, by live sequences, by strategy; and which strategies ran."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.look.analysis.kinds import OFF
from tlt_hpc.look.analysis.result import Analysis, listed, share, span_of
from tlt_hpc.look.analysis.run_log import RunLog
from tlt_hpc.look.analysis.survey import StepLogs, Survey, take
from tlt_hpc.storage.log_columns import Columns

_SPANS = ("spans/strategy_index", "spans/num_live", "spans/num_tokens", "spans/seconds")
COLUMNS = (*_SPANS, "strategy/names", "strategy/rounds", "strategy/tokens", "rollouts/response_ends",
           "rollouts/num_target_passes")  # fmt: skip
OWN, VERSION, JUDGED = "drafter/own_accept_length", "drafter/version", "drafter/own_sequences"
_NUM_BUCKETS = 24


@dataclass(frozen=True)
class Acceptance(Analysis):
    """``steps`` [S], ``strategies`` [G], buckets of live sequences [B]: 1, 2, 3-4, 5-8, ... up to ``bucket_tops``.

    ``accept_length`` [S]: tokens per target pass and sequence, of all responses. ``own_accept_length`` and
    ``drafter_version`` [S]: of the learned drafter alone, and its updates so far, from metrics.jsonl; NaN where it does
    not tell, or the drafter was not asked. ``step_tokens`` and ``step_rounds`` [S, G]. ``rounds``, ``tokens``,
    ``row_passes`` and ``seconds`` [G, B]: of rounds, over all steps; empty sums where the files tell of no rounds.
    """

    steps: NDArray[np.int64]
    accept_length: NDArray[np.float64]
    own_accept_length: NDArray[np.float64]
    drafter_version: NDArray[np.float64]
    strategies: tuple[str, ...]
    step_rounds: NDArray[np.int64]
    step_tokens: NDArray[np.int64]
    step_row_passes: NDArray[np.int64]
    bucket_tops: NDArray[np.int64]
    rounds: NDArray[np.int64]
    tokens: NDArray[np.int64]
    row_passes: NDArray[np.int64]
    seconds: NDArray[np.float64]

    @property
    def has_data(self) -> bool:
        return len(self.steps) > 0

    @property
    def by_bucket(self) -> NDArray[np.float64]:
        """Accept length [G, B]; NaN where no such round ran."""
        return _ratio(self.tokens, self.row_passes)

    @property
    def by_strategy(self) -> NDArray[np.float64]:
        """Accept length of each strategy's rounds, [G]."""
        return _ratio(self.tokens.sum(1), self.row_passes.sum(1))

    @property
    def by_step(self) -> NDArray[np.float64]:
        """Accept length of each strategy's rounds in each step, [S, G]."""
        return _ratio(self.step_tokens, self.step_row_passes)

    def bucket_names(self) -> list[str]:
        """``1``, ``2``, ``3-4``, ``5-8``, ..."""
        lows = np.concatenate([[1], self.bucket_tops[:-1] + 1])[: len(self.bucket_tops)]
        return [str(b) if a == b else f"{a}\u2013{b}" for a, b in zip(lows, self.bucket_tops, strict=True)]


@dataclass(frozen=True)
class _Row:
    """What is kept of a step."""

    by_name: dict[str, NDArray[np.int64]]
    """By strategy, in the order in which they came: rounds, tokens, row passes, [3]."""
    cells: dict[str, NDArray[np.float64]]
    """By strategy: rounds, tokens, row passes and seconds, [4, buckets]."""
    accept_length: float


def analyse_acceptance(run: RunLog) -> Acceptance:
    """Of all steps that have a readable log."""
    return take(run, ACCEPTANCE)


def _row(logs: StepLogs) -> _Row:
    by_name, cells = dict[str, NDArray[np.int64]](), dict[str, NDArray[np.float64]]()
    for rank, speaks in zip(logs.ranks, logs.speaks, strict=True):
        names = rank.texts("strategy/names")
        sums = np.zeros((len(names), 3), np.int64)
        sums[:, 0], sums[:, 1] = rank["strategy/rounds"], rank["strategy/tokens"]
        if len(rank[_SPANS[0]]) and speaks:
            tables = _tables(rank, len(names))
            sums[:, 2] = tables[:, 2].sum(1)
            _add(cells, names, tables)
        _add(by_name, names, sums)
    tokens = sum(int(rank["rollouts/response_ends"][-1]) for rank in logs.ranks if rank.num_rollouts)
    passes = sum(int(rank["rollouts/num_target_passes"].sum()) for rank in logs.ranks)
    return _Row(by_name, cells, tokens / passes if passes else float("nan"))


def _add(sums: dict[str, NDArray[Any]], names: Iterable[str], values: Iterable[NDArray[Any]]) -> None:
    for name, value in zip(names, values, strict=True):
        sums[name] = sums[name] + value if name in sums else value


def _tables(rank: Columns, num_strategies: int) -> NDArray[np.float64]:
    """Of a rank's rounds [G, 4, buckets]: their number, tokens, row passes and seconds."""
    index, live, tokens, taken = (rank[name] for name in _SPANS)
    rounds = index >= 0
    buckets = np.ceil(np.log2(np.maximum(live[rounds], 1))).astype(np.int64)
    cell = index[rounds].astype(np.int64) * _NUM_BUCKETS + np.minimum(buckets, _NUM_BUCKETS - 1)
    weights = (None, tokens[rounds], live[rounds], taken[rounds])
    size = num_strategies * _NUM_BUCKETS
    return np.stack([np.bincount(cell, w, size).reshape(-1, _NUM_BUCKETS) for w in weights], 1)


def _found(run: RunLog, steps: list[int], rows: list[_Row]) -> Acceptance:
    names = tuple(dict.fromkeys(name for row in rows for name in row.by_name))
    none = np.zeros(3, np.int64)
    by_step = np.array([[row.by_name.get(name, none) for name in names] for row in rows], np.int64)
    by_step = by_step.reshape(len(rows), len(names), 3)
    cells = {name: np.zeros((4, _NUM_BUCKETS)) for name in names}
    for row in rows:
        _add(cells, row.cells, row.cells.values())
    table = np.array([cells[name] for name in names]).reshape(-1, 4, _NUM_BUCKETS)
    used = np.flatnonzero(table[:, 0].sum(0))
    table = table[:, :, : used[-1] + 1 if len(used) else 0]
    found = Acceptance(
        run=run.name,
        verdict="",
        problems=run.problems,
        steps=np.array(steps, np.int64),
        accept_length=np.array([row.accept_length for row in rows], np.float64),
        own_accept_length=np.where(run.metric(JUDGED, steps) == 0, np.nan, run.metric(OWN, steps)),
        drafter_version=run.metric(VERSION, steps),
        strategies=names,
        step_rounds=by_step[:, :, 0],
        step_tokens=by_step[:, :, 1],
        step_row_passes=by_step[:, :, 2],
        bucket_tops=2 ** np.arange(table.shape[2], dtype=np.int64),
        rounds=table[:, 0].astype(np.int64),
        tokens=table[:, 1].astype(np.int64),
        row_passes=table[:, 2].astype(np.int64),
        seconds=table[:, 3],
    )
    return Acceptance(**{**vars(found), "verdict": _verdict(found)})


ACCEPTANCE = Survey(COLUMNS, (), _row, _found)


def _ratio(above: NDArray[np.int64], below: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.where(below > 0, above / np.maximum(below, 1), np.nan)


def _verdict(found: Acceptance) -> str:
    if len(found.steps) == 0:
        return "No step is in the rollout log yet."
    tokens = found.step_tokens.sum(0)
    drafted = sum(int(n) for name, n in zip(found.strategies, tokens, strict=True) if name != OFF)
    whole = int(tokens.sum())
    means = found.accept_length[np.isfinite(found.accept_length)]
    middle = f" (mean {means.mean():.2f} tokens per target pass and sequence)" if len(means) else ""
    if whole and drafted == 0:
        return f"Speculation was off in {span_of(found.steps)}: every pass gave a sequence one token{middle}."
    parts = [
        f"In {span_of(found.steps)} {share(drafted, whole)} of the tokens came from speculative rounds{middle}.",
        _extremes(found),
        _own(found),
        _most_used(found),
    ]
    return " ".join(filter(None, parts))


def _extremes(found: Acceptance) -> str:
    """The accept length with few live sequences and with many."""
    with_draft = [i for i, name in enumerate(found.strategies) if name != OFF]
    passes = found.row_passes[with_draft].sum(0)
    used = np.flatnonzero(passes)
    if len(used) == 0:
        return "The logs do not tell of single rounds, so not by live sequences."
    ratio = _ratio(found.tokens[with_draft].sum(0), passes)
    names = found.bucket_names()
    if len(used) == 1:
        return ""
    few, many = used[0], used[-1]
    return f"Speculative rounds gave {ratio[few]:.2f} with {names[few]} live and {ratio[many]:.2f} with {names[many]}."


def _own(found: Acceptance) -> str:
    """How the learned drafter came along, by its own drafts."""
    told = np.flatnonzero(np.isfinite(found.own_accept_length))
    if len(told) < 2:
        return ""
    first, last = found.own_accept_length[told[0]], found.own_accept_length[told[-1]]
    updates = found.drafter_version[told[-1]]
    after = f" after {updates:,.0f} updates" if np.isfinite(updates) and updates else ""
    if not after and np.nanmax(found.drafter_version) == 0:
        after = " without an update"
    return f"The drafter's own drafts (chain of 4) went from {first:.2f} to {last:.2f}{after}."


def _most_used(found: Acceptance) -> str:
    tokens = found.step_tokens.sum(0)
    if tokens.sum() == 0:
        return ""
    order = np.argsort(-tokens, kind="stable")[:3]
    return "Most tokens: " + listed(
        [f"{found.strategies[i]} {share(tokens[i], tokens.sum())}" for i in order if tokens[i]]
    ) + "."  # fmt: skip
