"""When the engine did what: every round and prefill pass, with its sequences, tokens and seconds. Decides nothing."""

from __future__ import annotations

import time
from array import array

import numpy as np

from tlt_hpc.common.records import EngineSpans


class SpanLog:
    """Grows by one entry a pass until it is taken."""

    def __init__(self) -> None:
        self._index, self._live, self._tokens = array("h"), array("i"), array("i")
        self._start, self._seconds = array("d"), array("f")

    def ended(self, strategy_index: int, num_live: int, num_tokens: int, seconds: float) -> None:
        """A pass of so many seconds has just ended; ``records.PREFILL`` in place of a strategy's index."""
        self._index.append(strategy_index)
        self._live.append(num_live)
        self._tokens.append(num_tokens)
        self._start.append(time.time() - seconds)
        self._seconds.append(seconds)

    def take(self) -> EngineSpans:
        """What was noted since the last call."""
        taken = EngineSpans(
            np.array(self._index, np.int16),
            np.array(self._live, np.int32),
            np.array(self._tokens, np.int32),
            np.array(self._start, np.float64),
            np.array(self._seconds, np.float32),
        )
        self.__init__()  # type: ignore[misc]
        return taken
