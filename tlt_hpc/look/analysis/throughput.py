"""Where the time goes: seconds of a step by kind, tokens per second, and idle and harvested rank-seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.words import count
from tlt_hpc.look.analysis.base import Analysis
from tlt_hpc.look.analysis.kinds import KINDS, OF_PHASE, Kind, engine_kinds
from tlt_hpc.look.analysis.survey import StepLogs, Survey
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.words import listed, seconds, share, span_of
from tlt_hpc.storage.rollout_log import Columns

_SPANS = ("spans/strategy_index", "spans/num_tokens", "spans/seconds")
_PHASES = ("phases/names", "phases/start_seconds", "phases/end_seconds")
_NAMES, _REFILLS, _ENDS = "strategy/names", "timing/refills", "rollouts/response_ends"
_TIMES = ("timing/start_seconds", "timing/last_token_seconds", "timing/release_seconds")
_HARVESTED = "harvested_seconds"
ENGINE = (Kind.PREFILL, Kind.DECODE, Kind.SPECULATE)
_FEWEST = 0.02
"""Share of the decoded tokens from which a kind of decoding gets a rate."""
_BETWEEN_STEPS = {Kind.SAVE, Kind.EVALUATE}


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
    """Response tokens, without those that an earlier start generated: none of the seconds belong to them."""
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
    def has_data(self) -> bool:
        return len(self.steps) > 0

    @property
    def rates(self) -> dict[str, float]:
        """Tokens per second over all steps: a rank's engine by kind, and all ranks in rollouts and in whole steps."""
        given, taken = self.engine_tokens.sum(0), self.engine_seconds.sum(0)
        few = _FEWEST * given[1:].sum()  # the rate of a few rounds, mostly trials, would mislead
        least = (np.inf if self.is_on_gpu else 0.0, few, few)
        rates = {str(kind): given[i] / taken[i] for i, kind in enumerate(ENGINE) if taken[i] and given[i] >= least[i]}
        for name, each in (("rollout", self.rollout_seconds), ("step", self.step_seconds)):
            known = np.isfinite(each) & self.is_whole
            if each[known].sum() > 0:
                rates[f"{name}, all ranks"] = self.tokens[known].sum() / each[known].sum()
        return {name: float(rate) for name, rate in rates.items()}

    @property
    def idle(self) -> float:
        """Idle rank-seconds of the steps with the logs of all ranks."""
        return float(self.idle_rank_seconds[self.is_whole].sum())

    @property
    def harvested(self) -> float:
        """Harvested rank-seconds of the same steps."""
        return float(self.harvested_rank_seconds[self.is_whole].sum())

    @property
    def rollout(self) -> float:
        """Rank-seconds of the same steps' rollouts."""
        return float((self.rollout_seconds * self.num_ranks)[self.is_whole].sum())

    def total(self, kind: Kind) -> float:
        """Seconds of a kind over all steps, mean over the ranks."""
        return float(self.seconds[:, self.kinds.index(kind)].sum()) if kind in self.kinds else 0.0

    @property
    def ranks_in_words(self) -> str:
        """``2 ranks``, or ``2 to 4 ranks`` of a run that resumed with another number; ``no rank`` without logs."""
        numbers = sorted(set(self.num_ranks.tolist())) or [0]
        return count(numbers[0], "rank") if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} ranks"

    @property
    def verdict(self) -> str:
        if not self.has_data:
            return "No step is in the rollout log yet."
        means = {kind: self.total(kind) / len(self.steps) for kind in self.kinds if kind not in _BETWEEN_STEPS}
        whole = sum(means.values())
        largest = sorted(means, key=lambda kind: -means[kind])[:4]
        parts = [
            f"{span_of(self.steps).capitalize()}: a rank's step took {seconds(whole)} on average, of which "
            f"{listed([f'{kind} {share(means[kind], whole)}' for kind in largest])}."
        ]
        rates = self.rates
        engine = [f"{rates[kind]:,.0f} in {kind}" for kind in ENGINE if kind in rates]
        parts.append(f"A rank's engine handled {listed(engine)} (tokens a second)." if engine else "")
        rate = rates.get("rollout, all ranks")
        parts.append(f"All ranks together gave {rate:,.0f} response tokens a second of rollout." if rate else "")
        return " ".join(filter(None, [*parts, self._waiting()]))

    def _waiting(self) -> str:
        if self.num_ranks.max() == 1:
            return "With one rank nobody waits for another."
        if not self.is_whole.any():
            return "No step has the logs of all ranks here, so it is unknown how long they waited."
        text = f"Ranks waited for {share(self.idle, self.rollout)} of their time in rollouts ({seconds(self.idle)} of "
        text += f"{seconds(self.rollout)}); "
        if self.harvested == 0:
            return f"{text}none of it was harvested."
        return f"{text}{seconds(self.harvested)} of that ({share(self.harvested, self.idle)}) were harvested."


