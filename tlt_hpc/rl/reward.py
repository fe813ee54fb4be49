"""Owns the judgement of a response's text against the known answer; knows no tokens, no model and no ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

RewardKind = Literal["boxed", "math"]
BOX = "\\boxed{"
MATH_SECONDS = 5
"""Time limit of one parse and of one comparison; an answer that needs more counts as wrong."""


def score_rollouts(texts: Sequence[str], answers: Sequence[str], kind: RewardKind) -> NDArray[np.float32]:
    """Reward of each response, 1 or 0, as float32 [N]; see ``score``."""
    pairs = zip(texts, answers, strict=True)
    return np.array([score(text, answer, kind) for text, answer in pairs], dtype=np.float32)


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
