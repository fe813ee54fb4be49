"""Owns the judgement of a response's text against the known answer; knows no tokenizer, no model and no ranks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.records import Rollout, SampleKey

logger = logging.getLogger(__name__)

RewardKind = Literal["boxed", "math"]
BOX = "\\boxed{"
MATH_SECONDS = 5
"""Time limit of one parse and of one comparison; an answer that needs more counts as wrong."""


class Scorer:
    """The rewards of one step's responses: some while the rank waits for others, the rest when all are asked for.

    ``judge`` gives one response's reward and is a function of it alone, so when it is asked makes no difference.
    """

    def __init__(self, judge: Callable[[Rollout], float]) -> None:
        self._judge = judge
        self._rewards: dict[SampleKey, float] = {}
        self.num_ahead = 0
        """Responses scored while the rank waited."""
        self.seconds_ahead = 0.0

    def has_unscored(self, finished: Sequence[Rollout]) -> bool:
        """Whether some of the responses were not scored yet."""
        return len(self._rewards) < len(finished)

    def score_ahead(self, finished: Sequence[Rollout], is_over: Callable[[], bool]) -> None:
        """Score responses until all are, or ``is_over``, which is asked between any two, says so."""
        start, before = time.perf_counter(), len(self._rewards)
        for rollout in finished:
            if is_over():
                break
            self._score(rollout)
        self.num_ahead += len(self._rewards) - before
        self.seconds_ahead += time.perf_counter() - start

    def rewards(self, rollouts: Sequence[Rollout]) -> NDArray[np.float32]:
        """The rewards [N] of all, scoring those that are left."""
        return np.array([self._score(rollout) for rollout in rollouts], dtype=np.float32)

    def _score(self, rollout: Rollout) -> float:
        if rollout.key not in self._rewards:
            self._rewards[rollout.key] = self._judge(rollout)
        return self._rewards[rollout.key]


def score(text: str, answer: str, kind: RewardKind) -> float:
    """1.0 where the response's text gives the answer, else 0.0.

    ``boxed``: the response ends with ``\\boxed{...}`` whose content, stripped, is the answer to the letter. ``math``:
    it means the same by math-verify, which counts time with SIGALRM and therefore runs in the main thread only.
    """
    if kind == "boxed":
        return float(_final_box(text) == answer.strip())
    return float(_equal_as_mathematics(text, answer))


def _final_box(text: str) -> str | None:
    """The stripped content of the last box, None where there is none, it is not closed, or more text follows it."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    content_start = start + len(BOX)
    end = _closing_brace(text, content_start)
    if end is None or text[end + 1 :].strip():
        return None
    return text[content_start:end].strip()


def _closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one just before ``start``; None where it is missing."""
    depth = 1
    for index in range(start, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return index
    return None


def _equal_as_mathematics(text: str, answer: str) -> bool:
    from math_verify import parse, verify  # 0.2 s and sympy: only where it is asked for

    # In any other thread the alarm cannot be set; math-verify then turns every answer into a silent zero.
    assert threading.current_thread() is threading.main_thread(), "math rewards must be scored in the main thread"
    # Bare LaTeX is read as plain text, and "11\\sqrt2" then means 11.
    marked = answer if "$" in answer or BOX in answer else f"{BOX}{answer}}}"
    gold = parse(marked, parsing_timeout=MATH_SECONDS)
    if not gold:
        logger.warning("answer %r cannot be read as mathematics: its responses score 0; mend the data", answer)
        return False
    return bool(verify(gold, parse(text, parsing_timeout=MATH_SECONDS), timeout_seconds=MATH_SECONDS))
