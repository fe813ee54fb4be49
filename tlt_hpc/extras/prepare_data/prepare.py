"""Makes prompts with answers from the rows of a known data set: each question once, and none with two answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tlt_hpc.data.files import KnownSet
from tlt_hpc.data.rows import Row, RowError, Rows

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
"""Follows every question. All kinds of reward that compare answers read a box."""


_DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem."
)
_DAPO_AFTER = 'Remember to put your answer on its own line after "Answer:".'
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")


def as_text(value: Any) -> str:
    """A cell as text; empty if it is null or NaN."""
    if isinstance(value, str):
        return value.strip()
    return "" if value is None or value != value else str(value)


def gsm8k_answer(solution: Any) -> str:
    """The number after the last ``####``, without separators of thousands; empty if there is none."""
    _, mark, number = as_text(solution).rpartition("####")
    return number.replace(",", "").strip() if mark else ""


def math_answer(solution: Any) -> str:
    r"""The content of the last ``\boxed{}`` or ``\fbox{}``; empty if there is none or it is not closed."""
    text = as_text(solution)
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return ""
    start = boxes[-1].end()
    if text[start : start + 1] != "{":  # LaTeX takes a single character: \boxed 5 is written in some solutions
        return text[start:].partition("$")[0].strip()
    depth = 0
    for mark in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):  # \{ and \} are no braces of LaTeX
        depth += (mark[0] == "{") - (mark[0] == "}")
        if depth == 0:
            return text[start + 1 : start + mark.start()].strip()
    return ""


def dapo_question(prompt: Any) -> str:
    """The user's message without the instruction around the question; empty if there is none."""
    if isinstance(prompt, list):
        users = [each for each in prompt if isinstance(each, Mapping) and each.get("role") == "user"]
        prompt = users[-1].get("content") if users else None
    return as_text(prompt).removeprefix(_DAPO_BEFORE).removesuffix(_DAPO_AFTER).strip()


_READERS = {
    "dapo-math": (dapo_question, as_text),
    "aime-2024": (dapo_question, as_text),
    "gsm8k": (as_text, gsm8k_answer),
    "math": (as_text, math_answer),
}
"""By data set, what reads a question's cell and an answer's; ``as_text`` where it is not here."""


class ColumnError(LookupError):
    """A row lacks a column; ``index`` is the row's."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


@dataclass
class Question:
    """A question, and the rows that ask it."""

    text: str
    answer: str
    first: int
    """Index of its first row."""
    num_rows: int = 0
    other: int | None = None
    """Index of the first row that has another answer."""
    other_answer: str = ""


@dataclass(frozen=True)
class Prepared:
    """The result of reading the rows of a data set: questions that are kept, and counts of the rest."""

    num_rows: int
    num_unanswered: int
    """Rows without a question or a final answer."""
    kept: tuple[Question, ...]
    """Each is written, in the order of their first rows."""
    conflicts: tuple[Question, ...]
    """Questions that have several answers: it is unknown which is right, so none of their rows is written."""

    @property
    def num_duplicates(self) -> int:
        """Rows that repeat a question that is written."""
        return sum(question.num_rows - 1 for question in self.kept)

    @property
    def num_conflicting(self) -> int:
        """Rows of the questions that have several answers."""
        return sum(question.num_rows for question in self.conflicts)


def collect_questions(rows: Rows, known: KnownSet) -> Prepared:
    """Read every row.

    Raises:
        RowError: a row cannot be read, or cannot be written as UTF-8.
        ColumnError: a row lacks a column of this data set.
    """
    questions, num_unanswered = dict[str, Question](), 0
    question_of, answer_of = _READERS.get(known.name, (as_text, as_text))
    for index in range(len(rows)):
        row = rows[index]
        text = question_of(_cell(row, known.question, index))
        answer = answer_of(_cell(row, known.answer, index))
        if not text or not answer:
            num_unanswered += 1
            continue
        key = " ".join(text.split())
        question = questions.get(key)
        if question is None:
            _check_encodable(text + answer, rows.row_location(index))
            question = questions[key] = Question(text, answer, index)
        question.num_rows += 1
        if question.other is None and answer != question.answer:
            question.other, question.other_answer = index, answer
    kept = tuple(each for each in questions.values() if each.other is None)
    conflicts = tuple(each for each in questions.values() if each.other is not None)
    return Prepared(len(rows), num_unanswered, kept, conflicts)


def to_jsonl(prepared: Prepared, known: KnownSet) -> bytes:
    """The file that a run reads."""
    rows = (
        {"prompt": f"{each.text}\n\n{INSTRUCTION}", "answer": each.answer, "data_source": known.source}
        for each in prepared.kept
    )
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def top_columns(known: KnownSet) -> frozenset[str]:
    """The top-level columns that are read."""
    return frozenset(name.partition(".")[0] for name in (known.question, known.answer))


def _cell(row: Row, column: str, index: int) -> Any:
    """A row's value; None where what a dotted name leads through is null."""
    found: Any = row
    for name in column.split("."):
        if found is None:
            return None
        if not isinstance(found, Mapping) or name not in found:
            raise ColumnError(index)
        found = found[name]
    return found


def _check_encodable(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowError(where, "has half of a surrogate pair; fix the row") from None
