"""Makes prompts with answers from the rows of a known data set: each question once, and none with two answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tlt_hpc.data.known import KnownSet
from tlt_hpc.data.rows import Row, RowError, Rows

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
"""Follows every question. All kinds of reward that compare answers read a box."""


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


def prepare(rows: Rows, known: KnownSet) -> Prepared:
    """Read every row.

    Raises:
        RowError: a row cannot be read, or cannot be written as UTF-8.
        ColumnError: a row lacks a column of this data set.
    """
    questions, num_unanswered = dict[str, Question](), 0
    for index in range(len(rows)):
        row = rows[index]
        text = known.question_of(_cell(row, known.question, index))
        answer = known.answer_of(_cell(row, known.answer, index))
        if not text or not answer:
            num_unanswered += 1
            continue
        key = " ".join(text.split())
        question = questions.get(key)
        if question is None:
            _check_text(text + answer, rows.where(index))
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


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowError(where, "has half of a surrogate pair; fix the row") from None
