"""Where the time goes: seconds of a step by kind, tokens per second, and idle and harvested rank-seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.formatting import format_count
from tlt_hpc.extras.report.analysis.base import StepAnalysis
from tlt_hpc.extras.report.analysis.survey import Survey
from tlt_hpc.extras.report.analysis.time_kinds import KINDS, OF_PHASE, Kind, engine_kinds
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.series import step_numbers
from tlt_hpc.look.text_format import format_percent, format_seconds, format_step_range, join_names
from tlt_hpc.storage.rollout_log import StepSummary

_BETWEEN_STEPS = {Kind.SAVE, Kind.EVALUATE}


@dataclass(frozen=True)
class Throughput(StepAnalysis):
    """By step, [S]. ``seconds`` [S, K]: mean over the ranks for each of ``kinds``.

    ``idle_rank_seconds``: from a rank's last token to the release. ``harvested_rank_seconds``: the part of the idle
    time used for drafter updates that were kept. ``rollout_seconds`` and ``step_seconds``: wall-clock time; the latter
    excludes the time between steps.
    """

    kinds: tuple[Kind, ...]
    seconds: NDArray[np.float64]
    tokens: NDArray[np.int64]
    """Response tokens, without those that an earlier start generated: none of the seconds belong to them."""
    num_ranks: NDArray[np.int64]
    is_whole: NDArray[np.bool_]
    """True where all ranks' logs were read."""
    idle_rank_seconds: NDArray[np.float64]
    harvested_rank_seconds: NDArray[np.float64]
    rollout_seconds: NDArray[np.float64]
    step_seconds: NDArray[np.float64]

    @property
    def tokens_per_second(self) -> float | None:
        """Response tokens of all ranks per second of rollout, of the steps with the logs of all ranks."""
        known = np.isfinite(self.rollout_seconds) & self.is_whole
        taken = self.rollout_seconds[known].sum()
        return float(self.tokens[known].sum() / taken) if taken > 0 else None

    @property
    def total_idle_seconds(self) -> float:
        """Idle rank-seconds of the steps with the logs of all ranks."""
        return float(self.idle_rank_seconds[self.is_whole].sum())

    @property
    def total_harvested_seconds(self) -> float:
        """Harvested rank-seconds of the same steps."""
        return float(self.harvested_rank_seconds[self.is_whole].sum())

    @property
    def total_rollout_seconds(self) -> float:
        """Rank-seconds of the same steps' rollouts."""
        return float((self.rollout_seconds * self.num_ranks)[self.is_whole].sum())

    @property
    def ranks_in_words(self) -> str:
        """``2 ranks``, or ``2 to 4 ranks`` of a run that resumed with another number; ``no rank`` without logs."""
        numbers = sorted(set(self.num_ranks.tolist())) or [0]
        return format_count(numbers[0], "rank") if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} ranks"

    @property
    def verdict(self) -> str:
        """The use of a rank's time and the tokens per second, in one paragraph."""
        if not self.has_data:
            return "No step is in the rollout log yet."
        means = dict(zip(self.kinds, self.seconds.mean(0).tolist(), strict=True))
        whole = sum(value for kind, value in means.items() if kind not in _BETWEEN_STEPS)
        largest = sorted(means.keys() - _BETWEEN_STEPS, key=lambda kind: -means[kind])[:4]
        text = f"{format_step_range(self.steps).capitalize()}: a rank's step took {format_seconds(whole)} on average"
        text += f", of which {join_names([f'{kind} {format_percent(means[kind], whole)}' for kind in largest])}."
        if rate := self.tokens_per_second:
            text += f" All ranks together gave {rate:,.0f} response tokens a second of rollout."
        return f"{text} {self._waiting_sentence()}"

    def _waiting_sentence(self) -> str:
        if self.num_ranks.max() == 1:
            return "With one rank nobody waits for another."
        if not self.is_whole.any():
            return "No step has the logs of all ranks here, so it is unknown how long they waited."
        idle, rollout, harvested = self.total_idle_seconds, self.total_rollout_seconds, self.total_harvested_seconds
        text = f"Ranks waited for {format_percent(idle, rollout)} of their time in rollouts ({format_seconds(idle)} of "
        text += f"{format_seconds(rollout)}); "
        if harvested == 0:
            return f"{text}none of it was harvested."
        return f"{text}{format_seconds(harvested)} of that ({format_percent(harvested, idle)}) were harvested."


def rollout_seconds(ranks: list[StepSummary]) -> float:
    """Wall-clock seconds of a step's rollout and its refills."""
    total = 0.0
    for times in zip(*((rank.timing, *rank.refills) for rank in ranks), strict=False):
        total += max(t.release_seconds for t in times) - min(t.start_seconds for t in times)
    return total


def idle_seconds(rank: StepSummary) -> float:
    """Seconds that a rank waited for others, including harvested time; a clock may be set back in between."""
    return sum(max(0.0, timing.idle_seconds) for timing in (rank.timing, *rank.refills))


def _summarise_step(run: RunLog, ranks: list[StepSummary]) -> dict[str, Any]:
    """One step: sums over its ranks, and its times."""
    return {
        "num_ranks": ranks[0].num_ranks,
        "is_whole": len(ranks) == ranks[0].num_ranks,
        "seconds": np.mean([_seconds_by_kind(rank) for rank in ranks], 0),
        "tokens": sum(int(rank.response_lengths.sum()) for rank in ranks),
        "idle_rank_seconds": sum(map(idle_seconds, ranks)),
        "harvested_rank_seconds": sum(rank.harvested_seconds for rank in ranks),
        "rollout_seconds": rollout_seconds(ranks),
    }


def _seconds_by_kind(rank: StepSummary) -> list[float]:
    """Seconds of each of ``KINDS``."""
    in_engine = np.bincount(engine_kinds(rank), rank.spans.seconds, len(KINDS))
    by_kind = dict(zip(KINDS, in_engine.tolist(), strict=True))
    for phase in rank.phases:
        if phase.name in OF_PHASE:
            by_kind[OF_PHASE[phase.name]] += phase.end_seconds - phase.start_seconds
    by_kind[Kind.TRAIN] = rank.harvested_seconds - by_kind[Kind.AHEAD]
    by_kind[Kind.IDLE] = max(0.0, idle_seconds(rank) - rank.harvested_seconds)
    return list(by_kind.values())


def _combine_steps(run: RunLog, steps: list[int], rows: list[dict[str, Any]]) -> Throughput:
    def column(name: str) -> NDArray[Any]:
        return np.array([row[name] for row in rows])

    table = column("seconds").reshape(-1, len(KINDS))
    used = np.flatnonzero(table.sum(0) > 1e-4 * table.sum())
    kept = np.nan_to_num(run.metric("rollout/kept_tokens", steps))
    return Throughput(
        run=run.name,
        problems=run.problems,
        steps=step_numbers(steps),
        kinds=tuple(KINDS[i] for i in used),
        seconds=table[:, used],
        tokens=(column("tokens") - kept).astype(np.int64),
        num_ranks=column("num_ranks").astype(np.int64),
        is_whole=column("is_whole").astype(np.bool_),
        idle_rank_seconds=column("idle_rank_seconds"),
        harvested_rank_seconds=column("harvested_rank_seconds"),
        rollout_seconds=column("rollout_seconds"),
        step_seconds=run.metric("timing_s/step", steps),
    )


THROUGHPUT = Survey(_summarise_step, _combine_steps)
