"""What a rank can do in a step, and how its log is cut into pieces of one kind each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import AHEAD, PREFILL
from tlt_hpc.storage.rollout_log import StepSummary

OFF = "off"
"""The strategy without drafting."""


class Kind(StrEnum):
    """The activities of a rank, in the order of a step and of legends."""

    PREFILL = "prefill"
    DECODE = "plain decoding"
    SPECULATE = "speculative decoding"
    TRAIN = "drafter training in the tail"
    AHEAD = "generation ahead in the tail"
    IDLE = "idle"
    REWARD = "reward"
    UPDATE = "policy update"
    REFRESH = "drafter merge and new weights"
    SAVE = "save"
    EVALUATE = "evaluation"


KINDS = tuple(Kind)
OF_PHASE = {
    AHEAD: Kind.AHEAD,
    "reward": Kind.REWARD,
    "update_actor": Kind.UPDATE,
    "refresh": Kind.REFRESH,
    "save_checkpoint": Kind.SAVE,
    "testing": Kind.EVALUATE,
}
"""Name of a phase in the log -> its kind. ``gen`` is missing: rounds and micro-steps show it in more detail."""


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


def split_step_by_kind(summary: StepSummary, zero: float) -> Pieces:
    """Cut a rank's step into pieces, in seconds since ``zero``. If two overlap, the later one is shortened."""
    spans = summary.spans
    starts, ends = spans.start_seconds.tolist(), (spans.start_seconds + spans.seconds).tolist()
    rows = [(KINDS[kind], *times) for kind, *times in zip(engine_kinds(summary).tolist(), starts, ends, strict=True)]
    trained = [(step.start_seconds, step.end_seconds) for step in summary.micro_steps]
    rows += [(Kind.TRAIN, *times) for times in trained]
    used = sorted(trained + [(p.start_seconds, p.end_seconds) for p in summary.phases if p.name == AHEAD])
    for timing in (summary.timing, *summary.refills):
        last, released = timing.last_token_seconds, timing.release_seconds
        edges = [last, *(second for times in used if last <= times[0] < released for second in times), released]
        rows += [(Kind.IDLE, *pair) for pair in zip(edges[::2], edges[1::2], strict=True)]
    rows += [(OF_PHASE[p.name], p.start_seconds, p.end_seconds) for p in summary.phases if p.name in OF_PHASE]
    rows.sort(key=lambda row: row[1])
    times = np.array([row[1:] for row in rows], np.float64).reshape(-1, 2)
    shortened = np.maximum(times[:, 0], np.concatenate([[-np.inf], np.maximum.accumulate(times[:, 1])])[: len(rows)])
    keep = times[:, 1] > shortened
    indices = np.array([KINDS.index(row[0]) for row in rows], np.int8)
    return Pieces(indices[keep], shortened[keep] - zero, times[keep, 1] - zero)


def join_close_pieces(pieces: Pieces, resolution: float) -> Pieces:
    """Join neighbours of one kind with less than ``resolution`` seconds between them."""
    if len(pieces) < 2:
        return pieces
    gaps = pieces.starts[1:] - pieces.ends[:-1]
    first = np.flatnonzero(np.concatenate([[True], (np.diff(pieces.kinds) != 0) | (gaps > resolution)]))
    last = np.append(first[1:], len(pieces)) - 1
    return Pieces(pieces.kinds[first], pieces.starts[first], pieces.ends[last])


def engine_kinds(summary: StepSummary) -> NDArray[np.int8]:
    """The kind of each round and prefill pass of a rank's engine, [K] int8."""
    by_index = [Kind.DECODE if name == OFF else Kind.SPECULATE for name in summary.strategy_names]
    table = np.array([KINDS.index(kind) for kind in [*by_index, Kind.PREFILL]], np.int8)
    assert PREFILL == -1, "a prefill pass finds its kind at the table's end"
    return table[summary.spans.strategy_index.astype(np.int64)]
