"""Chooses the judge of an answer, adds the other parts of its reward, and judges the data's answers before a start."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from tlt_hpc.common.records import Prompt
from tlt_hpc.common.source import load_extra
from tlt_hpc.config import RewardSection
from tlt_hpc.config.data_sections import ANSWER, FORMAT, is_function, part_name
from tlt_hpc.rewards import text
from tlt_hpc.rewards.answer import OF_PROGRAMS, OF_RESPONSES, Answer, Failure, Verdict, parse_accepted_answers
from tlt_hpc.rewards.functions import RewardFunction, call_function

CODE = "tlt_hpc.extras.code_rewards.code"
"""Module that judges the kind ``code``."""
SAME_MATH = "same-math"
"""No reward: whether a response and another, given as the truth, answer alike as mathematics."""
WORKER_KINDS = frozenset({"math", "code"})
"""Kinds that parse or run what others wrote; as functions they run only in a process that can be killed."""
_NO_FUNCTIONS: Mapping[str, RewardFunction] = MappingProxyType({})


def needs_server(settings: RewardSection) -> bool:
    """True if some answers are judged in processes that can be killed."""
    return bool(settings.functions) or not WORKER_KINDS.isdisjoint(settings.kinds)


def kind_for(source: str, default: str, by_source: Mapping[str, str]) -> str:
    """The kind that judges responses to prompts of a source: by its exact name, else by the first matching pattern."""
    if source in by_source:
        return by_source[source]
    return next((kind for pattern, kind in by_source.items() if fnmatchcase(source, pattern)), default)


def failure_is_judgement(kind: str, failure: str | None) -> bool:
    """True if a verdict with this failure, or with none, is a judgement: a program that fails is a wrong answer."""
    return failure is None or (kind == "code" and failure in OF_PROGRAMS)


def judge(
    answer: Answer,
    settings: RewardSection,
    functions: Mapping[str, RewardFunction] = _NO_FUNCTIONS,
    template: Any | None = None,
    failed: Verdict | None = None,
) -> Verdict:
    """An answer's reward, the weighted sum of its parts; if it could not be judged, and not by its own fault, 0.

    ``functions``, by the name that the settings give them, and ``template`` are what only a server has; ``failed`` is
    its verdict on an answer that is not to be judged (again).
    """
    start = time.perf_counter()
    verdict = failed or _judge_answer_alone(answer, settings, functions, template)
    if (
        settings.weights
        and answer.kind != SAME_MATH
        and (verdict.failure is None or _is_failure_of_response(verdict, answer))
    ):
        verdict = _add_reward_parts(verdict, answer, settings, functions)
    return replace(verdict, seconds=verdict.seconds + time.perf_counter() - start)


def lacks_parts(verdict: Verdict, answer: Answer, settings: RewardSection) -> bool:
    """True if the process that judged an answer ended by the answer's fault before the other parts were found."""
    is_own = not is_function(answer.kind) and answer.kind != SAME_MATH and verdict.failure in OF_RESPONSES
    return bool(settings.weights) and not verdict.parts and is_own


def _is_failure_of_response(verdict: Verdict, answer: Answer) -> bool:
    """True if a failure is the response's own: one that gains by failing would be learnt."""
    if answer.kind == "code" and verdict.failure is Failure.UNREADABLE:
        code = load_extra(CODE)
        try:
            code.read_tests(answer.truth, answer.extra)
        except ValueError:
            return False
        return True  # by what the program did
    return not is_function(answer.kind) and verdict.failure in OF_RESPONSES


def _add_reward_parts(
    verdict: Verdict, answer: Answer, settings: RewardSection, functions: Mapping[str, RewardFunction]
) -> Verdict:
    parts = {ANSWER: verdict.reward}
    for term in settings.weights:
        if term == FORMAT:
            parts[FORMAT] = _format_reward(answer, settings)
        elif term != ANSWER:
            found = call_function(functions[term], answer)
            if found.failure:
                return replace(found, detail=f"{part_name(term)}: {found.detail}")
            parts[part_name(term)] = found.reward
    reward = sum(weight * parts[part_name(term)] for term, weight in settings.terms.items())
    return replace(verdict, reward=reward, parts=parts)


def _format_reward(answer: Answer, settings: RewardSection) -> float:
    return text.format_tags_reward(answer.opening + answer.text, settings.format_tags)


def _judge_answer_alone(
    answer: Answer, settings: RewardSection, functions: Mapping[str, RewardFunction], template: Any | None
) -> Verdict:
    """The verdict on the answer alone; of several accepted answers one is enough."""
    if is_function(answer.kind):
        return call_function(functions[answer.kind], answer)
    match answer.kind:
        case "format":
            return Verdict(_format_reward(answer, settings))
        case "same-math":
            from tlt_hpc.rewards.mathematics import answer_equality_verdict  # 0.3 s to import, so only where it is used

            return answer_equality_verdict(answer.text, answer.truth)
        case "code":
            assert template is not None
            judge_program: Callable[..., Verdict] = load_extra(CODE).judge_program
            return judge_program(answer.text, answer.truth, settings, template, answer.extra)
    verdict = Verdict(0.0)
    for truth in parse_accepted_answers(answer.truth):
        verdict = _compare_with_truth(answer, truth, settings)
        if verdict.reward:
            break
    return verdict


def _compare_with_truth(answer: Answer, truth: str, settings: RewardSection) -> Verdict:
    """The verdict of a kind that compares the response's answer with one of the data's."""
    match answer.kind:
        case "boxed":
            return text.boxed_verdict(answer.text, truth)
        case "numeric":
            return text.numeric_verdict(answer.text, truth, answer.is_finished)
        case "choice":
            return text.choice_verdict(answer.text, truth, answer.is_finished)
        case "math":
            from tlt_hpc.rewards.mathematics import mathematical_equality_verdict

            return mathematical_equality_verdict(answer.text, truth, answer.is_finished)
    raise AssertionError(f"no judge for {answer.kind!r}")


# -- whether a response could be right at all: the data's answers, each judged against itself -------------------------

_OF_ANSWERS = frozenset({"boxed", "math", "numeric", "choice"})
"""Kinds that compare a response's answer with the data's."""


def find_prompt_problem(settings: RewardSection, prompt: Prompt) -> str:
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
    return find_truth_problem(kind, prompt.answer) if kind in _OF_ANSWERS else ""


@lru_cache(maxsize=4096)
def find_truth_problem(kind: str, truth: str) -> str:
    """The reason why this answer, or one of a list of answers, is not right by its own kind of reward; empty: it is."""
    for each in parse_accepted_answers(truth):
        text = each if "\\boxed" in each else f"\\boxed{{{each}}}"
        verdict = judge(Answer(kind, "", text, each), RewardSection())
        if not verdict.reward:
            why = verdict.detail if verdict.failure else f"answer {each[:80]!r} is not equal to itself"
            return f"reward kind {kind!r}: {why}"
    return ""
