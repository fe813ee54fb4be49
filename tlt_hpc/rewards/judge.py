"""Chooses the judge of an answer, and adds the reward of its format."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from tlt_hpc.common.records import Prompt
from tlt_hpc.config import RewardSection
from tlt_hpc.rewards import text
from tlt_hpc.rewards.answer import Answer, Verdict
from tlt_hpc.rewards.functions import RewardFunction, call_function
from tlt_hpc.rewards.sandbox.outside import Template

SAME_MATH = "same-math"
"""No reward: whether a response and another, given as the truth, answer alike as mathematics."""
WORKER_KINDS = frozenset({"math", "code", "function"})
"""Kinds that parse or run what others wrote; they run only in a process that can be killed."""


def kind_for(source: str, default: str, by_source: Mapping[str, str]) -> str:
    """The kind that judges responses to prompts of a source: by its exact name, else by the first matching pattern."""
    if source in by_source:
        return by_source[source]
    return next((kind for pattern, kind in by_source.items() if fnmatchcase(source, pattern)), default)


def check_answer(settings: RewardSection, prompt: Prompt) -> None:
    """Check that the tests of a prompt of the kind ``code`` can be read.

    Raises:
        ValueError: they cannot.
    """
    if kind_for(prompt.source, settings.default, settings.by_source) == "code":
        from tlt_hpc.rewards.code_tests import read_tests

        try:
            read_tests(prompt.answer)
        except ValueError as error:
            raise ValueError(f"reward kind 'code' cannot read the tests {prompt.answer[:80]!r}: {error}") from None


def judge(
    answer: Answer, settings: RewardSection, function: RewardFunction | None = None, template: Template | None = None
) -> Verdict:
    """An answer's reward, its form mixed in; if it could not be judged its form does not count either.

    ``function`` and ``template`` are what only a server has, for the kinds that need them.
    """
    verdict = _judge(answer, settings, function, template)
    if verdict.failure or answer.kind in ("format", SAME_MATH) or not settings.format_weight:
        return verdict
    weight = settings.format_weight
    return Verdict((1 - weight) * verdict.reward + weight * _form(answer, settings))


def _form(answer: Answer, settings: RewardSection) -> float:
    return text.tags(answer.opening + answer.text, settings.format_tags)


def _judge(
    answer: Answer, settings: RewardSection, function: RewardFunction | None, template: Template | None
) -> Verdict:
    match answer.kind:
        case "boxed":
            return text.boxed(answer.text, answer.truth)
        case "numeric":
            return text.numeric(answer.text, answer.truth, settings.tolerance)
        case "choice":
            return text.choice(answer.text, answer.truth)
        case "format":
            return Verdict(_form(answer, settings))
        case "math":
            from tlt_hpc.rewards.mathematics import equal_as_mathematics  # 0.5 s and sympy: only in workers

            return equal_as_mathematics(answer.text, answer.truth)
        case "same-math":
            from tlt_hpc.rewards.mathematics import same_answer

            return same_answer(answer.text, answer.truth)
        case "code":
            from tlt_hpc.rewards.code import passes_tests

            assert template is not None
            return passes_tests(answer.text, answer.truth, settings, template, answer.extra)
        case "function":
            assert function is not None
            return call_function(function, answer)
    raise AssertionError(f"no judge for {answer.kind!r}")
