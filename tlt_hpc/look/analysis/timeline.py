"""Which rank did what when, in one step: the picture of a tail, of what was idle in it and what was harvested.

Times of different ranks are compared as their nodes' clocks gave them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.records import PREFILL, EngineSpans, MicroStepRecord, PhaseSpan, RolloutTiming
from tlt_hpc.look.analysis.kinds import Kind, Pieces, merged, pieces_of
from tlt_hpc.look.analysis.result import Analysis, count, listed, seconds, share
from tlt_hpc.look.analysis.run_log import RunLog
from tlt_hpc.storage.rollout_log import StepSummary

Timed = TypeVar("Timed", MicroStepRecord, PhaseSpan)

_FINEST = 1 / 2000
"""Of the time shown: gaps below it join two pieces of a kind."""
_GRID = 1200
_NO_TAIL = 0.02
"""Idle share of the ranks' rollout time below which there is no tail to speak of."""


@dataclass(frozen=True)
class Lane:
    """One rank: its pieces, merged for a picture, and exact sums; times in seconds since the rollout began."""

    rank: int
    pieces: Pieces
    rollouts: tuple[RolloutTiming, ...]
    seconds: dict[Kind, float]
    idle_seconds: float
    """From the rank's last token to the release, trained or not."""
    harvested_seconds: float
    num_micro_steps: int
    is_told: bool
    """Whether the log tells of rounds; one of an earlier version does not."""


@dataclass(frozen=True)
class Timeline(Analysis):
    """A step's ranks; ``live`` [T] are the sequences still being generated on all of them at ``live_seconds`` [T]."""

    step: int
    num_ranks: int
    lanes: tuple[Lane, ...]
    live_seconds: NDArray[np.float64]
    live: NDArray[np.int64]
    tails: tuple[tuple[float, float], ...]
    """Of each rollout of the step: from the first rank's last token to the release; of one rank, none."""
    rollout_seconds: float
    start_seconds: float
    """Since the epoch, where the times count from."""


def analyse_timeline(run: RunLog, step: int | None = None) -> Timeline:
    """A step's ranks, the last step's that has all where ``step`` is None.

    Raises:
        UserError: there is no such step, or nothing of it can be read.
    """
    chosen = run.last_whole_step() if step is None else step
    if chosen is None or chosen not in run.logged_steps:
        raise UserError(_no_step(run, step))
    summaries = run.ranks(chosen)
    if not summaries:
        raise UserError(f"no log of step {chosen} can be read; {run.problems[-1]}")
    zero = min(summary.timing.start_seconds for summary in summaries)
    spans = {summary.rank: _shifted(run.spans(chosen, summary.rank), zero) for summary in summaries}
    lanes = tuple(_lane(summary, spans[summary.rank], zero) for summary in summaries)
    told = [lane for lane in lanes if run.speaks_for(lane.rank)]
    times, live = _live(tuple(told), [spans[lane.rank] for lane in told])
    tails = _tails(lanes)
    rollout = _rollout_seconds(lanes)
    num_ranks = summaries[0].num_ranks
    return Timeline(
        run=run.name,
        verdict=_verdict(chosen, num_ranks, lanes, tails, rollout),
        problems=run.problems,
        step=chosen,
        num_ranks=num_ranks,
        lanes=lanes,
        live_seconds=times,
        live=live,
        tails=tails,
        rollout_seconds=rollout,
        start_seconds=zero,
    )


def _no_step(run: RunLog, step: int | None) -> str:
    if not run.logged_steps:
        return f"{run.folder.path} has no step in its rollout log yet"
    first, last = run.logged_steps[0], run.logged_steps[-1]
    return f"{run.folder.path} has no step {step} in its rollout log; it has {first} to {last}"


def _shifted(spans: EngineSpans, zero: float) -> EngineSpans:
    times = spans.start_seconds - zero
    return EngineSpans(spans.strategy_index, spans.num_live, spans.num_tokens, times, spans.seconds)


def _lane(summary: StepSummary, spans: EngineSpans, zero: float) -> Lane:
    timings = tuple(_timing_since(timing, zero) for timing in (summary.timing, *summary.refills))
    micro_steps = tuple(_since(each, zero) for each in summary.micro_steps)
    phases = tuple(_since(each, zero) for each in summary.phases)
    pieces = pieces_of(timings, spans, summary.strategy_names, micro_steps, phases)
    extent = float(pieces.ends[-1] - pieces.starts[0]) if len(pieces) else 0.0
    return Lane(
        rank=summary.rank,
        pieces=merged(pieces, extent * _FINEST),
        rollouts=timings,
        seconds=pieces.seconds(),
        idle_seconds=sum(timing.idle_seconds for timing in timings),
        harvested_seconds=summary.harvested_seconds,
        num_micro_steps=len(summary.micro_steps),
        is_told=len(spans) > 0,
    )


def _timing_since(timing: RolloutTiming, zero: float) -> RolloutTiming:
    return RolloutTiming(*(value - zero for value in vars(timing).values()))


def _since(record: Timed, zero: float) -> Timed:
    """A record with its two times counted from ``zero``."""
    return replace(record, start_seconds=record.start_seconds - zero, end_seconds=record.end_seconds - zero)


