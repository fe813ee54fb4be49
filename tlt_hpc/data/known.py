"""Data sets that ``tlt data prepare`` reads: where they are on the hub, their columns, question and final answer.

Imports nothing heavy.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class KnownSet:
    """A data set of the hub."""

    name: str
    repository: str
    folder: str
    """Where the pages download it to."""
    files: str
    """Those to train on, or the only ones; a pattern within the repository."""
    source: str
    """``data_source`` of its rows: verl's name, which reward functions look at."""
    question: str
    """Its column."""
    answer: str
    """Its column; a dot selects a field within one."""
    question_of: Callable[[Any], str] = as_text
    answer_of: Callable[[Any], str] = as_text

    @property
    def output(self) -> Path:
        """Where it is written unless another place is given; the shipped jobs read it there."""
        return Path("data") / f"{self.name.replace('-', '_')}.jsonl"

    @property
    def download(self) -> str:
        """The command that downloads it."""
        return f"hf download {self.repository} --repo-type dataset --local-dir {self.folder}"

    def commands(self, output: str) -> str:
        """The commands that download it and write the file ``output``."""
        prepare = f"tlt data prepare {self.name} {self.folder}/{self.files} --output {shlex.quote(output)}"
        return f"{self.download} && {prepare}"


_DAPO = ("prompt", "reward_model.ground_truth", dapo_question)
KNOWN = {
    known.name: known
    for known in (
        KnownSet("dapo-math", "BytedTsinghua-SIA/DAPO-Math-17k", "data/dapo", "data/*.parquet", "math_dapo", *_DAPO),
        KnownSet(
            "gsm8k", "openai/gsm8k", "data/gsm8k", "main/train-*.parquet", "openai/gsm8k", "question", "answer",
            answer_of=gsm8k_answer,
        ),
        KnownSet(
            "math", "EleutherAI/hendrycks_math", "data/math", "*/train-*.parquet", "DigitalLearningGmbH/MATH-lighteval",
            "problem", "solution", answer_of=math_answer,
        ),
        KnownSet(
            "math-500", "HuggingFaceH4/MATH-500", "data/math500", "test.jsonl", "HuggingFaceH4/MATH-500", "problem",
            "answer",
        ),
        KnownSet("aime-2024", "BytedTsinghua-SIA/AIME-2024", "data/aime", "data/*.parquet", "aime2024", *_DAPO),
    )
}  # fmt: skip


def known_by_output(path: Path) -> KnownSet | None:
    """The data set whose prepared file has this name; None if none has."""
    return next((known for known in KNOWN.values() if known.output.name == path.name), None)
