"""What a rank can do in a step, and how its log is cut into pieces of one kind each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import PREFILL, RolloutTiming
from tlt_hpc.storage.rollout_log import StepRecord

OFF = "off"
"""The strategy without drafting."""


class Kind(StrEnum):
    """What a rank does, in the order of a step and of legends."""

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
"""Name of a phase in the log -> its kind. ``gen`` is missing: rounds and micro-steps show it in more detail."""
Rows = list[tuple[Kind, float, float]]
"""Kind, start and end."""


@dataclass(frozen=True)
class Pieces:
    """Pieces of one rank's time, ascending and disjoint: ``kinds`` [K] int8 index ``KINDS``, times [K] float64."""

    kinds: NDArray[np.int8]
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.kinds)

    def seconds(self) -> dict[Kind, float]:
        """Seconds by kind, without kinds that do not occur."""
        sums = np.bincount(self.kinds, self.ends - self.starts, minlength=len(KINDS))
        return {kind: float(value) for kind, value in zip(KINDS, sums, strict=True) if value > 0}


def pieces_of(record: StepRecord, zero: float) -> Pieces:
    """Cut a rank's step into pieces, in seconds since ``zero``. If two overlap, the later one is shortened."""
    spans, rollouts = record.spans, (record.timing, *record.refills)
    rows: Rows = [(Kind.GENERATE, t.start_seconds, t.last_token_seconds) for t in rollouts]
    if len(spans):
        kinds = [KINDS[i] for i in engine_kinds(spans.strategy_index, record.strategy_names)]
        starts, taken = spans.start_seconds, spans.seconds
        rows = list(zip(kinds, starts.tolist(), (starts + taken).tolist(), strict=True))
    trained = sorted((step.start_seconds, step.end_seconds) for step in record.micro_steps)
    harvested = [any(_waits(timing, start) for timing in rollouts) for start, _ in trained]
    rows += [(Kind.TRAIN if h else Kind.SERIAL, *times) for h, times in zip(harvested, trained, strict=True)]
    for timing in rollouts:
        inside = [second for times in trained if _waits(timing, times[0]) for second in times]
        edges = [timing.last_token_seconds, *inside, timing.release_seconds]
        rows += [(Kind.IDLE, *pair) for pair in zip(edges[::2], edges[1::2], strict=True)]
    rows += [(OF_PHASE[p.name], p.start_seconds, p.end_seconds) for p in record.phases if p.name in OF_PHASE]
    rows.sort(key=lambda row: row[1])
    times = np.array([row[1:] for row in rows], np.float64).reshape(-1, 2)
    ends = np.maximum.accumulate(times[:, 1])
    starts = np.maximum(times[:, 0], np.concatenate([[-np.inf], ends])[: len(ends)])
    keep = times[:, 1] > starts
    indices = np.array([KINDS.index(row[0]) for row in rows], np.int8)
    return Pieces(indices[keep], starts[keep] - zero, times[keep, 1] - zero)


def coarse(pieces: Pieces, resolution: float, most: int = 3000) -> Pieces:
    """Join neighbours of one kind with less than ``resolution`` seconds between them.

    If more than ``most`` pieces are left, time is sampled at that many points.
    """
    if len(pieces) < 2:
        return pieces
    joined = _joined(pieces, resolution)
    if len(joined) <= most:
        return joined
    edges = np.linspace(pieces.starts[0], pieces.ends[-1], most + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    place = np.searchsorted(pieces.starts, middles, "right") - 1
    inside = middles < pieces.ends[place]
    return _joined(Pieces(pieces.kinds[place][inside], edges[:-1][inside], edges[1:][inside]), resolution)


def _joined(pieces: Pieces, resolution: float) -> Pieces:
    gaps = pieces.starts[1:] - pieces.ends[:-1]
    first = np.flatnonzero(np.concatenate([[True], (np.diff(pieces.kinds) != 0) | (gaps > resolution)]))
    last = np.append(first[1:], len(pieces)) - 1
    return Pieces(pieces.kinds[first], pieces.starts[first], pieces.ends[last])


def engine_kinds(strategy_index: NDArray[np.int16], strategies: tuple[str, ...]) -> NDArray[np.int8]:
    """The kind of each round and prefill pass, [K] int8."""
    by_index = [Kind.DECODE if name == OFF else Kind.SPECULATE for name in strategies]
    table = np.array([KINDS.index(kind) for kind in [*by_index, Kind.PREFILL]], np.int8)
    assert PREFILL == -1, "a prefill pass finds its kind at the table's end"
    return table[strategy_index.astype(np.int64)]


def _waits(timing: RolloutTiming, second: float) -> bool:
    """Whether the rank waits for others at that time."""
    return timing.last_token_seconds <= second < timing.release_seconds
