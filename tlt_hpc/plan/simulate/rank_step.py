"""What the simulator reads of a rank's log of one step. Imports no configuration, whose libraries take long to load."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import RolloutTiming
from tlt_hpc.storage.log_columns import Columns

_ENDS, _NAMES, _REFILLS = "rollouts/response_ends", "strategy/names", "timing/refills"
_SPANS = tuple(f"spans/{name}" for name in ("strategy_index", "num_live", "num_tokens", "seconds"))
COLUMNS = (_ENDS, _NAMES, _REFILLS, *_SPANS)
ATTRIBUTES = (
    "timing/start_seconds",
    "timing/last_token_seconds",
    "timing/release_seconds",
    "metrics/rollout/kept_tokens",
)


@dataclass(frozen=True)
class RoundColumns:
    """Rounds and prefill passes, [K] each, as in the log's ``spans``, without their start times."""

    strategy_index: NDArray[np.int16]
    num_live: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    seconds: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True)
class RankStep:
    """One rank's part of a step, as far as the simulator needs it."""

    num_ranks: int
    is_whole: bool
    """Whether it logged the rounds of one rollout, of which no earlier start generated a part."""
    response_lengths: NDArray[np.int64]
    timing: RolloutTiming
    strategy_names: tuple[str, ...]
    spans: RoundColumns


def rank_step(columns: Columns) -> RankStep:
    """A rank's step from a log's ``COLUMNS`` and ``ATTRIBUTES``."""
    start, last, release, kept_tokens = (columns.attributes[name] for name in ATTRIBUTES)
    spans = RoundColumns(*(columns[name] for name in _SPANS))
    return RankStep(
        num_ranks=columns.num_ranks,
        is_whole=len(spans) > 0 and not len(columns[_REFILLS]) and not kept_tokens > 0,
        response_lengths=np.diff(columns[_ENDS], prepend=0),
        timing=RolloutTiming(start, last, release),
        strategy_names=columns.texts(_NAMES),
        spans=spans,
    )
