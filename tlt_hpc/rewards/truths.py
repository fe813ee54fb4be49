"""Whether a response could be right at all: the data's answers, each judged against itself before a start."""

from __future__ import annotations

from functools import lru_cache

from tlt_hpc.common.extras import load_extra
from tlt_hpc.common.records import Prompt
from tlt_hpc.config import RewardSection
from tlt_hpc.rewards.answer import Answer, accepted_answers
from tlt_hpc.rewards.judge import CODE, judge, kind_for

_OF_ANSWERS = frozenset({"boxed", "math", "numeric", "choice"})
"""Kinds that compare a response's answer with the data's."""


def check_answer(settings: RewardSection, prompt: Prompt) -> str:
    """The reason, in words, why no response to a prompt can be right; empty: one can.

    Raises:
        ValueError: the tests of a prompt of the kind ``code`` cannot be read.
    """
    kind = kind_for(prompt.source, settings.default, settings.by_source)
    if kind == "code":
        code = load_extra(CODE)
        try:
            code.read_tests(prompt.answer)
        except ValueError as error:
            raise ValueError(f"reward kind 'code' cannot read the tests {prompt.answer[:80]!r}: {error}") from None
    return truth_problem(kind, prompt.answer, settings.tolerance) if kind in _OF_ANSWERS else ""


@lru_cache(maxsize=4096)
def truth_problem(kind: str, truth: str, tolerance: float) -> str:
    """The reason why this answer, or one of a list of answers, is not right by its own kind of reward; empty: it is."""
    settings = RewardSection(tolerance=tolerance)
    for each in accepted_answers(truth):
        text = each if "\\boxed" in each else f"\\boxed{{{each}}}"
        verdict = judge(Answer(kind, "", text, each), settings)
        if not verdict.reward:
            why = verdict.detail if verdict.failure else f"answer {each[:80]!r} is not equal to itself"
            return f"reward kind {kind!r}: {why}"
    return ""
