"""What a rank can be at in a step, and from which records that is told. Pure; knows no picture."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import PREFILL, EngineSpans, MicroStepRecord, PhaseSpan, RolloutTiming

OFF = "off"
"""The strategy that drafts nothing."""


class Kind(StrEnum):
    """What a rank does with its time; the order is that of a step, and of legends."""

    PREFILL = "prefill"
    DECODE = "plain decoding"
    SPECULATE = "speculative decoding"
    GENERATE = "generating (not told how)"
    TRAIN = "drafter training in the tail"
    SERIAL = "serial drafter training"
    IDLE = "idle"
    REWARD = "reward"
    UPDATE = "policy update"
    REFRESH = "drafter merge and new weights"
    SAVE = "save"
    EVALUATE = "evaluation"


KINDS = tuple(Kind)
OF_PHASE = {
    "reward": Kind.REWARD,
    "update_actor": Kind.UPDATE,
    "refresh": Kind.REFRESH,
    "save_checkpoint": Kind.SAVE,
    "testing": Kind.EVALUATE,
    "drafter": Kind.SERIAL,
}
"""Phase of a step, as the log names it -> its kind. ``gen`` is told in more detail by rounds and micro-steps."""


@dataclass(frozen=True)
class Pieces:
    """Stretches of one rank's time, ascending and apart: ``kinds`` [K] int8 index ``KINDS``, times [K] float64."""

    kinds: NDArray[np.int8]
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.kinds)

    def seconds(self) -> dict[Kind, float]:
        """Sums by kind, of those there are."""
        sums = np.bincount(self.kinds, self.ends - self.starts, minlength=len(KINDS))
        return {kind: float(value) for kind, value in zip(KINDS, sums, strict=True) if value > 0}


def pieces_of(
    timings: tuple[RolloutTiming, ...],
    spans: EngineSpans,
    strategies: tuple[str, ...],
    micro_steps: tuple[MicroStepRecord, ...],
    phases: tuple[PhaseSpan, ...],
) -> Pieces:
    """All that a rank's log tells of one step, in order; where two overlap, the later begins where the first ends."""
    rows = [_engine_pieces(timings, spans, strategies)]
    in_tail = [_waits(timings, m.start_seconds) for m in micro_steps]
    kinds = [KINDS.index(Kind.TRAIN if is_in else Kind.SERIAL) for is_in in in_tail]
    trained = [(kind, m.start_seconds, m.end_seconds) for kind, m in zip(kinds, micro_steps, strict=True)]
    rows.append(_rows(trained))
    rows.append(_rows(_idle(timings, trained)))
    rows.append(_rows([(KINDS.index(OF_PHASE[p.name]), *_times(p)) for p in phases if p.name in OF_PHASE]))
    table = np.concatenate(rows)
    table = table[np.argsort(table[:, 1], kind="stable")]
    ends = np.maximum.accumulate(table[:, 2]) if len(table) else table[:, 2]
    starts = np.maximum(table[:, 1], np.concatenate([[-np.inf], ends])[: len(table)])
    keep = table[:, 2] > starts
    return Pieces(table[keep, 0].astype(np.int8), starts[keep], table[keep, 2])


def merged(pieces: Pieces, tolerance: float, most: int = 3000) -> Pieces:
    """Neighbours of one kind in one piece, where less than ``tolerance`` seconds lie between them.

    Where more than ``most`` are left, the time is cut in that many equal bins, each of the kind that has most of it.
    """
    if len(pieces) < 2:
        return pieces
    pieces = _joined(pieces, tolerance)
    return pieces if len(pieces) <= most else _joined(_binned(pieces, most), tolerance)


def _joined(pieces: Pieces, tolerance: float) -> Pieces:
    gaps = pieces.starts[1:] - pieces.ends[:-1]
    first = np.concatenate([[True], (np.diff(pieces.kinds) != 0) | (gaps > tolerance)])
    places = np.flatnonzero(first)
    last = np.concatenate([places[1:] - 1, [len(pieces) - 1]])
    return Pieces(pieces.kinds[places], pieces.starts[places], pieces.ends[last])


def _binned(pieces: Pieces, num_bins: int) -> Pieces:
    """A piece a bin: of the kind with the most seconds in it, none where nothing is told of most of it."""
    edges = np.linspace(pieces.starts[0], pieces.ends[-1], num_bins + 1)
    filled = np.zeros((len(KINDS), num_bins))
    for kind in np.unique(pieces.kinds):
        own = pieces.kinds == kind
        starts, ends = pieces.starts[own], pieces.ends[own]
        until = np.concatenate([[0.0], np.cumsum(ends - starts)])  # seconds of the kind before each of its pieces
        times = np.stack([starts, ends], 1).ravel()
        values = np.stack([until[:-1], until[1:]], 1).ravel()
        filled[kind] = np.diff(np.interp(edges, times, values))
    kinds, best = filled.argmax(0), filled.max(0)
    keep = filled.sum(0) > 0.5 * np.diff(edges)
    keep &= best > 0
    return Pieces(kinds[keep].astype(np.int8), edges[:-1][keep], edges[1:][keep])


def _engine_pieces(
    timings: tuple[RolloutTiming, ...], spans: EngineSpans, strategies: tuple[str, ...]
) -> NDArray[np.float64]:
    if len(spans) == 0:
        kind = KINDS.index(Kind.GENERATE)
        return _rows([(kind, t.start_seconds, t.last_token_seconds) for t in timings])
    kinds = engine_kinds(spans.strategy_index, strategies)
    return np.stack([kinds.astype(np.float64), spans.start_seconds, spans.start_seconds + spans.seconds], 1)


def engine_kinds(strategy_index: NDArray[np.int16], strategies: tuple[str, ...]) -> NDArray[np.int8]:
    """The kind of each round and prefill pass, [K] int8."""
    by_index = [Kind.DECODE if name == OFF else Kind.SPECULATE for name in strategies]
    table = np.array([KINDS.index(kind) for kind in by_index] + [KINDS.index(Kind.PREFILL)], np.int8)
    assert PREFILL == -1, "a prefill pass finds its kind at the table's end"
    return table[strategy_index.astype(np.int64)]


def _idle(
    timings: tuple[RolloutTiming, ...], trained: list[tuple[int, float, float]]
) -> list[tuple[int, float, float]]:
    """What is left between a rank's last token and the release, without its micro-steps."""
    kind, left = KINDS.index(Kind.IDLE), []
    for timing in timings:
        at = timing.last_token_seconds
        for _, start, end in sorted(trained, key=lambda row: row[1]):
            if at < start < timing.release_seconds:
                left.append((kind, at, start))
            if timing.last_token_seconds <= start < timing.release_seconds:
                at = max(at, end)
        if at < timing.release_seconds:
            left.append((kind, at, timing.release_seconds))
    return left


def _waits(timings: tuple[RolloutTiming, ...], second: float) -> bool:
    """Whether the rank waits for others then."""
    return any(timing.last_token_seconds <= second < timing.release_seconds for timing in timings)


def _times(phase: PhaseSpan) -> tuple[float, float]:
    return phase.start_seconds, phase.end_seconds


def _rows(rows: list[tuple[int, float, float]]) -> NDArray[np.float64]:
    return np.array(rows, np.float64).reshape(-1, 3)
