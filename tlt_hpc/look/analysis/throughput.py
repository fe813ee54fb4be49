"""Where the seconds go, and how many tokens they give: a step's shares by kind, tokens a second, idle and harvested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.look.analysis.environment import read_environment
from tlt_hpc.look.analysis.kinds import KINDS, OF_PHASE, Kind, engine_kinds
from tlt_hpc.look.analysis.result import Analysis, listed, seconds, share, span_of
from tlt_hpc.look.analysis.run_log import RunLog
from tlt_hpc.look.analysis.survey import StepLogs, Survey, take
from tlt_hpc.storage.log_columns import Columns

_SPANS = ("spans/strategy_index", "spans/num_tokens", "spans/seconds")
_PHASES = ("phases/names", "phases/start_seconds", "phases/end_seconds")
COLUMNS = (*_SPANS, *_PHASES, "strategy/names", "timing/refills", "rollouts/response_ends")
ATTRIBUTES = ("timing/start_seconds", "timing/last_token_seconds", "timing/release_seconds", "harvested_seconds")
KEPT_TOKENS = "rollout/kept_tokens"
ENGINE = (Kind.PREFILL, Kind.DECODE, Kind.SPECULATE)
_FEWEST = 0.02
"""Of the decoded tokens, from which a kind of decoding has a rate."""
_NOT_THE_STEPS = {Kind.SAVE, Kind.EVALUATE}
"""Between two steps."""


@dataclass(frozen=True)
class Throughput(Analysis):
    """By step, [S]; ``seconds`` [S, K]: of each of ``kinds``, a mean over the ranks.

    ``engine_tokens`` and ``engine_seconds`` [S, 3]: of prefill, plain and speculative decoding, sums over the ranks.
    ``idle_rank_seconds``: from a rank's last token to the release; ``harvested_rank_seconds``: the part of them in
    drafter updates that entered the merge. ``rollout_seconds`` and ``step_seconds``: of the clock, the latter without
    what lies between steps.
    """

    steps: NDArray[np.int64]
    kinds: tuple[Kind, ...]
    seconds: NDArray[np.float64]
    engine_tokens: NDArray[np.int64]
    engine_seconds: NDArray[np.float64]
    tokens: NDArray[np.int64]
    kept_tokens: NDArray[np.int64]
    """Of the tokens, those of responses that an earlier start had generated: none of the seconds are theirs."""
    num_ranks: NDArray[np.int64]
    is_whole: NDArray[np.bool_]
    """Whether all ranks' logs were read."""
    idle_rank_seconds: NDArray[np.float64]
    harvested_rank_seconds: NDArray[np.float64]
    rollout_seconds: NDArray[np.float64]
    step_seconds: NDArray[np.float64]
    began: NDArray[np.float64]
    ended: NDArray[np.float64]
    """First start of a rollout and last end of a phase, in seconds since the epoch."""
    is_on_gpu: bool
    """Then the log has when a prefill pass was handed over, and not when the GPU was done with it: it has no rate."""

    @property
    def has_data(self) -> bool:
        return len(self.steps) > 0

    @property
    def rates(self) -> dict[str, float]:
        """Tokens a second over all steps: of a rank's engine by kind, of all ranks in rollouts and in whole steps."""
        taken, given = self.engine_seconds.sum(0), self.engine_tokens.sum(0)
        few = _FEWEST * given[1:].sum()  # of a few rounds, mostly trials, a rate would mislead
        least = (np.inf if self.is_on_gpu else 0.0, few, few)
        rates = {
            str(kind): float(own / s)
            for kind, own, s, enough in zip(ENGINE, given, taken, least, strict=True)
            if s > 0 and own >= enough
        }
        whole = {"rollout, all ranks": self.rollout_seconds, "step, all ranks": self.step_seconds}
        generated = self.tokens - self.kept_tokens
        told = {name: np.isfinite(each) & self.is_whole for name, each in whole.items()}
        sums = {name: (generated[told[name]].sum(), each[told[name]].sum()) for name, each in whole.items()}
        return rates | {name: float(given / taken) for name, (given, taken) in sums.items() if taken > 0}