_Row = dict[str, Any]
"""One step: sums over its ranks, and its times; ``engine`` [2, 3]: tokens and seconds of each of ``ENGINE``."""


def _row(logs: StepLogs) -> _Row:
    rollouts = [_rollouts(rank) for rank in logs.ranks]
    number = min(map(len, rollouts))
    times = np.stack([each[:number] for each in rollouts])  # [ranks, rollouts, 3]
    return {
        "num_ranks": max(rank.num_ranks for rank in logs.ranks),
        "num_logs": len(logs.ranks),
        "by_kind": np.sum([_by_kind(*each) for each in zip(logs.ranks, rollouts, strict=True)], 0),
        "engine": np.sum([_engine(rank) for rank in logs.counted], 0) + np.zeros((2, 3)),
        "tokens": sum(int(rank[_ENDS][-1]) for rank in logs.ranks if rank.num_rollouts),
        "idle": sum(map(_idle, rollouts)),
        "harvested": sum(rank.attributes[_HARVESTED] for rank in logs.ranks),
        "rollout_seconds": float((times[:, :, 2].max(0) - times[:, :, 0].min(0)).sum()),
        "began": float(times[:, 0, 0].min()),
        "ended": max(float(max(each[-1, 2], rank[_PHASES[2]].max(initial=0.0)))
                  for rank, each in zip(logs.ranks, rollouts, strict=True)),
    }  # fmt: skip


def _rollouts(rank: Columns) -> NDArray[np.float64]:
    """Start, last token and release of each rollout, [R, 3]."""
    first = [rank.attributes[name] for name in _TIMES]
    return np.concatenate([[first], rank[_REFILLS].reshape(-1, 3)])


def _idle(rollouts: NDArray[np.float64]) -> float:
    return float(np.maximum(rollouts[:, 2] - rollouts[:, 1], 0.0).sum())  # a clock may be set back in between


def _engine(rank: Columns) -> NDArray[np.float64]:
    index, tokens, taken = (rank[name] for name in _SPANS)
    if not len(index):
        return np.zeros((2, 3))
    kinds, chosen = engine_kinds(index, rank.texts(_NAMES)), [KINDS.index(kind) for kind in ENGINE]
    return np.array([np.bincount(kinds, each, len(KINDS))[chosen] for each in (tokens, taken)])


def _by_kind(rank: Columns, rollouts: NDArray[np.float64]) -> list[float]:
    """Seconds of each of ``KINDS``."""
    by_kind = dict.fromkeys(KINDS, 0.0) | dict(zip(ENGINE, _engine(rank)[1].tolist(), strict=True))
    if not len(rank[_SPANS[0]]):
        by_kind[Kind.GENERATE] = float((rollouts[:, 1] - rollouts[:, 0]).sum())
    for name, start, end in zip(rank.texts(_PHASES[0]), rank[_PHASES[1]], rank[_PHASES[2]], strict=True):
        if name in OF_PHASE:
            by_kind[OF_PHASE[name]] += float(end - start)
    by_kind[Kind.TRAIN] = rank.attributes[_HARVESTED]
    by_kind[Kind.IDLE] = max(0.0, _idle(rollouts) - by_kind[Kind.TRAIN])
    return list(by_kind.values())


def _found(run: RunLog, steps: list[int], rows: list[_Row]) -> Throughput:
    def column(name: str) -> NDArray[Any]:
        return np.array([row[name] for row in rows])

    table = np.array([row["by_kind"] / row["num_logs"] for row in rows]).reshape(-1, len(KINDS))
    used = np.flatnonzero(table.sum(0) > 1e-4 * table.sum())
    engine = column("engine").reshape(-1, 2, 3)
    kept = np.nan_to_num(run.metric("rollout/kept_tokens", steps))
    return Throughput(
        run=run.name,
        problems=run.problems,
        steps=np.array(steps, np.int64),
        kinds=tuple(KINDS[i] for i in used),
        seconds=table[:, used],
        engine_tokens=engine[:, 0].astype(np.int64),
        engine_seconds=engine[:, 1],
        tokens=(column("tokens") - kept).astype(np.int64),
        num_ranks=column("num_ranks").astype(np.int64),
        is_whole=column("num_logs") == column("num_ranks"),
        idle_rank_seconds=column("idle"),
        harvested_rank_seconds=column("harvested"),
        rollout_seconds=column("rollout_seconds"),
        step_seconds=run.metric("timing_s/step", steps),
        began=column("began"),
        ended=column("ended"),
        is_on_gpu=any(host.gpus for start in run.starts for host in start.hosts),
    )


THROUGHPUT = Survey((*_SPANS, *_PHASES, _NAMES, _REFILLS, _ENDS), (*_TIMES, _HARVESTED), _row, _found)
