"""What each rank did when in one step: the tail, and its idle and harvested time.

Times of different ranks are compared as their nodes' clocks show them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.formatting import format_count
from tlt_hpc.common.records import PREFILL
from tlt_hpc.extras.report.analysis.base import Analysis
from tlt_hpc.extras.report.analysis.throughput import idle_seconds, rollout_seconds
from tlt_hpc.extras.report.analysis.time_kinds import Kind, Pieces, split_step_by_kind
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.text_format import format_percent, format_seconds, join_names
from tlt_hpc.storage.rollout_log import StepSummary

_GRID = 1200
_NO_TAIL = 0.02
"""Idle share of the ranks' rollout time below which a step has no tail."""
_OUTSIDE = (Kind.REWARD, Kind.UPDATE, Kind.REFRESH, Kind.SAVE, Kind.EVALUATE)


@dataclass(frozen=True)
class Lane:
    """One rank; times in seconds since the first rank's rollout began."""

    rank: int
    pieces: Pieces
    rollouts: NDArray[np.float64]
    """[R, 3]: start, last token and release of each rollout."""
    idle_seconds: float
    """From the rank's last token to the release, including harvested time."""
    harvested_seconds: float

    @property
    def finish_seconds(self) -> float:
        """The time of the rank's last token, in seconds since the first rank's rollout began."""
        return float(self.rollouts[-1, 1])


@dataclass(frozen=True)
class Timeline(Analysis):
    """The ranks of a step. ``live`` [T]: sequences still being generated on all ranks at ``live_seconds`` [T]."""

    step: int
    num_ranks: int
    lanes: tuple[Lane, ...]
    live_seconds: NDArray[np.float64]
    live: NDArray[np.int64]
    tails: tuple[tuple[float, float], ...]
    """For each rollout of the step: start (the first rank's last token) and end (release); none with one rank."""
    rollout_seconds: float
    start_seconds: float
    """Time 0, in seconds since the epoch."""

    @property
    def idle_seconds(self) -> float:
        """Idle rank-seconds of all lanes, including harvested time."""
        return sum(lane.idle_seconds for lane in self.lanes)

    @property
    def harvested_seconds(self) -> float:
        """Harvested rank-seconds of all lanes."""
        return sum(lane.harvested_seconds for lane in self.lanes)

    def kind_seconds(self, kind: Kind) -> float:
        """Seconds of a kind, mean over the ranks."""
        return sum(lane.pieces.seconds().get(kind, 0.0) for lane in self.lanes) / len(self.lanes)

    @property
    def verdict(self) -> str:
        """The rollout's seconds and the tail of the step, in one paragraph."""
        num_lanes, refills = len(self.lanes), len(self.lanes[0].rollouts) - 1
        of = f"{num_lanes} of {self.num_ranks} ranks" if num_lanes < self.num_ranks else format_count(num_lanes, "rank")
        again = f" with {format_count(refills, 'refill')}" if refills else ""
        plain, drafted = self.kind_seconds(Kind.DECODE), self.kind_seconds(Kind.SPECULATE)
        outside = [
            f"{format_seconds(value)} {kind}" for kind in _OUTSIDE if (value := self.kind_seconds(kind)) >= 0.001
        ]
        return (
            f"Step {self.step}, {of}: its rollout{again} took {format_seconds(self.rollout_seconds)}. "
            f"{format_percent(drafted, plain + drafted)} of the decoding time was speculative. {self._tail_sentence()}"
            + (f" Outside of the rollout: {join_names(outside)} (mean of the ranks)." if outside else "")
        )

    def _tail_sentence(self) -> str:
        idle, harvested = self.idle_seconds, self.harvested_seconds
        waited = format_seconds(idle)
        if self.num_ranks == 1:
            return "With one rank nobody waits for another."
        if len(self.lanes) < self.num_ranks:
            return f"The other ranks have no log, so the tail is unknown; these were idle for {waited} together."
        total = len(self.lanes) * self.rollout_seconds
        if idle < _NO_TAIL * total:
            return f"There is no tail to speak of: the ranks waited for {format_percent(idle, total)} of it ({waited})."
        length = sum(end - start for start, end in self.tails)
        first, last = (choose(self.lanes, key=lambda lane: lane.finish_seconds).rank for choose in (min, max))
        return (
            f"The tail lasted {format_seconds(length)}: rank {first} was the first to finish and rank {last} the last. "
            f"Ranks were idle for {waited} together, {format_percent(idle, total)} of their rollout time; "
            f"{format_seconds(harvested)} of that ({format_percent(harvested, idle)}) were harvested."
        )


def analyse_timeline(run: RunLog, step: int | None = None) -> Timeline:
    """Analyse a step; by default the last one with the logs of all its ranks.

    Raises:
        UserError: there is no such step, or none of its logs can be read.
    """
    chosen = run.last_whole_step() if step is None else step - 1
    steps = run.logged_steps
    if not steps:
        raise UserError(f"{run.folder.path} has no step in its rollout log yet")
    if chosen is None or chosen not in steps:
        there = f"{steps[0] + 1} to {steps[-1] + 1}"
        raise UserError(f"{run.folder.path} has no step {step} in its rollout log; it has {there}")
    ranks = run.read_rank_summaries(chosen)
    if not ranks:
        raise UserError(f"no log of step {chosen + 1} can be read; {run.problems[-1]}")
    zero = min(rank.timing.start_seconds for rank in ranks)
    lanes = [_lane(rank, zero) for rank in ranks]
    times, live = _live_sequences(run.first_ranks_of_replicas(ranks), zero)
    rollouts = zip(*(lane.rollouts.tolist() for lane in lanes), strict=False)  # each one's times, of all ranks
    tails = [(min(last for _, last, _ in each), max(end for *_, end in each)) for each in rollouts]
    return Timeline(
        run=run.name,
        problems=run.problems,
        step=chosen + 1,
        num_ranks=ranks[0].num_ranks,
        lanes=tuple(lanes),
        live_seconds=times,
        live=live,
        tails=tuple(tails) if len(lanes) > 1 else (),
        rollout_seconds=rollout_seconds(ranks),
        start_seconds=zero,
    )


def _lane(rank: StepSummary, zero: float) -> Lane:
    return Lane(
        rank=rank.rank,
        pieces=split_step_by_kind(rank, zero),
        rollouts=_rollouts(rank) - zero,
        idle_seconds=idle_seconds(rank),
        harvested_seconds=rank.harvested_seconds,
    )


def _rollouts(rank: StepSummary) -> NDArray[np.float64]:
    timings = (rank.timing, *rank.refills)
    return np.array([[t.start_seconds, t.last_token_seconds, t.release_seconds] for t in timings])


def _live_sequences(ranks: list[StepSummary], zero: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Live sequences of all ranks over the time of the rollouts; empty if no log has rounds."""
    if not any(len(rank.spans) for rank in ranks):
        return np.empty(0), np.empty(0, np.int64)
    times = np.linspace(zero, max(_rollouts(rank)[:, 2].max() for rank in ranks), _GRID)
    live = np.zeros(_GRID, np.int64)
    for rank in ranks:
        rounds = rank.spans.strategy_index != PREFILL
        starts, counts = rank.spans.start_seconds[rounds], rank.spans.num_live[rounds]
        if len(starts):
            own = counts[np.maximum(0, np.searchsorted(starts, times, "right") - 1)].astype(np.int64)
            inside = [(times >= start) & (times < last) for start, last, _ in _rollouts(rank)]
            live += np.where(np.any(inside, axis=0), own, 0)
    return times - zero, live