@dataclass(frozen=True)
class _Rank:
    """What one file adds to its step."""

    by_kind: NDArray[np.float64]
    engine_tokens: NDArray[np.int64]
    engine_seconds: NDArray[np.float64]
    tokens: int
    idle: float
    harvested: float
    rollouts: NDArray[np.float64]
    """[R, 3]: start, last token, release."""
    ended: float


@dataclass(frozen=True)
class _Row:
    """What is kept of a step."""

    ranks: list[_Rank]
    num_ranks: int


def analyse_throughput(run: RunLog) -> Throughput:
    """Of all steps that have a readable log."""
    return take(run, THROUGHPUT)


def _row(logs: StepLogs) -> _Row:
    ranks = [_rank(columns, speaks) for columns, speaks in zip(logs.ranks, logs.speaks, strict=True)]
    return _Row(ranks, max(columns.num_ranks for columns in logs.ranks))


def _found(run: RunLog, steps: list[int], rows: list[_Row]) -> Throughput:
    ranks, sizes = [row.ranks for row in rows], [row.num_ranks for row in rows]
    table = np.array([np.mean([rank.by_kind for rank in of], 0) for of in ranks]).reshape(-1, len(KINDS))
    used = np.flatnonzero(table.sum(0) > 1e-3 * table.sum() / 10)
    found = Throughput(
        run=run.name,
        verdict="",
        problems=run.problems,
        steps=np.array(steps, np.int64),
        kinds=tuple(KINDS[i] for i in used),
        seconds=table[:, used],
        engine_tokens=np.array([sum(r.engine_tokens for r in of) for of in ranks], np.int64).reshape(-1, 3),
        engine_seconds=np.array([sum(r.engine_seconds for r in of) for of in ranks]).reshape(-1, 3),
        tokens=np.array([sum(r.tokens for r in of) for of in ranks], np.int64),
        kept_tokens=np.nan_to_num(run.metric(KEPT_TOKENS, steps)).astype(np.int64),
        num_ranks=np.array(sizes, np.int64),
        is_whole=np.array([len(of) == size for of, size in zip(ranks, sizes, strict=True)], np.bool_),
        idle_rank_seconds=np.array([sum(r.idle for r in of) for of in ranks]),
        harvested_rank_seconds=np.array([sum(r.harvested for r in of) for of in ranks]),
        rollout_seconds=np.array([_clock_seconds(of) for of in ranks]),
        step_seconds=run.metric("timing_s/step", steps),
        began=np.array([min(r.rollouts[0, 0] for r in of) for of in ranks]),
        ended=np.array([max(r.ended for r in of) for of in ranks]),
        is_on_gpu=any(host.gpus for start in read_environment(run) for host in start.hosts),
    )
    return Throughput(**{**vars(found), "verdict": _verdict(found)})


THROUGHPUT = Survey(COLUMNS, ATTRIBUTES, _row, _found)


def _rank(columns: Columns, speaks: bool) -> _Rank:
    own = [columns.attributes[name] for name in ATTRIBUTES[:3]]
    rollouts = np.concatenate([[own], columns["timing/refills"].reshape(-1, 3)])
    by_kind = dict.fromkeys(KINDS, 0.0)
    tokens, taken = _engine(columns)
    for kind, value in zip(ENGINE, taken, strict=True):
        by_kind[kind] = float(value)
    if not len(columns[_SPANS[0]]):
        by_kind[Kind.GENERATE] = float((rollouts[:, 1] - rollouts[:, 0]).sum())
    for name, start, end in zip(columns.texts(_PHASES[0]), columns[_PHASES[1]], columns[_PHASES[2]], strict=True):
        if name in OF_PHASE:
            by_kind[OF_PHASE[name]] += float(end - start)
    idle = float(np.maximum(rollouts[:, 2] - rollouts[:, 1], 0.0).sum())  # a clock may be set back in between
    harvested = columns.attributes["harvested_seconds"]
    by_kind[Kind.TRAIN], by_kind[Kind.IDLE] = harvested, max(0.0, idle - harvested)
    return _Rank(
        by_kind=np.array([by_kind[kind] for kind in KINDS]),
        engine_tokens=tokens * speaks,
        engine_seconds=taken * speaks,
        tokens=int(columns["rollouts/response_ends"][-1]) if columns.num_rollouts else 0,
        idle=idle,
        harvested=harvested,
        rollouts=rollouts,
        ended=float(max(rollouts[-1, 2], columns[_PHASES[2]].max(initial=0.0))),
    )