def _live(lanes: tuple[Lane, ...], spans: list[EngineSpans]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Sequences live on all ranks over the time of the rollouts; nothing where no rank tells."""
    if not any(lane.is_told for lane in lanes):
        return np.empty(0), np.empty(0, np.int64)
    last = max(timing.release_seconds for lane in lanes for timing in lane.rollouts)
    times = np.linspace(0.0, last, _GRID)
    live = np.zeros(_GRID, np.int64)
    for lane, each in zip(lanes, spans, strict=True):
        rounds = each.strategy_index != PREFILL
        starts, counts = each.start_seconds[rounds], each.num_live[rounds]
        if len(starts) == 0:
            continue
        own = counts[np.maximum(0, np.searchsorted(starts, times, "right") - 1)].astype(np.int64)
        inside = [(times >= t.start_seconds) & (times < t.last_token_seconds) for t in lane.rollouts]
        live += np.where(np.any(inside, axis=0), own, 0)
    return times, live


def _tails(lanes: tuple[Lane, ...]) -> tuple[tuple[float, float], ...]:
    if len(lanes) < 2:
        return ()
    rollouts = zip(*(lane.rollouts for lane in lanes), strict=False)
    return tuple((min(t.last_token_seconds for t in ts), max(t.release_seconds for t in ts)) for ts in rollouts)


def _rollout_seconds(lanes: tuple[Lane, ...]) -> float:
    rollouts = zip(*(lane.rollouts for lane in lanes), strict=False)
    return sum((max(t.release_seconds for t in ts) - min(t.start_seconds for t in ts) for ts in rollouts), 0.0)


# -- in words -------------------------------------------------------------------------------------------------------


def _verdict(
    step: int, num_ranks: int, lanes: tuple[Lane, ...], tails: tuple[tuple[float, float], ...], rollout: float
) -> str:
    of = f"{len(lanes)} of {num_ranks} ranks" if len(lanes) < num_ranks else count(num_ranks, "rank")
    refills = len(lanes[0].rollouts) - 1
    again = f" with {count(refills, 'refill')}" if refills else ""
    parts = [f"Step {step}, {of}: its rollout{again} took {seconds(rollout)}.", _speculation(lanes)]
    parts += [_tail(num_ranks, lanes, tails, rollout), _rest(lanes)]
    return " ".join(filter(None, parts))


def _speculation(lanes: tuple[Lane, ...]) -> str:
    if not any(lane.is_told for lane in lanes):
        return "The logs are of a version that does not tell of single rounds."
    plain, drafted = (sum(lane.seconds.get(kind, 0.0) for lane in lanes) for kind in (Kind.DECODE, Kind.SPECULATE))
    if drafted == 0:
        return "Speculation was off throughout."
    if plain == 0:
        return "All decoding was speculative."
    return f"Of the decoding time {share(drafted, plain + drafted)} were speculative."


def _tail(num_ranks: int, lanes: tuple[Lane, ...], tails: tuple[tuple[float, float], ...], rollout: float) -> str:
    idle = sum(lane.idle_seconds for lane in lanes)
    harvested = sum(lane.harvested_seconds for lane in lanes)
    if num_ranks == 1:
        return f"With one rank nobody waits; it was idle for {seconds(idle)}."
    if len(lanes) < num_ranks:
        return f"Of the others there is no log, so the tail is not told; these were idle for {seconds(idle)} together."
    total = len(lanes) * rollout
    length = sum(end - start for start, end in tails)
    last = max(lanes, key=lambda lane: lane.rollouts[-1].last_token_seconds)
    first = min(lanes, key=lambda lane: lane.rollouts[-1].last_token_seconds)
    if idle < _NO_TAIL * total:
        return f"There is no tail to speak of: the ranks waited for {share(idle, total)} of it ({seconds(idle)})."
    told = (
        f"The tail lasted {seconds(length)}: rank {first.rank} was the first to finish"
        f"{' (of the last refill)' if len(first.rollouts) > 1 else ''} and rank {last.rank} the last. "
        f"Ranks were idle for {seconds(idle)} together, {share(idle, total)} of their rollout time; "
    )
    updates = sum(lane.num_micro_steps for lane in lanes)
    if harvested == 0:
        return told + "none of it was harvested for the drafter."
    took = f"{seconds(harvested)} of that ({share(harvested, idle)})"
    return f"{told}{took} were harvested in {count(updates, 'update')} of the drafter."


def _rest(lanes: tuple[Lane, ...]) -> str:
    """What the step spent beside its rollout, as a mean over the ranks."""
    names = {
        Kind.SERIAL: "serial drafter training",
        Kind.REWARD: "rewards",
        Kind.UPDATE: "the policy update",
        Kind.REFRESH: "merge and new weights",
        Kind.SAVE: "saving",
        Kind.EVALUATE: "evaluation",
    }
    means = {kind: sum(lane.seconds.get(kind, 0.0) for lane in lanes) / len(lanes) for kind in names}
    told = [f"{seconds(value)} {names[kind]}" for kind, value in means.items() if value >= 0.001]
    return f"Beside it: {listed(told)} (mean of the ranks)." if told else ""


def thinned(found: Timeline, most_lanes: int = 32, most_pieces: int = 4000) -> Timeline:
    """The same step with fewer lanes, evenly through the order in which they finished, and coarser pieces."""
    lanes = found.lanes
    if len(lanes) > most_lanes:
        order = sorted(range(len(lanes)), key=lambda i: lanes[i].rollouts[-1].last_token_seconds)
        places = np.round(np.linspace(0, len(order) - 1, most_lanes)).astype(int)
        lanes = tuple(lanes[order[place]] for place in places)
    each = max(40, most_pieces // max(1, len(lanes)))
    extent = max((float(lane.pieces.ends[-1] - lane.pieces.starts[0]) for lane in lanes if len(lane.pieces)), default=0)
    coarse = tuple(replace(lane, pieces=merged(lane.pieces, extent * _FINEST, each)) for lane in lanes)
    changes = np.flatnonzero(np.diff(found.live, prepend=-1) != 0)
    keep = np.unique(np.concatenate([changes, [len(found.live) - 1]])) if len(found.live) else changes
    return replace(found, lanes=coarse, live_seconds=found.live_seconds[keep], live=found.live[keep])
