"""Where the time goes: seconds of a step by kind, tokens per second, and idle and harvested rank-seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.words import count
from tlt_hpc.look.analysis.base import Analysis
from tlt_hpc.look.analysis.kinds import KINDS, OF_PHASE, Kind, engine_kinds
from tlt_hpc.look.analysis.survey import StepLogs, Survey, take
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.words import listed, seconds, share, span_of
from tlt_hpc.storage.log_columns import Columns

_SPANS = ("spans/strategy_index", "spans/num_tokens", "spans/seconds")
_PHASES = ("phases/names", "phases/start_seconds", "phases/end_seconds")
COLUMNS = (*_SPANS, *_PHASES, "strategy/names", "timing/refills", "rollouts/response_ends")
ATTRIBUTES = ("timing/start_seconds", "timing/last_token_seconds", "timing/release_seconds", "harvested_seconds")
KEPT_TOKENS = "rollout/kept_tokens"
ENGINE = (Kind.PREFILL, Kind.DECODE, Kind.SPECULATE)
_FEWEST = 0.02
"""Share of the decoded tokens from which a kind of decoding gets a rate."""
_NOT_THE_STEPS = {Kind.SAVE, Kind.EVALUATE}
"""Kinds that happen between two steps."""


@dataclass(frozen=True)
class Throughput(Analysis):
    """By step, [S]. ``seconds`` [S, K]: mean over the ranks for each of ``kinds``.

    ``engine_tokens`` and ``engine_seconds`` [S, 3]: sums over the ranks for prefill, plain and speculative decoding.
    ``idle_rank_seconds``: from a rank's last token to the release. ``harvested_rank_seconds``: the part of the idle
    time used for drafter updates that were kept. ``rollout_seconds`` and ``step_seconds``: wall-clock time; the latter
    excludes the time between steps.
    """

    steps: NDArray[np.int64]
    kinds: tuple[Kind, ...]
    seconds: NDArray[np.float64]
    engine_tokens: NDArray[np.int64]
    engine_seconds: NDArray[np.float64]
    tokens: NDArray[np.int64]
    kept_tokens: NDArray[np.int64]
    """The part of ``tokens`` that an earlier start generated: none of the seconds belong to them."""
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
    """On a GPU the log has the launch of a prefill pass, not its end, so that prefill has no rate."""

    @property
    def verdict(self) -> str:
        return _verdict(self)

    @property
    def has_data(self) -> bool:
        return len(self.steps) > 0

    @property
    def rates(self) -> dict[str, float]:
        """Tokens per second over all steps: a rank's engine by kind, and all ranks in rollouts and in whole steps."""
        taken, given = self.engine_seconds.sum(0), self.engine_tokens.sum(0)
        few = _FEWEST * given[1:].sum()  # the rate of a few rounds, mostly trials, would mislead
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

    @property
    def whole_idle(self) -> float:
        """Idle rank-seconds of the steps with the logs of all ranks."""
        return float(self.idle_rank_seconds[self.is_whole].sum())

    @property
    def whole_harvested(self) -> float:
        """Harvested rank-seconds of the same steps."""
        return float(self.harvested_rank_seconds[self.is_whole].sum())

    @property
    def whole_rollout(self) -> float:
        """Rank-seconds of the same steps' rollouts."""
        return float((self.rollout_seconds * self.num_ranks)[self.is_whole].sum())

    @property
    def ranks_in_words(self) -> str:
        """``2 ranks``, or ``2 to 4 ranks`` of a run that resumed with another number; ``no rank`` without logs."""
        numbers = sorted(set(self.num_ranks.tolist()))
        if len(numbers) > 1:
            return f"{numbers[0]} to {numbers[-1]} ranks"
        return count(numbers[0], "rank") if numbers else "no rank"


@dataclass(frozen=True)
class _Rank:
    """One rank in one step."""

    num_ranks: int
    """Of the whole step."""
    by_kind: NDArray[np.float64]
    engine_tokens: NDArray[np.int64]
    engine_seconds: NDArray[np.float64]
    tokens: int
    idle: float
    harvested: float
    rollouts: NDArray[np.float64]
    """[R, 3]: start, last token, release."""
    ended: float


def analyse_throughput(run: RunLog) -> Throughput:
    """Analyse all steps with a readable log."""
    return take(run, THROUGHPUT)


def _row(logs: StepLogs) -> list[_Rank]:
    return [_rank(*each) for each in zip(logs.ranks, logs.is_first_of_replica, strict=True)]


def _found(run: RunLog, steps: list[int], ranks: list[list[_Rank]]) -> Throughput:
    sizes = [max(rank.num_ranks for rank in of) for of in ranks]
    table = np.array([np.mean([rank.by_kind for rank in of], 0) for of in ranks]).reshape(-1, len(KINDS))
    used = np.flatnonzero(table.sum(0) > 1e-3 * table.sum() / 10)
    return Throughput(
        run=run.name,
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
        is_on_gpu=any(host.gpus for start in run.starts for host in start.hosts),
    )


THROUGHPUT = Survey(COLUMNS, ATTRIBUTES, _row, _found)


def _rank(columns: Columns, is_first_of_replica: bool) -> _Rank:
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
        num_ranks=columns.num_ranks,
        by_kind=np.array([by_kind[kind] for kind in KINDS]),
        engine_tokens=tokens * is_first_of_replica,
        engine_seconds=taken * is_first_of_replica,
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
    """Sum over a step's rollouts of the time from the first rank's start to the last release."""
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
    if not found.is_whole.any():
        return "Of no step are the logs of all ranks here, so what they waited for is not told."
    idle, harvested, whole = found.whole_idle, found.whole_harvested, found.whole_rollout
    waited = f"Ranks waited for {share(idle, whole)} of their time in rollouts ({seconds(idle)} of {seconds(whole)})"
    if harvested == 0:
        return f"{waited}; nothing of it was harvested."
    return f"{waited}; {seconds(harvested)} of that ({share(harvested, idle)}) were harvested for the drafter."