def _engine(columns: Columns) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens and seconds of prefill, plain and speculative decoding."""
    index, tokens, taken = (columns[name] for name in _SPANS)
    if len(index) == 0:
        return np.zeros(3, np.int64), np.zeros(3)
    kinds = engine_kinds(index, columns.texts("strategy/names"))
    chosen = [KINDS.index(kind) for kind in ENGINE]
    return (
        np.bincount(kinds, tokens, len(KINDS))[chosen].astype(np.int64),
        np.bincount(kinds, taken, len(KINDS))[chosen].astype(np.float64),
    )


def _clock_seconds(ranks: Sequence[_Rank]) -> float:
    """From the first rank's start to the last's release, of each rollout of a step."""
    rollouts = np.stack([rank.rollouts[: min(len(r.rollouts) for r in ranks)] for rank in ranks])
    return float((rollouts[:, :, 2].max(0) - rollouts[:, :, 0].min(0)).sum())


def _verdict(found: Throughput) -> str:
    if len(found.steps) == 0:
        return "No step is in the rollout log yet."
    rates = found.rates
    parts = [_shares(found)]
    told = [f"{rates[str(kind)]:,.0f} in {_NAMES[kind]}" for kind in ENGINE if str(kind) in rates]
    if told:
        parts.append(f"A rank's engine handled {listed(told)} (tokens a second).")
    if "rollout, all ranks" in rates:
        parts.append(f"All ranks together gave {rates['rollout, all ranks']:,.0f} response tokens a second of rollout.")
    parts.append(_waiting(found))
    return " ".join(filter(None, parts))


_NAMES = {Kind.PREFILL: "prefill", Kind.DECODE: "plain decoding", Kind.SPECULATE: "speculative decoding"}


def _shares(found: Throughput) -> str:
    means = {kind: float(found.seconds[:, i].mean()) for i, kind in enumerate(found.kinds)}
    whole = sum(value for kind, value in means.items() if kind not in _NOT_THE_STEPS)
    order = sorted((kind for kind in means if kind not in _NOT_THE_STEPS), key=lambda kind: -means[kind])
    told = [f"{kind} {share(means[kind], whole)}" for kind in order[:4]]
    return (
        f"{span_of(found.steps).capitalize()}: a rank's step took {seconds(whole)} on average, of which {listed(told)}."
    )


def _waiting(found: Throughput) -> str:
    if found.num_ranks.max() == 1:
        return "With one rank nobody waits for another."
    told = found.is_whole
    if not told.any():
        return "Of no step are the logs of all ranks here, so what they waited for is not told."
    idle, harvested = float(found.idle_rank_seconds[told].sum()), float(found.harvested_rank_seconds[told].sum())
    whole = float((found.rollout_seconds * found.num_ranks)[told].sum())
    waited = f"Ranks waited for {share(idle, whole)} of their time in rollouts ({seconds(idle)} of {seconds(whole)})"
    if harvested == 0:
        return f"{waited}; nothing of it was harvested."
    return f"{waited}; {seconds(harvested)} of that ({share(harvested, idle)}) were harvested for the drafter."
