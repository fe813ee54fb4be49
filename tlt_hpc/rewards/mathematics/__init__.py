"""Compares two answers as mathematics: exactly where they are rational, otherwise by two ways that must agree.

The first way evaluates the tree that ``expression.py`` reads, with mpmath; the second reads the same text with
latex2sympy2_extended and evaluates it with sympy at other points. docs/rewards.md states the rules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tlt_hpc.rewards.answer import Failure, Verdict
from tlt_hpc.rewards.final_answer import extract_mathematics, find_answer
from tlt_hpc.rewards.mathematics.compare import AnswerComparison
from tlt_hpc.rewards.mathematics.expression import MAX_CHARACTERS, parse_expression
from tlt_hpc.rewards.mathematics.node import Node, UnreadableError
from tlt_hpc.rewards.mathematics.notation import normalise_notation, to_plain_words

_LETTERS = re.compile(r"[a-z]{3,}")
"""An answer of letters alone is a word, whose letters have an order: no product of variables."""
_LIST = re.compile(r"[,;]|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_LETTER_IN_BRACKETS = re.compile(r"\(([A-Z])\)")
_BRACKET = re.compile(r"[(\[|^_]|\\(?!text)")
_WORD = re.compile(r"\\text|(?<![\\A-Za-z])[A-Za-z]{2,}")
_JUNCTION = re.compile(r"\b(?:and|or)\b")
_COMMA = re.compile(r"\d,\d{3}")


@dataclass(frozen=True)
class Reading:
    """An answer as it was read: in one notation, and as a tree; None if it is no mathematics."""

    text: str
    tree: Node | None


@lru_cache(maxsize=64)
def parse_answer(answer: str, commas_separate: bool = False) -> Reading:
    """The reading of an answer's text; ``commas_separate``: none of its commas stands between thousands."""
    if len(answer) > MAX_CHARACTERS:
        return Reading(answer.strip(), None)
    text = normalise_notation(answer, commas_separate)
    if _LETTERS.fullmatch(text):
        return Reading(text, None)
    try:
        return Reading(text, parse_expression(text))
    except UnreadableError:
        return Reading(text, None)


def mathematical_equality_verdict(text: str, truth: str, is_finished: bool = True) -> Verdict:
    """1.0 if the response's answer is mathematically equal to the data's."""
    box = find_answer(truth) if "\\boxed" in truth or "\\fbox" in truth else None
    expected = box.text if box else truth
    wanted = parse_answer(expected)
    if not wanted.text:
        return Verdict(0.0, Failure.UNREADABLE, f"answer {truth[:80]!r} cannot be read as mathematics")
    found = find_answer(text, is_finished)
    given = parse_answer(extract_mathematics(found)) if found else Reading("", None)
    if found is None or not given.text:
        return Verdict(0.0, detail="the response gives no answer")
    verdict = _compare_readings(given, wanted)
    if not verdict.reward and (_COMMA.search(found.text) or _COMMA.search(expected)):
        as_lists = _compare_readings(parse_answer(extract_mathematics(found), True), parse_answer(expected, True))
        return as_lists if as_lists.reward else verdict
    return verdict


def answer_equality_verdict(text: str, other: str) -> Verdict:
    """1.0 if two responses give equal answers; unreadable if the first gives no answer."""
    found = [find_answer(each) for each in (text, other)]
    given, wanted = (parse_answer(extract_mathematics(each)) if each else Reading("", None) for each in found)
    if not given.text:
        return Verdict(0.0, Failure.UNREADABLE, "no answer")
    return _compare_readings(given, wanted)


def warm_up_caches() -> None:
    """Have everything imported, compiled and cached that answers would have to wait for, in every fork again."""
    for text, truth in _USUAL:
        mathematical_equality_verdict(f"\\boxed{{{text}}}", truth)


_USUAL = (
    ("\\frac{2}{4}", "\\frac{1}{2}"), ("(x+1)^2", "x^2+2x+1"), ("(-\\infty,1)\\cup(2,3]", "x<1 or 2<x\\le 3"),
    ("\\{1, \\sqrt{8}\\}", "\\{1, 2\\sqrt{2}\\}"), ("\\sin(2x)", "2\\sin x\\cos x"), ("\\frac{\\ln 8}{\\ln 2}", "3"),
    ("\\frac{\\pi}{2}-1", "\\frac{\\pi-2}{2}"), ("e^{2}\\cdot e", "e^3"), ("|x-1|", "|1-x|"), ("\\text{A}", "B"),
)  # fmt: skip
"""Answers of usual forms. What reading one has left in caches makes the next like it several times as fast."""


def _compare_readings(given: Reading, wanted: Reading) -> Verdict:
    shown = given.text
    if given.text == wanted.text or _remove_needless_spaces(given.text) == _remove_needless_spaces(wanted.text):
        return Verdict(1.0, read=shown)
    has_words = any(_WORD.search(reading.text) or reading.tree is None for reading in (given, wanted))
    is_same = has_words and _same_words(given.text, wanted.text)
    if is_same or given.tree is None or wanted.tree is None:
        return Verdict(float(is_same), detail="" if is_same else f"other words than {wanted.text[:80]!r}", read=shown)
    comparison = AnswerComparison()
    if not comparison.are_equal_collecting_pairs(given.tree, wanted.tree):
        return Verdict(0.0, detail=f"not equal to {wanted.text[:80]!r}", read=shown)
    if comparison.pairs and not _are_confirmed_by_sympy(comparison.pairs):
        return Verdict(
            0.0,
            detail=f"disputed: only one of two ways finds it equal to {wanted.text[:80]!r}",
            read=shown,
            is_disputed=True,
        )
    return Verdict(1.0, read=shown)


def _are_confirmed_by_sympy(pairs: Sequence[tuple[Node, Node]]) -> bool:
    """True if the second way finds all pairs equal, too."""
    # imported here, as sympy takes 0.5 s and most answers need none
    from tlt_hpc.rewards.mathematics.sympy_check import is_confirmed_by_sympy

    return all(is_confirmed_by_sympy(*pair) for pair in pairs)


def _remove_needless_spaces(text: str) -> str:
    """The text without blanks that separate nothing."""
    return re.sub(r"(?<![A-Za-z0-9.]) | (?![A-Za-z0-9.])", "", text)


def _same_words(given: str, wanted: str) -> bool:
    """True if two answers that are no mathematics are the same words, or the same list of them in any order."""
    if max(len(given), len(wanted)) > MAX_CHARACTERS:
        return given == wanted
    texts = [_LETTER_IN_BRACKETS.sub(r"\1", _TEXT.sub(r" \1 ", text)) for text in (given, wanted)]
    lists = [_LIST.split(text) if not _BRACKET.search(text) else [text] for text in texts]
    words = [sorted(filter(None, (_remove_needless_spaces(to_plain_words(part)) for part in each))) for each in lists]
    junctions = [set(_JUNCTION.findall(text)) for text in texts]
    return words[0] == words[1] != [] and (junctions[0] == junctions[1] or not all(junctions))
