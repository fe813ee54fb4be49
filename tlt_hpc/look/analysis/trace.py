"""A step's ranks as events of Chrome's trace format: a process a rank, with tracks of phases, engine and drafter.

Arrows lead from each phase of a rank to its next. Times are microseconds since the first event's second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tlt_hpc.common.records import EngineSpans, RolloutTiming
from tlt_hpc.look.analysis.kinds import KINDS, engine_kinds
from tlt_hpc.look.analysis.run_log import RunLog
from tlt_hpc.storage.rollout_log import StepSummary

Event = dict[str, Any]

_PHASES, _ENGINE, _DRAFTER = 0, 1, 2
_TRACKS = {_PHASES: "phases", _ENGINE: "engine", _DRAFTER: "drafter and waiting"}


def trace_events(run: RunLog, steps: Sequence[int]) -> Iterator[Event]:
    """Of all ranks in the given steps, metadata first."""
    named = set[int]()
    zero: float | None = None
    for step in steps:
        summaries = run.ranks(step)
        if zero is None and summaries:
            zero = float(int(min(_first_second(summary) for summary in summaries)))
        for summary in summaries:
            if summary.rank not in named:
                named.add(summary.rank)
                yield from _names(summary.rank)
            assert zero is not None
            yield from _rank_events(summary, run.spans(step, summary.rank), zero)


def _first_second(summary: StepSummary) -> float:
    return min([summary.timing.start_seconds, *(phase.start_seconds for phase in summary.phases)])


def _names(rank: int) -> Iterator[Event]:
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for track, name in _TRACKS.items():
        yield {"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}}


def _rank_events(summary: StepSummary, spans: EngineSpans, zero: float) -> Iterator[Event]:
    rank = summary.rank
    yield from _phase_events(summary, zero)
    kinds = engine_kinds(spans.strategy_index, summary.strategy_names) if len(spans) else ()
    rows = (spans.strategy_index, spans.num_live, spans.num_tokens, spans.start_seconds, spans.seconds)
    for kind, index, live, tokens, start, taken in zip(kinds, *(row.tolist() for row in rows), strict=True):
        strategy = summary.strategy_names[index] if index >= 0 else str(KINDS[kind])
        more = {"live": live, "tokens": tokens}
        yield _complete(rank, _ENGINE, strategy, start - zero, taken, str(KINDS[kind]), more)
        if index >= 0:
            at = _microseconds(start - zero)
            yield {"ph": "C", "pid": rank, "name": "live sequences", "ts": at, "args": {"live": live}}
    for micro_step in summary.micro_steps:
        taken = micro_step.end_seconds - micro_step.start_seconds
        more = {"tokens": micro_step.num_tokens, "loss": repr(micro_step.loss)}
        yield _complete(rank, _DRAFTER, "drafter update", micro_step.start_seconds - zero, taken, "drafter", more)
    for timing in (summary.timing, *summary.refills):
        yield from _rollout_events(rank, timing, zero)


def _phase_events(summary: StepSummary, zero: float) -> Iterator[Event]:
    """Each phase, and an arrow from its end to the next one's start."""
    for number, phase in enumerate(summary.phases):
        start, end = phase.start_seconds - zero, phase.end_seconds - zero
        more = {"step": summary.step}
        yield _complete(summary.rank, _PHASES, phase.name, start, end - start, "phase", more)
        arrow = {"cat": "phases", "name": "next phase", "pid": summary.rank, "tid": _PHASES}
        last = len(summary.phases) - 1
        name = f"{summary.step}.{summary.rank}."
        if number > 0:
            yield {**arrow, "ph": "f", "bp": "e", "id": f"{name}{number - 1}", "ts": _microseconds(start)}
        if number < last:
            yield {**arrow, "ph": "s", "id": f"{name}{number}", "ts": _microseconds(end)}


def _rollout_events(rank: int, timing: RolloutTiming, zero: float) -> Iterator[Event]:
    """Where a rank waits, behind its updates."""
    start = timing.last_token_seconds - zero
    yield _complete(rank, _DRAFTER, "waiting for the last rank", start, timing.idle_seconds, "idle", {})
    at = _microseconds(timing.release_seconds - zero)
    yield {"ph": "C", "pid": rank, "name": "live sequences", "ts": at, "args": {"live": 0}}
    yield {"ph": "i", "s": "p", "pid": rank, "tid": _DRAFTER, "name": "release", "ts": at}


def _complete(rank: int, track: int, name: str, start: float, taken: float, kind: str, more: Event) -> Event:
    event = {"ph": "X", "pid": rank, "tid": track, "name": name, "cat": kind, "ts": _microseconds(start)}
    return {**event, "dur": max(0.0, _microseconds(taken)), "args": more}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 1)
