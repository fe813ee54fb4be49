"""From judged responses to figures: every data set's, and those of the sources within it. Reads no file.

For the majority, correct responses are one answer whatever their words. Wrong ones are told apart by what they say:
boxes to the letter, numbers within the tolerance, letters, and mathematics by its value. For code, forms and
functions it is undecidable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from tokenizers import Tokenizer

from tlt_hpc.common.records import SampleKey
from tlt_hpc.evaluate.exam import Exam
from tlt_hpc.evaluate.metrics import RIGHT, PromptAnswers, SetFigures, data_set_figures, is_right, metrics_of
from tlt_hpc.rewards.answer import Answer
from tlt_hpc.rewards.final_answer import extract_mathematics, final_box_content, find_answer
from tlt_hpc.rewards.judge import SAME_MATH
from tlt_hpc.rewards.scorer import Judge
from tlt_hpc.rewards.text import are_near, letter_of_response, number_of_response
from tlt_hpc.run.session import decode_response_text
from tlt_hpc.storage.rollout_log import JudgedResponse

Compare = Callable[[Sequence[str], str], Sequence[bool | None]]
"""Whether each of several answers equals another one; None for one that cannot be read."""


@dataclass(frozen=True)
class Results:
    """The results of an evaluation."""

    figures: dict[str, SetFigures]
    """By data set; where a set has several sources, by ``set/source`` as well."""
    num_responses: int
    num_tokens: int
    accept_length: float
    failures: dict[str, int]
    """Responses that were not judged, by reason; they count as wrong."""

    @property
    def metrics(self) -> dict[str, float]:
        """The figures as metrics under verl's names."""
        found = (metrics_of(name, figures) for name, figures in self.figures.items())
        return {name: value for metrics in found for name, value in metrics.items()}


def aggregate_responses(
    exam: Exam, responses: Mapping[SampleKey, JudgedResponse], tokenizer: Tokenizer, ks: Sequence[int]
) -> Results:
    """The figures of the exam's responses, all of which are there.

    Raises:
        UserError: the server of rewards cannot be started again.
    """
    groups: dict[str, list[PromptAnswers]] = {}
    failures = Counter[str]()
    mixed = {each.name for each in exam.sets if len({prompt.source for prompt in each.prompts}) > 1}
    for each in exam.wanted:
        own = [responses[request.key] for request in each.requests]
        texts = [decode_response_text(tokenizer, response.tokens) for response in own]
        votes = votes_by_answer(exam.judge, exam.judge.kind_of(each.prompt), texts, list(map(is_right, own)))
        failures.update(r.failure for r in own if r.failure and exam.judge.leaves_unjudged(each.prompt, r.failure))
        name, answers = each.of_set.name, PromptAnswers(own, votes)
        groups.setdefault(name, []).append(answers)
        if name in mixed:
            groups.setdefault(f"{name}/{each.prompt.source}", []).append(answers)
    everything = [responses[request.key] for each in exam.wanted for request in each.requests]
    num_tokens = sum(len(response.tokens) for response in everything)
    return Results(
        figures={name: data_set_figures(prompts, ks) for name, prompts in groups.items()},
        num_responses=len(everything),
        num_tokens=num_tokens,
        accept_length=num_tokens / max(1, sum(response.num_target_passes for response in everything)),
        failures=dict(failures),
    )


def votes_by_answer(judge: Judge, kind: str, texts: Sequence[str], rights: Sequence[bool]) -> list[int | None] | None:
    """The answer of each response to a prompt, by number, None if it gives none; None as a whole if undecidable."""
    if kind not in _COMPARE:
        return None
    compare = partial(_COMPARE[kind], judge)
    wrong = {text for text, is_right in zip(texts, rights, strict=True) if not is_right}
    answers = {text: answer for text in wrong if (answer := extract_answer(kind, text)) is not None}
    numbers = group_equal_answers(set(answers.values()), compare)
    votes = {text: numbers.get(answer) for text, answer in answers.items()}
    return [RIGHT if is_right else votes.get(text) for text, is_right in zip(texts, rights, strict=True)]


def group_equal_answers(answers: set[str], compare: Compare) -> dict[str, int]:
    """Numbers from 1, the same for answers that are equal to the first of theirs; unreadable ones have none."""
    left, numbers, number = sorted(answers), dict[str, int](), RIGHT
    while left:
        number += 1
        verdicts = dict(zip(left, compare(left, left[0]), strict=True))
        if verdicts[left[0]] is not None:
            verdicts[left[0]] = True  # even one that does not equal itself is an answer
        numbers |= {answer: number for answer, is_same in verdicts.items() if is_same}
        left = [answer for answer, is_same in verdicts.items() if is_same is False]
    return numbers


def extract_answer(kind: str, text: str) -> str | None:
    """The answer that a response gives; None if it gives none. Mathematics is left to be parsed, in a box."""
    if kind == "boxed":
        return final_box_content(text)
    if kind == "numeric":
        number = number_of_response(text)
        # in hexadecimal, since Python writes no decimal of more than 4300 digits, and 1e999 may follow 4000 of them
        return None if number is None else f"{number.numerator:x}/{number.denominator:x}"
    if kind == "choice":
        return letter_of_response(text)
    found = find_answer(text)
    answer = extract_mathematics(found) if found else ""
    return f"\\boxed{{{answer}}}" if answer else None


def _are_equal(judge: Judge, answers: Sequence[str], other: str) -> list[bool | None]:
    return [answer == other for answer in answers]


def _are_near(judge: Judge, answers: Sequence[str], other: str) -> list[bool | None]:
    return [are_near(_fraction(answer), _fraction(other)) for answer in answers]


def _fraction(answer: str) -> Fraction:
    """The number that ``extract_answer`` has written."""
    return Fraction(*(int(part, 16) for part in answer.split("/")))


def _ask_server_same_math(judge: Judge, answers: Sequence[str], other: str) -> list[bool | None]:
    """By the server of rewards."""
    assert judge.client is not None, "answers of mathematics have a server"
    numbers = [judge.client.submit(Answer(SAME_MATH, "", answer, other)) for answer in answers]
    verdicts = judge.client.wait_for_verdicts(numbers)
    return [None if verdicts[n].failure else verdicts[n].reward >= 1.0 for n in numbers]


_COMPARE = {"boxed": _are_equal, "choice": _are_equal, "numeric": _are_near, "math": _ask_server_same_math}
